"""Reads formats 5, 4 and 3 of a plan file as the fields of format 2. They have equal layers written once.

Format 4 has every transfer, and in every redistribution the first passage and the tensor's whole name. Format 3 has
besides a number for every collective, a row for every tensor of an operator's exchanges, and no "those of strategies
A".

field of format 2                                     here
operators, strategies, parameters, redistributions,   rows and layers (`folding.py`), definitions under "layers"
exchanges, repeated
numbers that most stages have                         "every_stage", unless a stage says otherwise
operators of a layer with strategies                  "those of strategies A", which names them already
exchanges [{"collective": "all_reduce", ...}, ...]    "exchanges": [[operator, tensor, 3], ...]: collectives[3]
recompute, selective, layerwise, keeps_products       "recompute": "full", as `Plan.by_hand` calls it
mesh [2, 4], axes ["data", "tensor"]                  "mesh": {"data": 2, "tensor": 4}
backward_bytes of a transfer                          left out where they are its forward_bytes
numbers, devices and transfers that are alike         `short_values.py`
device_kinds ["H100", "H100", ...]                    "device_kinds": "H100", if all are
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.errors.names import near
from autopar.plan.file_format.collectives import Collectives
from autopar.plan.file_format.earlier_rows import ENTRY, KINDS, Kind, Reference
from autopar.plan.file_format.fields import UNREADABLE
from autopar.plan.file_format.folding import FoldedLayers, Row, unfolded
from autopar.plan.file_format.operators import LAYERS, labels_of, range_of
from autopar.plan.file_format.stage_fields import with_devices, with_exchanges, with_mode_and_mesh
from autopar.plan.file_format.transfers import each_transfer

_LAYERS = "layers"
_COLLECTIVES, _TIMES = "collectives", "times"
_REPEATED = "repeated"  # the field with numbers of the table of times
_EVERY = "every_stage"
_OPERATORS, _STRATEGIES = "operators", "strategies"
_OF_STRATEGIES = "those of strategies "  # and a definition, which has the operators already


def flattened(data: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Format 5, 4 or 3, as the fields of format 2, as far as it can be read; what cannot goes into `problems`."""
    data = dict(data)
    times = data.pop(_TIMES, [])
    if not isinstance(times, list) or any(type(one) not in (int, float) for one in times):
        problems.append(f"{_TIMES} must be a list of numbers, got {times!r}")
        times = []
    layers = data.pop(_LAYERS, {})
    for parent, fields in layers.items() if isinstance(layers, dict) else ():
        for name, rows in fields.get(_REPEATED, {}).items() if _has_objects(fields, _REPEATED) else ():
            place = f"{_LAYERS}['{parent}'].{_REPEATED}.{name}"
            fields[_REPEATED][name] = with_numbers(rows, times, place, problems)
    definitions = _Definitions(layers, problems)
    collectives = Collectives.read(data.pop(_COLLECTIVES, []), problems)
    with_devices(data)
    if isinstance(data.get("transfers"), list):
        data["transfers"] = each_transfer(data["transfers"], problems, in_order=False)
    every = data.pop(_EVERY, {})
    if not isinstance(every, dict):
        problems.append(f"{_EVERY} must be an object of fields that all stages have, got {every!r}")
        every = {}
    if isinstance(data.get("stages"), list):
        data["stages"] = [{**every, **stage} if isinstance(stage, dict) else stage for stage in data["stages"]]
        data["stages"] = [
            _flat_stage(stage, f"stages[{number}].", definitions, collectives, times, problems)
            if isinstance(stage, dict)
            else stage
            for number, stage in enumerate(data["stages"])
        ]
    return data


def with_numbers(value: Any, table: Any, where: str, problems: list[str]) -> Any:
    """Rows with numbers in the place of their places in the table; a value that is no place goes into `problems`."""
    if not isinstance(value, list):
        return value
    found = []
    for index, row in enumerate(value):
        if not isinstance(row, list):
            found.append(row)
            continue
        wrong = [cell for cell in row if type(cell) is int and not 0 <= cell < len(table)]
        problems += [f"{where}[{index}] has number {cell}, but there are {len(table)} times" for cell in wrong[:1]]
        found.append([table[cell] if type(cell) is int and cell not in wrong else cell for cell in row])
    return found


def _has_objects(fields: Any, name: str) -> bool:
    return isinstance(fields, dict) and isinstance(fields.get(name), dict)


def _flat_stage(
    stage: dict[str, Any],
    where: str,
    definitions: _Definitions,
    collectives: Collectives,
    times: list[float],
    problems: list[str],
) -> dict[str, Any]:
    stage = with_mode_and_mesh(stage, where, problems)
    sharding = stage.get("sharding")
    if isinstance(sharding, dict):
        if _REPEATED in sharding:
            place = f"{where}sharding.{_REPEATED}"
            sharding[_REPEATED] = with_numbers(sharding[_REPEATED], times, place, problems)
        _take_from_layers(sharding, f"{where}sharding.", definitions, problems)
    for kind in KINDS:
        holder, place = (sharding, f"{where}sharding.") if kind.sharding else (stage, where)
        if isinstance(holder, dict) and kind.name in holder:
            holder[kind.name] = definitions.rows_of(kind, holder[kind.name], f"{place}{kind.name}")
    if isinstance(sharding, dict):
        with_exchanges(sharding, where, collectives, problems)
    return stage


