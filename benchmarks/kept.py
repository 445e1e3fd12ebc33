"""Results as they come: an interrupted run keeps what it has, and the next run goes on from there.

A benchmark consists of cases, such as a model, and a case may have rounds. Each is a line of `NAME.partial.jsonl`,
written as soon as it is there:

    {"on": {"processor": ..., "torch": ...}}                                 what all lines depend on
    {"key": ["BERT", "plans"], "date": "2026-11-22 10:00 UTC", "value": ...}
    {"key": ["BERT", "rounds", 0], "date": ..., "value": {"autopar": 0.81, "DDP": 0.84}}
    {"key": ["BERT", "roun                                                   cut off: this one is run again

Values that a run reads are always those that its file would hold, so that a run that went on and an undisturbed one
report the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent
_CODE = ("autopar", "cost_models", "benchmarks")  # folders whose code results depend on

Row = TypeVar("Row")


class Kept:
    """Values by key. Keys are names and numbers."""

    def __init__(
        self, path: Path | None = None, on: Mapping[str, str] | None = None, *, date: Callable[[], str] | None = None
    ) -> None:
        """
        Args:
            path: of the file; None: values are kept in memory alone.
            on: what the values depend on (machine, versions, code). A file with another one is moved to
                `NAME.other.jsonl`, and the run starts from nothing.
            date: the time of a new value, as text.
        """
        self._path, self._on, self._prefix = path, dict(on or {}), ()
        self._date = date or (lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
        self._lines: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def part(self, *key: str | float) -> Kept:
        """The values whose keys begin with `key`: a view of the same file."""
        part = Kept.__new__(Kept)
        part.__dict__ = {**self.__dict__, "_prefix": (*self._prefix, *key)}
        return part

    def case(self, *key: str | float, make: Callable[[], Any]) -> Any:
        """The value of a key. `make` is called where there is none, and returns what JSON can hold."""
        if (*self._prefix, *key) not in self._lines:
            self.put(*key, value=make())
        return self.get(*key)

    def get(self, *key: str | float) -> Any:
        """The value of a key, or None."""
        line = self._lines.get((*self._prefix, *key))
        return None if line is None else line["value"]

    def put(self, *key: str | float, value: Any) -> None:
        """Write a value, to the disk before this returns."""
        whole = (*self._prefix, *key)
        text = json.dumps({"key": whole, "date": self._date(), "value": value})
        if self._path is not None:
            self._append(self._path, text)
        self._lines[whole] = json.loads(text)

    def drop(self) -> None:
        """Forget all values of the file, once the results are written."""
        self._lines.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def dates(self) -> str:
        """When the values were made: one date, or the first and the last one; "" without values."""
        dates = sorted({line["date"] for line in self._lines.values()})
        return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""

    @property
    def count(self) -> int:
        """Values so far."""
        return len(self._lines)

    def _append(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            if file.tell() == 0:
                file.write(json.dumps({"on": self._on}) + "\n")
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        lines = [line for text in path.read_text(errors="replace").splitlines() if (line := _parsed(text)) is not None]
        on = lines[0].get("on") if lines else None
        if on != self._on:
            names = [name for name in {**(on or {}), **self._on} if (on or {}).get(name) != self._on.get(name)]
            aside = path.with_suffix(".other" + path.suffix)
            os.replace(path, aside)
            log.warning("%s is from another %s; moved to %s, all is run anew", path, ", ".join(names), aside)
            return
        self._lines = {tuple(line["key"]): line for line in lines[1:] if "key" in line}
        # Without a line that was cut off: what is appended next would be a part of it.
        whole = path.with_suffix(".whole")
        whole.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(whole, path)
        log.info("%s: %d results of an interrupted run (%s); going on from there", path, len(self._lines), self.dates)


def _parsed(text: str) -> dict[str, Any] | None:
    """The line of a file; None for what was cut off, or is none of these lines."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    key = line.get("key")
    named = isinstance(key, list) and all(isinstance(one, (str, int, float)) for one in key)
    return line if (named and {"date", "value"} <= line.keys()) or isinstance(line.get("on"), dict) else None


def as_row(kind: Callable[..., Row], values: Mapping[str, Any]) -> Row:
    """A dataclass of its `asdict`, as JSON has it: lists become tuples again."""
    return kind(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return value


def depends_on(header: Mapping[str, str], leave_out: Sequence[str]) -> dict[str, str]:
    """What results depend on: the machine as a header has it, but for what changes from minute to minute, and the
    code."""
    return {name: text for name, text in header.items() if name not in leave_out} | {"code": _digest_of_the_code()}


def _digest_of_the_code() -> str:
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
