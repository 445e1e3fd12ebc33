"""What a layer of a sharded stage has, by the names of its operators: the definitions under "layers" of a plan file.

"layers": {"model.layers": {"strategies": {"A": {"S0 R -> S0": "mlp.gate,up: linear", "S0 S0 -> S0": ": add"}}}}

Lines name what lies in the layer. In tensors, `@` is the layer, and `@-1` the one before it. A definition holds for the
operators of a layer that a stage has: where a stage ends inside of a layer, both stages have the layer "as A". A
parameter belongs to the stage that has the last operator of its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from autopar.plan.file_format.folding import Layer, absolute, inside, layer_of, outside, relative
from autopar.plan.file_format.names import OPERATORS, PARAMETERS, Known, named, split
from autopar.plan.file_format.tables import LineValue, TableFormat, Value

Values = dict[str, Value]  # of a table, by key; None: nothing, although a definition says something


class LayerPart(NamedTuple):
    """What a stage has of a layer, by names inside of it."""

    layer: Layer
    known: Known  # its operators
    owners: Set[str]  # modules whose parameters are the stage's

    @classmethod
    def of(cls, layer: Layer, operators: Iterable[str], last: Mapping[str, str]) -> LayerPart:
        """`last`: the last operator of every module of the plan."""
        mine = list(operators)
        modules = dict.fromkeys(split(key, OPERATORS)[0] for key in mine)
        here = set(mine)
        owners = {inside(module, layer) for module in modules if last[module] in here}
        return cls(layer, Known.of((inside(key, layer) for key in mine), OPERATORS), owners)


def last_operators(stages: Iterable[Iterable[str]]) -> dict[str, str]:
    """By module, its last operator in the plan."""
    return {split(key, OPERATORS)[0]: key for operators in stages for key in operators}


def by_layer(operators: Iterable[str], level: int) -> dict[Layer, list[str]]:
    """`level` counts layers in layers from outside."""
    found: dict[Layer, list[str]] = {}
    for key in operators:
        layer = layer_of(key, level)
        if layer is not None:
            found.setdefault(layer, []).append(key)
    return found


class Said(NamedTuple):
    """What entries say."""

    values: Values
    hits: list[tuple[str, str, bool]]  # for every (line, name), whether it names something
    twice: list[str]  # keys that have two values


def applied(table: TableFormat, entries: Iterable[LineValue], known: Known, owners: Set[str] | None = None) -> Said:
    """What entries say of known operators, or of the parameters of modules `owners` (None: of any). A line that names
    an operator by its number wins over one that names all of its kind."""
    found: Values = {}
    exact: set[str] = set()
    said = Said(found, [], [])
    for line, value in entries:
        keys, missing = named(line, known._replace(separator=table.separator))
        if table.separator == PARAMETERS:
            keys = [key for key in keys if owners is None or split(key, PARAMETERS)[0] in owners]
        else:
            said.hits.extend((line, name, False) for name in missing)
            said.hits.extend((line, name, True) for key in keys for name in (line, key, key.rpartition("#")[0]))
        for key in keys:
            by_number = table.separator == OPERATORS and _says(line, key)
            before = found.get(key)
            if table.adds:
                found[key] = before + value if before is not None and value is not None else value
            elif key not in found or (by_number and key not in exact):
                found[key] = value
            elif by_number == (key in exact) and repr(before) != repr(value):
                said.twice.append(key)
            if by_number:
                exact.add(key)
    return said


def _says(line: str, key: str) -> bool:
    """Whether a line has the operator's number: `mlp: add mul#1`, or its key."""
    return line == key or key.rpartition("/")[2] in line.rpartition(": ")[2].split(" ")


def differences(table: TableFormat, values: Values, entries: Sequence[LineValue], part: LayerPart) -> Values:
    """What a stage says besides a definition, so that the values of a part are these."""
    said = applied(table, entries, part.known, part.owners).values
    keys = {**said, **values}
    return {key: values.get(key) for key in keys if repr(said.get(key)) != repr(values.get(key))}


# -- tensors of rows --------------------------------------------------------------------------------------------------


def in_layer(table: TableFormat, values: Mapping[str, Value], layer: Layer) -> Values:
    """Keys as they are called inside of the layer, and tensors with `@`."""
    return {
        inside(key, layer): _each_tensor(table, value, lambda t: relative(t, layer)) for key, value in values.items()
    }


def out_of_layer(table: TableFormat, values: Mapping[str, Value], layer: Layer) -> Values:
    return {
        outside(key, layer): _each_tensor(table, value, lambda t: absolute(t, layer)) for key, value in values.items()
    }


def in_modules(table: TableFormat, values: Mapping[str, Value]) -> Values:
    """`.weight` for a tensor of the operator's own module."""
    found = {}
    for key, value in values.items():
        module = split(key, OPERATORS)[0]
        found[key] = _each_tensor(
            table, value, lambda t, m=module: t.removeprefix(m) if m and t.startswith(f"{m}.") else t
        )
    return found


def out_of_modules(table: TableFormat, values: Mapping[str, Value]) -> Values:
    found = {}
    for key, value in values.items():
        module = split(key, OPERATORS)[0]
        found[key] = _each_tensor(table, value, lambda t, m=module: f"{m}{t}" if t.startswith(".") else t)
    return found


def _each_tensor(table: TableFormat, value: Value, change: Any) -> Value:
    """Rows of redistributions and exchanges begin with a tensor."""
    if not table.adds or value is None:
        return value
    return tuple((change(tensor), *rest) for tensor, *rest in value)
