"""The numbers of stages in a plan file: each is written once where stages have the same.

"every_stage": {"transient_bytes": 69206016}                    of every stage that does not say otherwise
"figures": {"fields": ["forward_time", "backward_time"],        of the stages with "figures": "A" and "figures": "B"
            "A": [0.00066, 0.0015], "B": [0.00096, 0.0022]}

Left out where they follow from others: bytes of gradients that are those of parameters, bytes of the optimizer's step
that are half of its state, and the peak memory of a device that an earlier stage says; null where there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.errors.names import near
from autopar.plan.file_format.folding import definition_name
from autopar.plan.recompute import NAMES, Recompute

EVERY, FIGURES, _FIELDS = "every_stage", "figures", "fields"
_PEAK, _RECOMPUTE, _SHARDING, _RATIOS = "peak_memory", "recompute", "sharding", "size_ratios"
_WORTH = 100  # characters that a table saves, or numbers stand with their stages
_ROW, _USE, _TABLE = 10, 16, 30  # characters, about, of a row, of naming it, and of the rest of the table
_Cell = tuple[type, Any] | None  # 1 and 1.0 are equal, but are not written alike


# -- writing ----------------------------------------------------------------------------------------------------------


def take_figures(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """ "every_stage" and "figures", if any; these numbers are taken out of the stages."""
    _leave_out(stages)
    numbers = (name for stage in stages for name, value in stage.items() if type(value) in (int, float))
    said_none = {name for stage in stages for name, value in stage.items() if value is None}
    names = [name for name in dict.fromkeys(numbers) if name not in said_none]
    columns = {name: [_cell(stage.get(name)) for stage in stages] for name in names}
    usual = {name: found for name in names if (found := _usual(columns[name])) is not None}
    apart = {
        name: _with_usual(name, columns[name], usual[name]) if name in usual else _apart(name, columns[name])
        for name in names
    }
    chosen = _chosen(names, columns, apart)
    shared: dict[str, Any] = {}
    every = {name: value[1] for name, value in usual.items() if name not in chosen} | _settings(stages)
    if every:
        shared[EVERY] = every
    for stage in stages:
        for name in every:
            if repr(stage.get(name)) == repr(every[name]):
                stage.pop(name, None)
            elif name == _RECOMPUTE:
                stage.setdefault(name, NAMES[Recompute.NONE])
    if chosen:
        shared[FIGURES] = _table(stages, chosen, columns)
    return shared


def _settings(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of what is no number, what most stages have."""
    found = {}
    for name in (_RECOMPUTE, _SHARDING, _RATIOS):
        values = {repr(stage[name]): stage[name] for stage in stages if name in stage}
        times = Counter(repr(stage.get(name)) for stage in stages)
        usual = max(values, key=lambda text: times[text], default="")
        if 2 * times[usual] > len(stages) > 1 and (
            name == _RECOMPUTE or len(stages) == sum(times[text] for text in values)
        ):
            found[name] = values[usual]
    return found


def _leave_out(stages: list[dict[str, Any]]) -> None:
    """Without what `_complete` restores."""
    for stage, follows in zip(stages, list(_following(stages)), strict=True):
        for name, value in follows.items():
            if name not in stage:
                stage[name] = None
            elif _cell(stage[name]) == _cell(value):
                del stage[name]


