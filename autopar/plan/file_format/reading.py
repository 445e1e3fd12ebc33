"""Reads format 6 of a plan file as the fields of format 2: the other way round from `writing.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.errors.names import near
from autopar.plan.file_format.collectives import Collectives
from autopar.plan.file_format.definitions import (
    LayerPart,
    Values,
    applied,
    by_layer,
    last_operators,
    out_of_layer,
    out_of_modules,
)
from autopar.plan.file_format.fields import UNREADABLE, operator_lines
from autopar.plan.file_format.figures import with_figures
from autopar.plan.file_format.folding import Layer, layer_of
from autopar.plan.file_format.names import OPERATORS, Known
from autopar.plan.file_format.operators import LAYERS, OperatorLines, range_of
from autopar.plan.file_format.order import layers_as, ordered
from autopar.plan.file_format.shared_layers import OF
from autopar.plan.file_format.short_values import long_description
from autopar.plan.file_format.stage_fields import with_devices, with_exchanges, with_mode_and_mesh
from autopar.plan.file_format.tables import ROWS, TABLES, LineValue, TableFormat, Wrong
from autopar.plan.file_format.transfers import each_transfer

_LAYERS, _COLLECTIVES = "layers", "collectives"
_OPERATORS = "operators"
_TABLES = {table.name: table for table in TABLES}


def flattened(data: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """As far as it can be read; what cannot goes into `problems`."""
    data = dict(data)
    layers = _Layers(data.pop(_LAYERS, {}), problems)
    collectives = Collectives.read_groups(data.pop(_COLLECTIVES, []), problems)
    if isinstance(data.get("stages"), list):
        data["stages"] = list(_in_turn(data["stages"]))
    with_figures(data, problems)
    with_devices(data)
    if isinstance(data.get("transfers"), list):
        data["transfers"] = each_transfer(data["transfers"], problems)
    if isinstance(data.get("runners_up"), list):
        data["runners_up"] = [_runner_up(one) for one in data["runners_up"]]
    if isinstance(data.get("stages"), list):
        data["stages"] = [
            _stage(stage, f"stages[{number}].", layers, problems) if isinstance(stage, dict) else stage
            for number, stage in enumerate(data["stages"])
        ]
        _read_shardings(data["stages"], layers, collectives, problems)
    return data


def _in_turn(stages: Sequence[Any]) -> Iterator[Any]:
    """Stages without devices have in turn those of the first ones."""
    first = list(itertools.takewhile(lambda stage: isinstance(stage, dict) and "devices" in stage, stages))
    for number, stage in enumerate(stages):
        if isinstance(stage, dict) and first:
            stage = {"devices": first[number % len(first)]["devices"], **stage}
        yield stage


def _runner_up(one: Any) -> Any:
    """[description, step_time]"""
    if not isinstance(one, list) or len(one) != 2:
        return one
    description, seconds = one
    text = long_description(description) if isinstance(description, str) else description
    return {"description": text, "step_time": seconds}


def _stage(stage: dict[str, Any], where: str, layers: _Layers, problems: list[str]) -> dict[str, Any]:
    """All but the sharding's tables. Its operators are keys, for now."""
    stage = with_mode_and_mesh(stage, where, problems)
    if isinstance(stage.get(_OPERATORS), list):
        lines = stage[_OPERATORS]
        keys = layers.operators.keys(lines, f"{where}{_OPERATORS}")
        # Where nothing could be read, an empty list would be refused once more, as one without operators.
        stage[_OPERATORS] = _Keys(keys) if keys or not lines else UNREADABLE
    return stage


class _Keys(list[str]):
    """Keys in the place of lines."""


