"""The operators of a stage in a plan file: one line a module, or a range of layers.

["model.embed: embedding#0", "model.layers.0-7", "model.layers.8 before mlp.up/linear#0"]
["model.layers.8-9 from mlp.up/linear#0 before norm/pow#0"]     the rest of layer 8, and layer 9 up to there
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors.names import near
from autopar.plan.file_format.fields import OPERATOR_LINE, operator_lines
from autopar.plan.file_format.folding import Definitions, FoldedLayers, Item, Row, fold, unfolded
from autopar.plan.file_format.names import LINE
from autopar.plan.file_format.short_values import MOST_IN_A_ROW

DEFAULT = "A"
LAYERS = re.compile(r"(?:(?P<parent>.+)\.)?(?P<first>0|[1-9]\d{0,8})(?:-(?P<last>\d{1,9}))?")
_ENTRY = re.compile(r"(?P<path>\S+)(?: as (?P<name>\S+))?(?: from (?P<start>\S+))?(?: before (?P<stop>\S+))?")


# -- writing ----------------------------------------------------------------------------------------------------------


def folded_operators(lists: Sequence[Sequence[str]]) -> tuple[list[list[str]], dict[str, dict[str, list[str]]]]:
    """Lines for the operators of every stage, and the definitions of these by parent and name. Lists: of format 2."""
    rows = [_rows(lines) for lines in lists]
    items, definitions = fold(rows, lambda row: str(row[0]))
    if any(_expanded(mine, definitions) != whole for mine, whole in zip(items, rows, strict=True)):
        items, definitions = [list(whole) for whole in rows], {}  # names that look like those of folded layers
    defined = {
        parent: {name: operator_lines(_counted(labels_of(mine))) for name, mine in known.rows.items()}
        for parent, known in definitions.items()
    }
    return [_lines(mine, definitions) for mine in items], defined


def _counted(labels: Sequence[str]) -> list[str]:
    """Without the numbers of operators that follow in a layer from 0 on: `mlp/linear` the first, `mlp/linear` again."""
    numbers: Counter[str] = Counter()
    found = []
    for label in labels:
        name, _, number = label.rpartition("#")
        found.append(name if number == str(numbers[name]) else label)
        numbers[name] += 1
    return found


def _rows(lines: Sequence[str]) -> list[Row]:
    return [(key,) for key in keys_of(lines)]


def keys_of(lines: Sequence[str]) -> list[str]:
    """`mlp/mul#0` and `mlp/add#0` of the line `mlp: mul#0 add#0`."""
    parts = (line.rpartition(": ") for line in lines)
    return [f"{path}/{name}" for path, _, names in parts for name in names.split()]


def _expanded(items: Sequence[Item], definitions: Mapping[str, Definitions]) -> list[Row]:
    rows: list[Row] = []
    for item in items:
        if isinstance(item, FoldedLayers):
            rows += unfolded(item, definitions[item.parent].rows[item.definition])
        else:
            rows.append(item)
    return rows


def _lines(items: Sequence[Item], definitions: Mapping[str, Definitions]) -> list[str]:
    found: list[str] = []
    for layers, run in itertools.groupby(items, key=lambda item: isinstance(item, FoldedLayers)):
        if not layers:
            found += operator_lines(item[0] for item in run if not isinstance(item, FoldedLayers))
            continue
        runs: list[tuple[FoldedLayers, FoldedLayers]] = []  # the first and the last of layers in one line
        for one in itertools.chain.from_iterable(_each(item) for item in run if isinstance(item, FoldedLayers)):
            if runs and _follow(runs[-1], one):
                runs[-1] = runs[-1][0], one
            else:
                runs.append((one, one))
        found += (_line(first, last, definitions) for first, last in runs)
    return found


def _each(item: FoldedLayers) -> Iterator[FoldedLayers]:
    """Each layer that is a part by itself."""
    if item.part == (0, None):
        yield item
    else:
        yield from (replace(item, first=layer.number, last=layer.number) for layer in item.layers)


def _follow(run: tuple[FoldedLayers, FoldedLayers], one: FoldedLayers) -> bool:
    """Whether layers go on where a run ends: from its start to the end of the last one."""
    last = run[1]
    return (
        (last.parent, last.definition, last.last + 1) == (one.parent, one.definition, one.first)
        and last.part[1] is None
        and one.part[0] == 0
    )


def _line(first: FoldedLayers, last: FoldedLayers, definitions: Mapping[str, Definitions]) -> str:
    labels = labels_of(definitions[first.parent].rows[first.definition])
    start, stop = first.part[0], last.part[1]
    path = replace(first, last=last.last).path
    name = f" as {first.definition}" if first.definition != DEFAULT else ""
    return (
        f"{path}{name}"
        + f" from {labels[start]}" * (start > 0)
        + (f" before {labels[stop]}" if stop is not None else "")
    )


def labels_of(rows: Sequence[Row]) -> list[str]:
    """What the rows of a definition are called: `mlp/linear#0`."""
    return [str(row[0]).removeprefix("@").removeprefix(".") for row in rows]


# -- reading ----------------------------------------------------------------------------------------------------------


class OperatorLines:
    """Reads the lines of stages, with the definitions of a file."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._rows: dict[str, dict[str, list[Row]]] = {}

    def define(self, parent: str, name: str, value: Any, where: str) -> None:
        if not isinstance(value, list):
            self._problems.append(f"{where} must be a list, got {value!r}")
        rows: list[Row] = []
        numbers: Counter[str] = Counter()
        for index, line in enumerate(value if isinstance(value, list) else ()):
            match = LINE.fullmatch(line) if isinstance(line, str) else None
            if match is None:
                self._problems.append(f"{where}[{index}] must be like 'module.path: linear#0 relu#1', got {line!r}")
            else:
                for one in match[2].split(" "):
                    label = f"{match[1]}/{one}"
                    label += f"#{numbers[label]}" if "#" not in one else ""
                    numbers[label.rpartition("#")[0]] += 1
                    rows.append((f"@{'.' if match[1] else ''}{label}",))
        self._rows.setdefault(parent, {})[name] = rows

    def keys(self, value: list[Any], where: str) -> list[str]:
        """All keys that can be read."""
        found: list[str] = []
        for index, entry in enumerate(value):
            line = OPERATOR_LINE.fullmatch(entry) if isinstance(entry, str) else None
            if line is not None:
                found += (f"{line[1]}/{name}" for name in line[2].split(" "))
                continue
            match = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
            layers = LAYERS.fullmatch(match["path"]) if match is not None else None
            if match is None or layers is None:
                self._problems.append(
                    f"{where}[{index}] must be like 'module.path: linear#0 relu#1', or layers such as "
                    f"'model.layers.0-7', got {entry!r}"
                )
                continue
            try:
                found += self._of_layers(match, layers)
            except ValueError as error:
                self._problems.append(f"{where}: '{entry}': {error}")
        return found

    def _of_layers(self, match: re.Match[str], layers: re.Match[str]) -> list[str]:
        """Raises ValueError."""
        parent, name = layers["parent"] or "", match["name"] or DEFAULT
        known = self._rows.get(parent)
        if known is None:
            raise ValueError(f"'layers' defines no operators of layers of '{parent}'{near(parent, list(self._rows))}")
        if name not in known:
            raise ValueError(f"'layers' defines no operators '{name}' of '{parent}'; it has {', '.join(known)}")
        numbers = range_of(layers)
        rows = known[name]
        labels = labels_of(rows)
        wrong = [label for label in (match["start"], match["stop"]) if label is not None and label not in labels]
        if wrong:
            raise ValueError(f"such a layer has no '{wrong[0]}'{near(wrong[0], labels)}")
        start = labels.index(match["start"]) if match["start"] else 0
        stop = labels.index(match["stop"]) if match["stop"] else None
        if len(numbers) == 1 and stop is not None and stop <= start:
            raise ValueError(f"'{labels[stop]}' does not come behind '{labels[start]}'")
        found: list[str] = []
        for number in numbers:
            part = (start if number == numbers[0] else 0, stop if number == numbers[-1] else None)
            found += (row[0] for row in unfolded(FoldedLayers(parent, number, number, name, part), rows))
        return found


def range_of(layers: re.Match[str]) -> range:
    """The numbers of `LAYERS`. Raises ValueError."""
    first, last = int(layers["first"]), int(layers["last"] or layers["first"])
    if not first <= last < first + MOST_IN_A_ROW:
        raise ValueError(f"a range of layers goes from the lower number to the higher, at most {MOST_IN_A_ROW}")
    return range(first, last + 1)
