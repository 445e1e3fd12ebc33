"""Rows about equal layers, which a plan file writes once.

    rows                                         folded                            definition A of model.layers
    model.layers.0.mlp/linear#0   S0R R -> S0R   model.layers.0-1   as A           @.mlp/linear#0   S0R R -> S0R
    model.layers.0/add#0          S0R S0R -> S0R                                   @/add#0          S0R S0R -> S0R
    model.layers.1.mlp/linear#0   S0R R -> S0R
    model.layers.1/add#0          S0R S0R -> S0R

`@` is the layer itself, `@-1` the one before it, as in "moves from @-1/add#0 to @.norm/pow#0". A layer is a module
whose name is a number. Of layers in layers, the outer ones are folded where they are equal, otherwise the inner ones.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

Row = tuple[Any, ...]  # texts and numbers
_NUMBER = re.compile(r"(?:(?<=\.)|^)(0|[1-9]\d*)(?=[./]|$)")
_LAYER = re.compile(r"@([+-]\d+)?(?=[./]|$)")
_FEWEST = 3  # rows of a layer that are folded: a definition of fewer is hardly shorter than they are
_EXCEPTIONS = 3  # a layer may differ from a definition in one row of this many
_FEW = 2
_MOST_COMPARED = 8  # definitions that a layer is compared with
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Layer(NamedTuple):
    """`model.layers.3`; `parent` is "" for the layers of a Sequential."""

    parent: str
    number: int

    def __str__(self) -> str:
        return f"{self.parent}.{self.number}" if self.parent else str(self.number)


@dataclass(frozen=True)
class FoldedLayers:
    """Neighbouring layers that have the rows of a definition, or those in `part` of it."""

    parent: str
    first: int
    last: int
    definition: str  # name
    part: tuple[int, int | None] = (0, None)

    @property
    def layers(self) -> Iterator[Layer]:
        return (Layer(self.parent, index) for index in range(self.first, self.last + 1))

    @property
    def path(self) -> str:
        """`model.layers.0-7`."""
        return f"{Layer(self.parent, self.first)}{f'-{self.last}' if self.last > self.first else ''}"


Item = Row | FoldedLayers


@dataclass
class Definitions:
    """Of the layers of one parent: by name the rows, with `@` for the layer."""

    rows: dict[str, tuple[Row, ...]] = field(default_factory=dict)

    def name_of(self, rows: tuple[Row, ...]) -> str:
        """Of a definition with these rows, which is added if there is none."""
        known = next((name for name, others in self.rows.items() if others == rows), None)
        if known is None:
            known = definition_name(len(self.rows))
            self.rows[known] = rows
        return known


def definition_name(number: int) -> str:
    """A, B ... Z, A1, B1 ..."""
    turn, letter = divmod(number, len(_NAMES))
    return _NAMES[letter] + (str(turn) if turn else "")


def layer_of(name: str, level: int) -> Layer | None:
    """The layer that a module, an operator or a parameter lies in; `level` counts layers in layers from outside."""
    numbers = list(_NUMBER.finditer(name.partition("/")[0]))
    if level >= len(numbers):
        return None
    found = numbers[level]
    return Layer(name[: max(0, found.start() - 1)], int(found[1]))


def fold(
    lists: Sequence[Sequence[Row]], subject: Callable[[Row], str], *, exceptions: bool = False
) -> tuple[list[list[Item]], dict[str, Definitions]]:
    """The lists, one a stage, with folded layers, and the definitions of these by parent.

    A definition is a whole layer, even where a stage ends inside of it: then each stage has a part of it.

    `subject`: the name whose layer a row belongs to. `exceptions`: rows are (name, value), and a row replaces an
    earlier one of its name: layers with few other values are folded, with rows for those.
    """
    items: list[list[Item]] = [list(rows) for rows in lists]
    definitions: dict[str, Definitions] = defaultdict(Definitions)
    level = 0
    while any(layer_of(subject(row), level) for rows in items for row in rows if isinstance(row, tuple)):
        whole = _grouped([item for rows in items for item in rows], subject, level)
        counts = Counter((layer.parent, rows) for layer, rows in whole if layer is not None and len(rows) >= _FEWEST)
        # The commonest comes first, so that most layers are "as A".
        for (parent, rows), count in sorted(counts.items(), key=lambda one: -one[1]):
            if count > 1 and not _nearly_known(rows, definitions[parent]):
                definitions[parent].name_of(rows)
        items = [_folded(_grouped(rows, subject, level), definitions, exceptions) for rows in items]
        level += 1
    return items, dict(definitions)


def unfolded(folded: FoldedLayers, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows of all layers. `rows`: of the definition."""
    for layer in folded.layers:
        for row in rows[slice(*folded.part)]:
            yield tuple(absolute(cell, layer) if isinstance(cell, str) else cell for cell in row)


_Group = tuple[Layer | None, Any]  # rows with `@`, or for None one item