def _following(stages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For every stage, numbers that follow from others."""
    peaks: dict[str, Any] = {}  # of devices
    for stage in stages:
        found = {}
        if _cell(stage.get("parameter_bytes")) is not None:
            found["gradient_bytes"] = stage["parameter_bytes"]
        state = stage.get("optimizer_bytes")
        if type(state) is int and state % 2 == 0:
            found["step_bytes"] = state // 2
        devices = repr(stage.get("devices"))
        if devices in peaks:
            found[_PEAK] = peaks[devices]
        peak = stage.get(_PEAK, found.get(_PEAK))
        if _cell(peak) is not None:
            peaks[devices] = peak
        yield found


def _cell(value: Any) -> _Cell:
    return (type(value), value) if type(value) in (int, float) else None


def _usual(column: Sequence[_Cell]) -> _Cell:
    """What most stages have, of numbers that all have."""
    value, times = Counter(column).most_common(1)[0]
    return value if times > 1 and None not in column else None


def _length(cell: _Cell) -> int:
    return len(repr(cell[1])) if cell is not None else len("null")


def _apart(name: str, column: Sequence[_Cell]) -> int:
    """Characters of the numbers in their stages."""
    return sum(len(name) + _length(cell) + 6 for cell in column if cell is not None)


def _with_usual(name: str, column: Sequence[_Cell], usual: _Cell) -> int:
    return _apart(name, [usual]) + _apart(name, [cell for cell in column if cell != usual])


def _chosen(names: Sequence[str], columns: dict[str, list[_Cell]], apart: dict[str, int]) -> list[str]:
    """The fields of a table that makes the file shortest; none where it hardly does."""

    def cost(some: Sequence[str]) -> int:
        rows = set(zip(*(columns[name] for name in some), strict=True))
        length = sum(apart[name] for name in names if name not in some)
        if not some:
            return length
        cells = sum(_length(cell) + 2 for row in rows for cell in row)
        return (
            length
            + cells
            + sum(len(name) + 4 for name in some)
            + _ROW * len(rows)
            + _USE * len(columns[names[0]])
            + _TABLE
        )

    chosen = list(names)
    best = cost(chosen)
    shorter = True
    while shorter:
        shorter = False
        for name in names:
            other = [one for one in names if (one in chosen) != (one == name)]
            if cost(other) < best:
                chosen, best, shorter = other, cost(other), True
    return chosen if best + _WORTH < cost([]) else []


def _table(stages: list[dict[str, Any]], chosen: Sequence[str], columns: dict[str, list[_Cell]]) -> dict[str, Any]:
    rows: dict[tuple[_Cell, ...], str] = {}
    for stage, row in zip(stages, zip(*(columns[name] for name in chosen), strict=True), strict=True):
        for name in chosen:
            stage.pop(name, None)
        stage[FIGURES] = rows.setdefault(row, definition_name(len(rows)))
    table = {name: [cell[1] if cell is not None else None for cell in row] for row, name in rows.items()}
    return {_FIELDS: list(chosen), **table}


# -- reading ----------------------------------------------------------------------------------------------------------


def with_figures(data: dict[str, Any], problems: list[str]) -> None:
    """Put "every_stage" and "figures" of a file into its stages."""
    every = data.pop(EVERY, {})
    if not isinstance(every, dict):
        problems.append(f"{EVERY} must be an object of fields that all stages have, got {every!r}")
        every = {}
    rows = _rows(data.pop(FIGURES, {}), problems)
    if not isinstance(data.get("stages"), list):
        return
    stages = []
    for number, stage in enumerate(data["stages"]):
        if isinstance(stage, dict):
            stage = dict(stage)
            name = stage.pop(FIGURES, None)
            if name is not None and (not isinstance(name, str) or name not in rows):
                problems.append(
                    f"stages[{number}].{FIGURES} must name a row of '{FIGURES}', got {name!r}{near(str(name), rows)}"
                )
            stage = {**every, **(rows.get(name, {}) if isinstance(name, str) else {}), **stage}
        stages.append(stage)
    known = [stage for stage in stages if isinstance(stage, dict)]
    for stage, follows in zip(known, _following(known), strict=True):
        stage.update({name: value for name, value in follows.items() if name not in stage})
    data["stages"] = stages


def _rows(table: Any, problems: list[str]) -> dict[str, dict[str, Any]]:
    """By name the fields of every row."""
    if not isinstance(table, dict):
        problems.append(f"{FIGURES} must be an object with the names of '{_FIELDS}' and rows of numbers, got {table!r}")
        return {}
    fields = table.get(_FIELDS, [])
    if not isinstance(fields, list) or any(not isinstance(name, str) for name in fields):
        problems.append(f"{FIGURES}.{_FIELDS} must be a list of names of fields, got {fields!r}")
        return {name: {} for name in table}
    found: dict[str, dict[str, Any]] = {}
    for name, row in table.items():
        if name == _FIELDS:
            continue
        if not isinstance(row, list) or len(row) != len(fields):
            problems.append(
                f"{FIGURES}.{name} must be a list of {len(fields)} numbers, one for each of '{_FIELDS}', got {row!r}"
            )
            found[name] = {}
        else:
            found[name] = {field: value for field, value in zip(fields, row, strict=True) if value is not None}
    return found