class _Layers:
    """What a file has under "layers"."""

    def __init__(self, layers: Any, problems: list[str]) -> None:
        self._problems = problems
        self.operators = OperatorLines(problems)
        self.tables: dict[str, dict[str, dict[str, list[LineValue]]]] = {}  # by parent, table and definition
        self._hits: dict[tuple[str, str, str], dict[tuple[str, str], bool]] = {}
        if not isinstance(layers, dict) or any(not isinstance(fields, dict) for fields in layers.values()):
            problems.append(f"{_LAYERS} must be an object from module paths to objects, got {layers!r}")
            return
        for parent, fields in layers.items():
            for name, found in fields.items():
                place = f"{_LAYERS}['{parent}'].{name}"
                if not isinstance(found, dict):
                    problems.append(f"{place} must be an object from names to definitions, got {found!r}")
                elif name == _OPERATORS:
                    for definition, value in found.items():
                        self.operators.define(parent, definition, value, f"{place}.{definition}")
                elif name in _TABLES:
                    self.tables.setdefault(parent, {})[name] = self._definitions(_TABLES[name], found, place)
                else:
                    problems.append(f"{place} is unknown{near(name, (_OPERATORS, *_TABLES))}")

    def _definitions(self, table: TableFormat, found: dict[str, Any], place: str) -> dict[str, list[LineValue]]:
        definitions: dict[str, list[LineValue]] = {}
        for name, value in found.items():
            if isinstance(value, str) and value.removeprefix(OF) in definitions:
                definitions[name] = definitions[value.removeprefix(OF)]
            elif isinstance(value, str):
                self._problems.append(
                    f"{place}.{name} must be a definition, or '{OF}A' for that of an earlier one, got {value!r}"
                    f"{near(value.removeprefix(OF), definitions)}"
                )
                definitions[name] = []
            else:
                definitions[name] = _entries(table, value, f"{place}.{name}", self._problems)
        return definitions

    def of(self, text: Any, operators: Sequence[str], where: str) -> dict[Layer, str]:
        """The definitions of a stage's layers."""
        if not operators:
            return {}  # which could not be read
        if isinstance(text, str):
            found = dict.fromkeys(layers_as(text, operators, self.tables), text)
            if not found:
                self._problems.append(
                    f"{where}: '{_LAYERS}' defines nothing '{text}' of this stage's layers{self._known()}"
                )
            return found
        if not isinstance(text, dict):
            self._problems.append(f"{where} must be like 'A' or {{'model.layers.0-7': 'A'}}, got {text!r}")
            return {}
        here = {layer for level in range(_deepest(operators)) for layer in by_layer(operators, level)}
        found = {}
        for path, name in text.items():
            match = LAYERS.fullmatch(path)
            parent = match["parent"] or "" if match is not None else ""
            if match is None or not isinstance(name, str):
                self._problems.append(
                    f"{where} must be like 'A' or {{'model.layers.0-7': 'A'}}, got {path!r}: {name!r}"
                )
            elif not any(name in definitions for definitions in self.tables.get(parent, {}).values()):
                self._problems.append(
                    f"{where}: '{_LAYERS}' defines nothing '{name}' of layers of '{parent}'{self._known()}"
                )
            else:
                try:
                    mine = [Layer(parent, number) for number in range_of(match)]
                except ValueError as error:
                    self._problems.append(f"{where}: '{path}': {error}")
                    continue
                absent = [layer for layer in mine if layer not in here]
                if absent:
                    self._problems.append(f"{where}: '{path}': the stage has no operators of '{absent[0]}'")
                found |= dict.fromkeys(mine, name)
        return found

    def _known(self) -> str:
        known = {
            f"{name} of '{parent}'": None
            for parent, tables in self.tables.items()
            for definitions in tables.values()
            for name in definitions
        }
        return f"; it has {', '.join(known)}" if known else ""

    def values(self, table: TableFormat, name: str, part: LayerPart) -> Values:
        """What a definition says of a stage's part of a layer."""
        parent = part.layer.parent
        entries = self.tables.get(parent, {}).get(table.name, {}).get(name, [])
        said = applied(table, entries, part.known, part.owners)
        mine = self._hits.setdefault((parent, table.name, name), {})
        for line, one, hit in said.hits:
            mine[line, one] = mine.get((line, one), False) or hit
        place = f"{_LAYERS}['{parent}'].{table.name}.{name}"
        self._problems += (text for key in said.twice if (text := _twice(place, key)) not in self._problems)
        return out_of_layer(table, said.values, part.layer)

    def check_names(self, parts: Mapping[str, Sequence[LayerPart]]) -> None:
        """Refuse names of definitions that no operator of these layers has. `parts`: by parent."""
        for (parent, table, name), hits in self._hits.items():
            known = {key for part in parts.get(parent, ()) for key in part.known.keys}
            known |= {key.rpartition("#")[0] for key in known}
            for (line, one), hit in hits.items():
                if not hit and one not in known:
                    place = f"{_LAYERS}['{parent}'].{table}.{name}"
                    self._problems.append(f"{place}: '{line}': these layers have no operator '{one}'{near(one, known)}")