def _grouped(items: Sequence[Item], subject: Callable[[Row], str], level: int) -> list[_Group]:
    """Neighbouring rows of one layer, with `@` for it; everything else by itself."""
    groups: list[tuple[Layer | None, Any]] = []
    for item in items:
        layer = layer_of(subject(item), level) if isinstance(item, tuple) else None
        if layer is None or isinstance(item, FoldedLayers):
            groups.append((None, item))
            continue
        row = tuple(relative(cell, layer) if isinstance(cell, str) else cell for cell in item)
        if groups and groups[-1][0] == layer:
            groups[-1][1].append(row)
        else:
            groups.append((layer, [row]))
    return [(layer, item if layer is None else tuple(item)) for layer, item in groups]


def _folded(groups: Sequence[_Group], definitions: dict[str, Definitions], exceptions: bool) -> list[Item]:
    found: list[Item] = []
    replaced: list[Item] = []
    for layer, rows in groups:
        if layer is None:
            found.append(rows)
            continue
        items, others = _match(layer, rows, definitions.get(layer.parent), exceptions)
        replaced += _of_layer(others, layer)
        for one in items:
            last = found[-1] if found else None
            if not isinstance(one, FoldedLayers):
                found += _of_layer([one], layer)
            elif isinstance(last, FoldedLayers) and one == replace(last, first=last.last + 1, last=last.last + 1):
                found[-1] = replace(last, last=one.last)
            else:
                found.append(one)
    return found + replaced


def _of_layer(rows: Sequence[Row], layer: Layer) -> Iterator[Row]:
    """The rows without `@`."""
    for row in rows:
        yield tuple(absolute(cell, layer) if isinstance(cell, str) else cell for cell in row)


def _match(
    layer: Layer, rows: tuple[Row, ...], known: Definitions | None, exceptions: bool
) -> tuple[Sequence[Item], Sequence[Row]]:
    """The layer's rows with what definitions have of them, and rows that replace some of a definition."""
    if known is None or len(rows) < _FEWEST:
        return rows, []
    whole = {name: FoldedLayers(layer.parent, layer.number, layer.number, name) for name in known.rows}
    for name, others in known.rows.items():
        if others == rows:
            return [whole[name]], []
    for name, others in known.rows.items() if exceptions else ():
        different = [row for row, other in zip(rows, others, strict=False) if row != other]
        if [row[0] for row in rows] == [other[0] for other in others] and len(different) * _EXCEPTIONS <= len(rows):
            return [whole[name]], different
    name, blocks = _blocks(rows, known)
    found: list[Item] = []
    done = 0
    for here, there, size in blocks:
        stop = there + size if there + size < len(known.rows[name]) else None
        found += [*rows[done:here], replace(whole[name], part=(there, stop))]
        done = here + size
    return [*found, *rows[done:]], []


def _blocks(rows: tuple[Row, ...], known: Definitions) -> tuple[str, list[tuple[int, int, int]]]:
    """The definition that has most of the rows, and (place among these, place there, rows) of what both have."""
    parts = []
    for name, others in itertools.islice(known.rows.items(), _MOST_COMPARED):
        blocks = difflib.SequenceMatcher(None, rows, others, autojunk=False).get_matching_blocks()
        parts.append((name, [(b.a, b.b, b.size) for b in blocks if b.size >= _FEWEST]))
    return max(parts, key=lambda part: sum(size for _, _, size in part[1]))


def _nearly_known(rows: tuple[Row, ...], known: Definitions) -> bool:
    """Whether a definition has the rows but for one or two: layers with these have parts of it."""
    if not known.rows:
        return False
    return len(rows) - sum(size for _, _, size in _blocks(rows, known)[1]) <= _FEW


@cache
def _of_parent(parent: str) -> re.Pattern[str]:
    """A name in a layer of this parent."""
    return re.compile((re.escape(parent) + r"\." if parent else "") + r"(0|[1-9]\d*)(?=[./]|$)")


def relative(text: str, layer: Layer) -> str:
    """`@.mlp/linear#0` for `model.layers.3.mlp/linear#0`, seen from layer 3; `@-1...` from layer 4."""
    match = _of_parent(layer.parent).match(text)
    if match is None:
        return text
    apart = int(match[1]) - layer.number
    return f"@{apart:+d}{text[match.end() :]}" if apart else f"@{text[match.end() :]}"


def inside(name: str, layer: Layer) -> str:
    """`mlp/linear#0` for `model.layers.3.mlp/linear#0`, and `/add#0` for the layer's own."""
    return relative(name, layer).removeprefix("@").removeprefix(".")


def outside(name: str, layer: Layer) -> str:
    """The other way round."""
    return absolute(f"@{'' if name.startswith('/') else '.'}{name}", layer)


def absolute(text: str, layer: Layer) -> str:
    match = _LAYER.match(text)
    if match is None:
        return text
    return f"{Layer(layer.parent, layer.number + int(match[1] or 0))}{text[match.end() :]}"
