"""A history of predicted and measured step times on disk, from which the error of predictions is computed.

An SQLite file in the directory of the measurement cache has one row per record. Records are appended and never changed;
beyond `MOST_RECORDS` the oldest are dropped. Every call is one transaction, so several processes may append at the same
time. A history that cannot be written or read never stops a job: a warning goes to the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import nn

from autopar.plan.fingerprint import fingerprint
from autopar.plan.plan import Plan
from autopar.version import __version__
from cost_models import Device
from cost_models.measuring.cache import cache_directory
from cost_models.measuring.sqlite_file import BUSY_SECONDS, is_corrupt, move_aside_if_damaged, using

log = logging.getLogger(__name__)

MOST_RECORDS = 10_000

_FORMAT = 1  # of a record's JSON; records of another are skipped


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("autopar", "torch", "model", "fingerprint", "schedule", "source", "costs"), (str,)),
    **dict.fromkeys(("batch_size", "stages", "devices", "n_microbatches", "steps"), (int,)),
    **dict.fromkeys(("predicted", "measured"), (int, float)),
    **dict.fromkeys(("predicted_memory", "measured_memory"), (int, type(None))),
    "training": (bool,),
}
"""The types of a record's fields in JSON, `time` and `device_kinds` left out."""


@dataclass(frozen=True)
class Record:
    """The step of one plan, predicted and measured."""

    time: datetime  # UTC, when it was measured
    autopar: str  # version
    torch: str  # version
    device_kinds: tuple[str, ...]  # of the devices that the plan uses, each once
    model: str  # its class
    fingerprint: str  # digest of the names and shapes of its parameters
    training: bool  # whether the step has a backward
    batch_size: int  # samples
    schedule: str
    stages: int
    devices: int  # that the plan uses
    n_microbatches: int
    predicted: float  # s a step
    measured: float  # s a step, the median of `steps`
    steps: int  # that count
    predicted_memory: int | None  # bytes at the peak of the fullest device
    measured_memory: int | None  # bytes at the peak of the fullest device
    source: str  # what ran it: "compare", "tune" or "train_step"
    costs: str  # what the prediction was made from: "measured" or "estimated"

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: nn.Module,
        devices: Sequence[Device],
        steps: Sequence[float],
        *,
        source: str,
        costs: str = "measured",
        predicted_memory: int | None = None,
        measured_memory: int | None = None,
    ) -> Self:
        """The record of a plan with predictions that just ran on `devices`.

        `steps`: seconds of each step that counts.
        """
        assert plan.predicted_step_time is not None
        assert plan.batch_size is not None
        used = plan.used_devices
        return cls(
            time=datetime.now(UTC),
            autopar=__version__,
            torch=str(torch.__version__),
            device_kinds=tuple(dict.fromkeys(device.kind for device in devices if device.name in used)),
            model=type(model).__name__,
            fingerprint=hashlib.sha256(fingerprint(model).encode()).hexdigest()[:16],
            training=plan.training,
            batch_size=plan.batch_size,
            schedule=plan.schedule,
            stages=len(plan.stages),
            devices=len(used),
            n_microbatches=plan.n_microbatches,
            predicted=plan.predicted_step_time,
            measured=median(steps),
            steps=len(steps),
            predicted_memory=predicted_memory,
            measured_memory=measured_memory,
            source=source,
            costs=costs,
        )

    @property
    def error(self) -> float:
        """(predicted - measured) / measured: above 0 where the step was faster than predicted."""
        return self.predicted / self.measured - 1

    @property
    def kind(self) -> str:
        """The kinds of its devices as one name."""
        return " + ".join(self.device_kinds)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self), "time": self.time.isoformat()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that `to_json` wrote. Raises ValueError for anything else."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
            raise ValueError(f"not a record of format {_FORMAT}")
        if data.keys() != {field.name for field in fields(cls)}:
            raise ValueError("the fields are not those of a record")
        try:
            data["time"] = datetime.fromisoformat(data["time"])
            data["device_kinds"] = tuple(data["device_kinds"])
            usable = data["predicted"] >= 0 and data["measured"] > 0 and data["time"].tzinfo is not None
        except TypeError as error:
            raise ValueError(f"a field of the wrong type: {error}") from error
        wrong = [name for name, types in _TYPES.items() if type(data[name]) not in types]
        if wrong or not all(isinstance(kind, str) for kind in data["device_kinds"]):
            raise ValueError(f"fields of the wrong type: {', '.join(wrong) or 'device_kinds'}")
        if not all(data[name] < math.inf for name in ("predicted", "measured")):
            raise ValueError("predicted and measured seconds must be finite")
        if not usable:
            raise ValueError("predicted or measured seconds are missing, or the time has no zone")
        return cls(**data)


def costs_of(plan: Plan) -> str:
    """The costs behind a plan's prediction: "estimated" where its notes say so and it was not measured since."""
    ahead = any(note.startswith("estimated from") for note in plan.notes)
    return "estimated" if ahead and plan.measured_step_time is None else "measured"


def history_path() -> Path:
    """The file that keeps the history, in the directory of the measurements (`cost_models.cache`)."""
    return cache_directory() / "accuracy.sqlite"


def remember(records: Sequence[Record], path: Path | None = None) -> None:
    """Append to the history (`path`: in place of the default). A damaged file is moved aside first."""
    path = history_path() if path is None else path
    rows = [(record.to_json(),) for record in records]
    try:
        try:
            _append(path, rows)
        except sqlite3.DatabaseError as error:
            if not is_corrupt(error):
                raise
            aside = move_aside_if_damaged(path)
            if aside is not None:
                log.warning("history %s is damaged (%s); moved to %s", path, error, aside)
            _append(path, rows)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        log.warning("predicted and measured steps are not recorded in %s: %s", path, error)


def recall(path: Path | None = None) -> tuple[Record, ...]:
    """The history, oldest first; empty without a file. Records that cannot be read are skipped."""
    path = history_path() if path is None else path
    if not path.exists():
        return ()
    try:
        with closing(_connect(f"{path.resolve().as_uri()}?mode=ro")) as connection:
            rows = connection.execute("SELECT record FROM records ORDER BY number").fetchall()
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        log.warning("history %s cannot be read: %s", path, error)
        return ()
    found, skipped = [], 0
    for (text,) in rows:
        try:
            found.append(Record.from_json(text))
        except (TypeError, ValueError):
            skipped += 1
    if skipped:
        log.warning("%d records of %s are damaged or of another version; skipped", skipped, path)
    return tuple(found)


def _append(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with using(path), closing(_connect(path.resolve().as_uri())) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")  # waits for other processes that write
        connection.execute(
            "CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL)"
        )
        connection.executemany("INSERT INTO records (record) VALUES (?)", rows)
        connection.execute("DELETE FROM records WHERE number <= (SELECT MAX(number) FROM records) - ?", [MOST_RECORDS])


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, timeout=BUSY_SECONDS, uri=True)