def _take_from_layers(sharding: dict[str, Any], where: str, definitions: _Definitions, problems: list[str]) -> None:
    """Put the reference to layers in the place of all fields that are left out and that these layers have. Rows by name
    that the sharding has besides are exceptions."""
    if _LAYERS not in sharding:
        return
    text = sharding.pop(_LAYERS)
    found = ENTRY.fullmatch(text) if isinstance(text, str) else None
    match = LAYERS.fullmatch(found["path"]) if found is not None else None
    if found is None or match is None or not found["name"]:
        problems.append(f"{where}{_LAYERS} must be like 'model.layers.0-7 as A', got {text!r}")
        return
    kinds = [kind for kind in KINDS if kind.sharding and definitions.has(match["parent"] or "", kind, found["name"])]
    if not kinds:
        problems.append(f"{where}{_LAYERS}: '{text}': '{_LAYERS}' defines nothing '{found['name']}' of these layers")
    for kind in kinds:
        reference = f"as {found['name']}"
        if kind.pairs and isinstance(sharding.get(kind.name, {}), dict):
            sharding[kind.name] = {found["path"]: reference} | sharding.get(kind.name, {})
        elif not kind.pairs:
            sharding.setdefault(kind.name, [[found["path"], reference]])


class _Definitions:
    """What a file has under "layers"."""

    def __init__(self, layers: Any, problems: list[str]) -> None:
        self._problems = problems
        self._rows: dict[tuple[str, str], dict[str, list[Row]]] = {}
        kinds = {kind.name: kind for kind in KINDS}
        same: list[tuple[str, str, str, str]] = []  # operators that are those of a definition of strategies
        for place, parent, name, found in self._listed(layers):
            if name not in kinds:
                problems.append(f"{place} is unknown")
                continue
            for definition, value in found.items():
                rows: list[Row] = []
                other = value.removeprefix(_OF_STRATEGIES) if isinstance(value, str) and name == _OPERATORS else None
                if other is not None:
                    same.append((place, parent, definition, other))
                    continue
                if not isinstance(value, dict if kinds[name].pairs else list):
                    what = "an object from names to placements" if kinds[name].pairs else "a list"
                    problems.append(f"{place}.{definition} must be {what}, got {value!r}")
                for entry in kinds[name].read(value):
                    if isinstance(entry, Reference):
                        problems.append(f"{place}.{definition}: '{entry.text}' names layers inside of a layer")
                    elif isinstance(entry, str):
                        problems.append(f"{place}.{definition}{entry}")
                    else:
                        rows.append(entry)
                self._rows.setdefault((parent, name), {})[definition] = rows
        for place, parent, definition, other in same:
            known = self._rows.get((parent, _STRATEGIES), {})
            if other in known:
                self._rows.setdefault((parent, _OPERATORS), {})[definition] = [(row[0],) for row in known[other]]
            else:
                problems.append(
                    f"{place}.{definition} must be a list of operators, or '{_OF_STRATEGIES}A' for those of a "
                    f"definition of strategies{', which has ' + ', '.join(known) if known else ''}, got '{other}'"
                )

    def _listed(self, layers: Any) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """(place, parent, field, definitions)"""
        if not isinstance(layers, dict) or any(not isinstance(fields, dict) for fields in layers.values()):
            self._problems.append(f"{_LAYERS} must be an object from module paths to objects, got {layers!r}")
            return
        for parent, fields in layers.items():
            for name, found in fields.items():
                place = f"{_LAYERS}['{parent}'].{name}"
                if isinstance(found, dict):
                    yield place, parent, name, found
                else:
                    self._problems.append(f"{place} must be an object from names to definitions, got {found!r}")

    def has(self, parent: str, kind: Kind, name: str) -> bool:
        return name in self._rows.get((parent, kind.name), ())

    def rows_of(self, kind: Kind, value: Any, where: str) -> Any:
        """The field's value in format 2."""
        rows: list[Row] = []
        for entry in kind.read(value):
            if isinstance(entry, str):
                self._problems.append(f"{where}{entry}")
            elif isinstance(entry, Reference):
                try:
                    rows += self._expanded(kind, entry)
                except ValueError as error:
                    self._problems.append(f"{where}: '{entry.text}': {error}")
            else:
                rows.append(entry)
        if not isinstance(value, (dict if kind.pairs else list)):
            return value  # whose type is refused by whoever reads the fields
        if kind.pairs:
            rows = list(dict(rows).items())
        # Where nothing could be read, an empty list would be refused once more, as one without operators.
        return kind.value(rows) if rows or not value else UNREADABLE

    def _expanded(self, kind: Kind, entry: Reference) -> Iterator[Row]:
        """Raises ValueError."""
        match = LAYERS.fullmatch(entry.path)
        assert match is not None, "readers refuse other paths"
        parent = match["parent"] or ""
        known = self._rows.get((parent, kind.name))
        if known is None:
            defined = [name for name, field in self._rows if field == kind.name]
            raise ValueError(f"'{_LAYERS}' defines no {kind.name} of layers of '{parent}'{near(parent, defined)}")
        if entry.name not in known:
            raise ValueError(
                f"'{_LAYERS}' defines no {kind.name} '{entry.name}' of '{parent}'; it has {', '.join(known)}"
            )
        numbers = range_of(match)
        rows = known[entry.name]
        labels = labels_of(rows)
        ends: list[int | None] = []
        for label in (entry.start, entry.stop):
            if isinstance(label, str) and label not in labels:
                raise ValueError(f"such a layer has no '{label}'{near(label, labels)}")
            ends.append(labels.index(label) if isinstance(label, str) else label)
        return unfolded(FoldedLayers(parent, numbers[0], numbers[-1], entry.name, (ends[0] or 0, ends[1])), rows)
