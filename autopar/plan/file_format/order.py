"""The order of a table's rows, which is that of a stage's operators, and the layers that a stage has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopar.plan.file_format.folding import Layer, layer_of
from autopar.plan.file_format.names import OPERATORS, OUTPUT, PARAMETERS, split
from autopar.plan.file_format.tables import Pairs, TableFormat


def ordered(table: TableFormat, pairs: Pairs, operators: Sequence[str]) -> Pairs:
    """As the stage's operators; parameters as the last operator of their modules; what a stage sends on behind the
    operator that makes it; others behind them."""
    places = _places(table, operators)

    def place(key: str) -> float:
        if key.startswith(OUTPUT):
            return places.get(key.removeprefix(OUTPUT), len(operators)) + 0.5
        return places.get(_holder(table, key), len(operators))

    return sorted(pairs, key=lambda pair: place(pair[0]))


def in_order(table: TableFormat, pairs: Pairs, operators: Sequence[str]) -> bool:
    """Whether `ordered` leaves the pairs as they are, which have every key once, and operators of the stage."""
    keys = [key for key, _ in pairs]
    known = table.separator == PARAMETERS or {key for key in keys if not key.startswith(OUTPUT)} <= set(operators)
    return known and len(set(keys)) == len(keys) and ordered(table, pairs, operators) == pairs


def _places(table: TableFormat, operators: Sequence[str]) -> Mapping[str, int]:
    if table.separator == PARAMETERS:
        return {split(key, OPERATORS)[0]: place for place, key in enumerate(operators)}
    return {key: place for place, key in enumerate(operators)}


def _holder(table: TableFormat, key: str) -> str:
    return split(key, PARAMETERS)[0] if table.separator == PARAMETERS else key


def layers_as(name: str, operators: Iterable[str], definitions: Mapping[str, Any]) -> list[Layer]:
    """The layers of a stage with "layers": "A": those whose parents have definitions A, by parent and table."""
    parents = {parent for parent, tables in definitions.items() if any(name in table for table in tables.values())}
    found: dict[Layer, None] = {}
    for key in operators:
        level = 0
        while (layer := layer_of(key, level)) is not None:
            if layer.parent in parents:
                found[layer] = None
                break
            level += 1
    return list(found)
