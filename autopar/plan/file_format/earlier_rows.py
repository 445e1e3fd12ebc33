"""How plan files of formats 3 to 5 write the fields of a stage that have a row per operator, parameter or exchange.

field             rows                                  in a file
operators         (key,)                                "mlp.up: linear#0 add#0", "layers.0-7", "layers.8 as B"
strategies        (key, placements)                     "mlp.up: linear#0 add#0": "S0 R -> S0", "layers.0-7": "as A"
parameters        (name, placements)                    "mlp.up.weight": "S0", "layers.0-7": "as A"
redistributions   (tensor, reader, shared, own)         ["norm/mul#0", "", "S0 > R", "mlp.up/linear#0", ...],
                                                        [".weight", ...]: of the reader; ["layers.0-7", "as A"]
exchanges         (operator, tensor, numbers ...)       ["mlp.up/linear#0", "norm/mul#0", 1, ".weight", 2, 3],
                                                        ["layers.8", "as A[2:]"]: without two rows
repeated          (key, seconds)                        ["mlp.up: linear#0 add#0", 1e-6, 2e-6]
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from autopar.plan.file_format.fields import OPERATOR_LINE, operator_lines
from autopar.plan.file_format.folding import Row
from autopar.plan.file_format.operators import DEFAULT, LAYERS
from autopar.plan.file_format.tables import begin

ENTRY = re.compile(r"(?P<path>\S+)(?: as (?P<name>\S+))?(?: from (?P<start>\S+))?(?: before (?P<stop>\S+))?")
_PART = re.compile(r"as (?P<name>[^\[\] ]+)(?:\[(?P<start>\d{0,9}):(?P<stop>\d{0,9})\])?")
_NUMBER = (int, float)


class Kind(NamedTuple):
    """How a field with rows is read: `read` yields rows and what is folded, or says what is wrong."""

    name: str
    sharding: bool  # of a stage's sharding rather than of the stage
    value: Callable[[list[Row]], Any]  # in format 2
    read: Callable[[Any], Iterator[Row | Reference | str]]
    pairs: bool = False  # rows are (name, value), and the last one of a name counts


class Reference(NamedTuple):
    """Layers named in a file."""

    text: str
    path: str
    name: str  # of a definition
    start: str | int | None = None  # of the definition's rows: the name or the number of the first one
    stop: str | int | None = None  # ... and of the one behind the last one


def _read_operators(value: Any) -> Iterator[Row | Reference | str]:
    for index, entry in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(entry) if isinstance(entry, str) else None
        if line is not None:
            yield from ((f"{line[1]}/{name}",) for name in line[2].split(" "))
            continue
        found = ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if found is None or LAYERS.fullmatch(found["path"]) is None:
            yield (
                f"[{index}] must be like 'module.path: linear#0 relu#1', or layers such as 'model.layers.0-7', got "
                f"{entry!r}"
            )
        else:
            yield Reference(entry, found["path"], found["name"] or DEFAULT, found["start"], found["stop"])


def _read_pairs(value: Any) -> Iterator[Row | Reference | str]:
    for name, text in value.items() if isinstance(value, dict) else ():
        found = ENTRY.fullmatch(f"{name} {text}") if isinstance(text, str) and text.startswith("as ") else None
        line = OPERATOR_LINE.fullmatch(name)
        if found is not None and LAYERS.fullmatch(name):
            yield Reference(f"{name}: {text}", name, found["name"], found["start"], found["stop"])
        elif line is not None:
            yield from ((f"{line[1]}/{operator}", text) for operator in line[2].split(" "))
        else:
            yield name, text


def _row_reference(row: Any) -> Reference | None:
    """What `["model.layers.0-7", "as A[2:]"]` names."""
    if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or not isinstance(row[1], str):
        return None
    found = _PART.fullmatch(row[1])
    if found is None or not LAYERS.fullmatch(row[0]):
        return None
    start, stop = (int(text) if text else None for text in (found["start"], found["stop"]))
    return Reference(" ".join(row), row[0], found["name"], start, stop)


def _lists(
    what: str, *types: type | tuple[type, ...], more: type | tuple[type, ...] | None = None
) -> Callable[[Any], Iterator[Row | Reference | str]]:
    """Reads rows of these types, and of any number of values of the type `more`. `what`: the values, for errors."""

    def read(value: Any) -> Iterator[Row | Reference | str]:
        for index, row in enumerate(value if isinstance(value, list) else ()):
            reference = _row_reference(row)
            if reference is not None:
                yield reference
            elif not isinstance(row, list) or len(row) < len(types) or (len(row) > len(types) and more is None):
                example = "['model.layers.0-7', 'as A']"
                yield f"[{index}] must be [{what}], or layers such as {example}, got {row!r}"
            else:
                each = [*types, *[more or object] * (len(row) - len(types))]
                wrong = [cell for cell, kind in zip(row, each, strict=True) if not isinstance(cell, kind)]
                if wrong:
                    yield f"[{index}] has a value of a wrong type, {wrong[0]!r}, in {row!r}"
                else:
                    yield tuple(row)

    return read


def _read_redistributions(value: Any) -> Iterator[Row | Reference | str]:
    for entry in _lists("tensor, shared steps, own steps, readers ..", str, str, str, str, more=str)(value):
        if isinstance(entry, tuple) and not isinstance(entry, Reference):
            tensor, shared, own, *readers = entry
            whole = f"{readers[0].rpartition('/')[0]}{tensor}" if tensor.startswith(".") else tensor
            yield from ((whole, reader, shared or begin(own), own) for reader in readers)
        else:
            yield entry


def _read_repeated(value: Any) -> Iterator[Row | Reference | str]:
    each = _lists("operators, seconds ..", str, _NUMBER)
    for index, row in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(row[0]) if isinstance(row, list) and row and isinstance(row[0], str) else None
        names = [f"{line[1]}/{name}" for name in line[2].split(" ")] if line is not None else []
        if names and len(names) + 1 != len(row):
            yield f"[{index}] has {len(names)} operators and {len(row) - 1} numbers of seconds, {row!r}"
        for one in each([[name, seconds] for name, seconds in zip(names, row[1:], strict=False)] if names else [row]):
            yield one if not isinstance(one, str) else f"[{index}]{one[3:]}"


def _read_exchanges(value: Any) -> Iterator[Row | Reference | str]:
    each = _lists("operator, tensor, numbers ..", str, str, more=(int, str))
    for entry in each(value):
        if not isinstance(entry, tuple) or isinstance(entry, Reference):
            yield entry
            continue
        operator, *cells = entry
        starts = [index for index, cell in enumerate(cells) if isinstance(cell, str)]
        module = operator.rpartition("/")[0]
        for start, stop in itertools.pairwise([*starts, len(cells)]):
            tensor = f"{module}{cells[start]}" if cells[start].startswith(".") else cells[start]
            yield (operator, tensor, *cells[start + 1 : stop])


def _as_lists(rows: list[Row]) -> list[list[Any]]:
    return [list(row) for row in rows]


KINDS = (
    Kind("operators", False, lambda rows: operator_lines(row[0] for row in rows), _read_operators),
    *(Kind(name, True, dict, _read_pairs, pairs=True) for name in ("strategies", "parameters")),
    Kind("redistributions", True, _as_lists, _read_redistributions),
    Kind("exchanges", True, _as_lists, _read_exchanges),
    Kind(
        "repeated",
        True,
        lambda rows: [dict(zip(("operator", "seconds"), row, strict=True)) for row in rows],
        _read_repeated,
    ),
)
