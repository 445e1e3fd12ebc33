"""Choosing the definitions of the layers of sharded stages, for writing.

A definition is a whole layer. A stage that has a layer, or a part of one, has it as the definition that differs least,
and says besides what differs, by operator.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.plan.file_format.definitions import (
    LayerPart,
    Values,
    by_layer,
    differences,
    in_layer,
    last_operators,
    out_of_layer,
)
from autopar.plan.file_format.folding import Layer, definition_name, layer_of
from autopar.plan.file_format.names import OPERATORS, Known, joined
from autopar.plan.file_format.tables import TABLES, LineValue, compact

OF = "those of "  # another definition of the table
_MOST_COMPARED = 16  # kinds of layers that may become definitions
_Content = tuple[Any, ...]
Tables = dict[str, Values]  # by the name of a table


@dataclass
class ShardedStage:
    """A stage with a sharding."""

    operators: Sequence[str]
    tables: Tables  # tensors of an operator's own module are short
    layers: dict[Layer, str] = field(default_factory=dict)  # definitions, of what is folded
    own: Tables = field(default_factory=dict)  # what the stage says itself


class _Piece(NamedTuple):
    """What one stage has of a layer."""

    part: LayerPart
    tables: Tables

    @property
    def content(self) -> _Content:
        """Equal for layers that are equal."""
        return self.part.known.keys, frozenset(self.part.owners), repr(self.tables)


class _Definition(NamedTuple):
    tables: dict[str, Any]  # as JSON
    entries: dict[str, list[LineValue]]


def fold_shardings(
    stages: Sequence[ShardedStage], plan: Sequence[Sequence[str]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Fill `layers` and `own` of the stages, and return definitions by parent, table and name. `plan`: the operators of
    all stages."""
    last = last_operators(plan)
    left = [list(stage.operators) for stage in stages]
    for stage in stages:
        stage.own = {name: dict(values) for name, values in stage.tables.items()}
    found: dict[str, dict[str, _Definition]] = defaultdict(dict)
    level = 0
    while any(layer_of(key, level) for keys in left for key in keys):
        pieces = [_pieces(stage, mine, level, last) for stage, mine in zip(stages, left, strict=True)]
        _define(pieces, found)
        for index, mine in enumerate(pieces):
            for layer, piece in mine.items():
                _fold(stages[index], layer, piece, found.get(layer.parent, {}))
            left[index] = [key for key in left[index] if layer_of(key, level) not in stages[index].layers]
        level += 1
    return {parent: _by_table(definitions) for parent, definitions in found.items()}


def _pieces(stage: ShardedStage, operators: Sequence[str], level: int, last: Mapping[str, str]) -> dict[Layer, _Piece]:
    """What a stage has of its layers."""
    rows: dict[Layer, Tables] = defaultdict(lambda: defaultdict(dict))
    for name, values in stage.own.items():
        for key, value in values.items():
            layer = layer_of(key, level)
            if layer is not None:
                rows[layer][name][key] = value
    found = {}
    for layer, keys in by_layer(operators, level).items():
        mine = {t.name: in_layer(t, rows[layer].get(t.name, {}), layer) for t in TABLES if t.name in stage.own}
        found[layer] = _Piece(LayerPart.of(layer, keys, last), mine)
    return found


def _define(pieces: Sequence[Mapping[Layer, _Piece]], found: dict[str, dict[str, _Definition]]) -> None:
    """Add those definitions of the layers of `pieces` that make the file shortest, the one that saves most first."""
    held: dict[Layer, list[_Piece]] = defaultdict(list)
    for mine in pieces:
        for layer, piece in mine.items():
            held[layer].append(piece)
    for parent in dict.fromkeys(layer.parent for layer in held):
        counted = Counter(piece.content for layer, mine in held.items() if layer.parent == parent for piece in mine)
        alike = {piece.content: piece for layer, mine in held.items() if layer.parent == parent for piece in mine}
        whole: Counter[_Content] = Counter()
        models: dict[_Content, _Piece] = {}
        for layer, parts in held.items():
            if layer.parent == parent:
                content = tuple(piece.content for piece in parts)
                whole[content] += 1
                models.setdefault(content, parts[0] if len(parts) == 1 else _whole(parts))
        offers = [_definition(models[content]) for content, _ in whole.most_common(_MOST_COMPARED)]
        offers = [one for one in offers if one.tables]
        known = found[parent]
        least = {c: min(_cost(piece, one) for one in (None, *known.values())) for c, piece in alike.items()}
        costs = [{c: _cost(piece, one) for c, piece in alike.items()} for one in offers]
        while offers:
            saved = [
                sum(n * max(0, least[c] - cost[c]) for c, n in counted.items()) - _price(one, known)
                for one, cost in zip(offers, costs, strict=True)
            ]
            best = max(range(len(offers)), key=lambda index: saved[index])
            if saved[best] <= 0:
                break
            known[definition_name(len(known))] = offers.pop(best)
            cost = costs.pop(best)
            least = {c: min(one, cost[c]) for c, one in least.items()}
        _drop(known, alike, counted)