def _deepest(operators: Sequence[str]) -> int:
    """Layers in layers, at most."""
    level = 0
    while any(layer_of(key, level) for key in operators):
        level += 1
    return level


def _entries(table: TableFormat, value: Any, where: str, problems: list[str]) -> list[LineValue]:
    found = []
    for entry in table.read(value):
        if isinstance(entry, Wrong):
            problems.append(f"{where}{entry.text}")
        else:
            found.append(entry)
    return found


# -- shardings --------------------------------------------------------------------------------------------------------


def _read_shardings(stages: list[Any], layers: _Layers, collectives: Collectives, problems: list[str]) -> None:
    """Put the tables of format 2 into the shardings, and lines of operators into the stages."""
    operators = [
        mine if isinstance(stage, dict) and isinstance(mine := stage.get(_OPERATORS), _Keys) else [] for stage in stages
    ]
    last = last_operators(operators)
    parts: dict[str, list[LayerPart]] = {}
    for number, (stage, keys) in enumerate(zip(stages, operators, strict=True)):
        if not isinstance(stage, dict):
            continue
        sharding = stage.get("sharding")
        if isinstance(sharding, dict):
            where = f"stages[{number}].sharding."
            mine = []
            if _LAYERS in sharding:
                named_layers = layers.of(sharding.pop(_LAYERS), keys, f"{where}{_LAYERS}")
                held = dict(pair for level in range(_deepest(keys)) for pair in by_layer(keys, level).items())
                mine = [(LayerPart.of(layer, held.get(layer, ()), last), name) for layer, name in named_layers.items()]
            for part, _ in mine:
                parts.setdefault(part.layer.parent, []).append(part)
            for table in TABLES:
                _read_table(table, sharding, mine, keys, layers, where, problems)
            with_exchanges(sharding, f"stages[{number}].", collectives, problems)
        if isinstance(stage.get(_OPERATORS), _Keys):
            stage[_OPERATORS] = operator_lines(keys)
    layers.check_names(parts)


def _read_table(
    table: TableFormat,
    sharding: dict[str, Any],
    parts: Sequence[tuple[LayerPart, str]],
    operators: Sequence[str],
    layers: _Layers,
    where: str,
    problems: list[str],
) -> None:
    place = f"{where}{table.name}"
    value = sharding.get(table.name, {} if table.is_object else [])
    n = len(problems)
    if isinstance(value, dict) and list(value) == [ROWS] and not isinstance(value[ROWS], str):
        said = _entries(table, value[ROWS], f"{place}.{ROWS}", problems)
        pairs = [(line, cells) for line, cells in said if cells is not None]
    else:
        found: Values = {}
        for part, name in parts:
            found |= layers.values(table, name, part)
        entries = _entries(table, value, place, problems)
        known = Known.of(operators, OPERATORS)
        own, hits, twice = applied(table, entries, known)
        problems += (_twice(place, key) for key in twice)
        for line, name, hit in hits:
            if not hit and operators:
                problems.append(
                    f"{place}: '{line}': the stage has no operator '{name}'{near(name, _all_names(operators))}"
                )
        found |= own
        pairs = ordered(table, [(key, one) for key, one in found.items() if one is not None], operators)
        pairs = list(out_of_modules(table, dict(pairs)).items())
    if pairs or table.name in sharding:
        sharding[table.name] = table.flat(pairs) if pairs or len(problems) == n else UNREADABLE


def _twice(place: str, key: str) -> str:
    return f"{place}: '{key}' has two values; give one"


def _all_names(operators: Sequence[str]) -> list[str]:
    return [*operators, *dict.fromkeys(key.rpartition("#")[0] for key in operators)]