def _drop(known: dict[str, _Definition], alike: Mapping[_Content, _Piece], counted: Mapping[_Content, int]) -> None:
    """Leave out definitions that others made needless; the names go on without a gap."""
    costs = {name: {c: _cost(piece, one) for c, piece in alike.items()} for name, one in known.items()}
    plain = {c: _cost(piece, None) for c, piece in alike.items()}

    def total(names: Sequence[str]) -> int:
        some: dict[str, _Definition] = {}
        price = 0
        for name in names:
            price += _price(known[name], some)
            some[name] = known[name]
        return price + sum(n * min([plain[c], *(costs[name][c] for name in names)]) for c, n in counted.items())

    names = list(known)
    while names:
        fewer = min(([one for one in names if one != name] for name in names), key=total)
        if total(fewer) > total(names):
            break
        names = fewer
    kept = [known[name] for name in names]
    known.clear()
    known |= {definition_name(number): one for number, one in enumerate(kept)}


def _price(new: _Definition, known: Mapping[str, _Definition]) -> int:
    """Characters, about, of tables that no definition has yet."""
    shared = {name for one in known.values() for name, value in one.tables.items() if new.tables.get(name) == value}
    return sum(_length(value) for name, value in new.tables.items() if name not in shared)


def _whole(pieces: Sequence[_Piece]) -> _Piece:
    """A layer of several stages."""
    keys = [
        joined(module, name, OPERATORS)
        for piece in pieces
        for module, names in piece.part.known.names.items()
        for name in names
    ]
    tables: Tables = defaultdict(dict)
    for piece in pieces:
        for name, values in piece.tables.items():
            tables[name] |= values
    first = pieces[0].part
    owners = frozenset().union(*(piece.part.owners for piece in pieces))
    return _Piece(LayerPart(first.layer, Known.of(keys, OPERATORS), owners), dict(tables))


def _definition(piece: _Piece) -> _Definition:
    tables, entries = {}, {}
    for table in TABLES:
        if piece.tables.get(table.name):
            tables[table.name] = compact(table, piece.tables[table.name], piece.part.known)
            entries[table.name] = [one for one in table.read(tables[table.name]) if isinstance(one, LineValue)]
    return _Definition(tables, entries)


def _besides(piece: _Piece, definition: _Definition | None) -> Tables:
    """What a stage says itself of a piece."""
    if definition is None:
        return piece.tables
    return {
        table.name: differences(
            table, piece.tables.get(table.name, {}), definition.entries.get(table.name, ()), piece.part
        )
        for table in TABLES
    }


def _cost(piece: _Piece, definition: _Definition | None) -> int:
    """Characters, about, of what a stage says itself."""
    besides = _besides(piece, definition)
    return sum(_length(compact(t, besides[t.name], piece.part.known)) for t in TABLES if besides.get(t.name))


def _length(value: Any) -> int:
    return len(json.dumps(value))


def _fold(stage: ShardedStage, layer: Layer, piece: _Piece, definitions: Mapping[str, _Definition]) -> None:
    plain = _cost(piece, None)
    costs = {name: _cost(piece, definition) for name, definition in definitions.items()}
    best = min(costs, key=lambda name: costs[name], default=None)
    if best is None or costs[best] >= plain:
        return
    stage.layers[layer] = best
    besides = _besides(piece, definitions[best])
    for table in TABLES:
        own = stage.own.setdefault(table.name, {})
        for key in out_of_layer(table, piece.tables.get(table.name, {}), layer):
            del own[key]
        own |= out_of_layer(table, besides[table.name], layer)


def _by_table(definitions: Mapping[str, _Definition]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for table in TABLES:
        mine: dict[str, Any] = {}
        for name, definition in definitions.items():
            value = definition.tables.get(table.name)
            if value is not None:
                same = next((other for other, known in mine.items() if known == value), None)
                mine[name] = value if same is None else f"{OF}{same}"
        if mine:
            found[table.name] = mine
    return found


def paths_of(layers: Mapping[Layer, str]) -> dict[str, str]:
    """`{"model.layers.0-7": "A"}`: neighbouring layers of one definition together."""
    return {_path(layer, last): name for layer, last, name in _runs(layers)}


def _path(first: Layer, last: int) -> str:
    return f"{first}{f'-{last}' if last > first.number else ''}"


def _runs(layers: Mapping[Layer, str]) -> Iterator[tuple[Layer, int, str]]:
    run: tuple[Layer, int, str] | None = None
    for layer, name in layers.items():
        if run is not None and (run[0].parent, run[1] + 1, run[2]) == (layer.parent, layer.number, name):
            run = run[0], layer.number, name
            continue
        if run is not None:
            yield run
        run = layer, layer.number, name
    if run is not None:
        yield run
