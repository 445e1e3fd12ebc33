"""How a plan file writes the fields of a stage that have a row per operator, parameter or exchange.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from autopar.plan.file_format.fields import OPERATOR_LINE, operator_lines
from autopar.plan.file_format.folding import Definitions, FoldedLayers, Item, Row, unfolded

_DEFAULT = "A"
REFERENCE = re.compile(r"(?:(?P<parent>.+)\.)?(?P<first>0|[1-9]\d{0,8})(?:-(?P<last>\d{1,9}))?")
ENTRY = re.compile(r"(?P<path>\S+)(?: as (?P<name>\S+))?(?: from (?P<start>\S+))?(?: before (?P<stop>\S+))?")
_PART = re.compile(r"as (?P<name>[^\[\] ]+)(?:\[(?P<start>\d{0,9}):(?P<stop>\d{0,9})\])?")
_NUMBER = (int, float)


class Kind(NamedTuple):
    """How a field with rows is written. `read` yields rows and what is folded, or says what is wrong."""

    name: str
    sharding: bool  # of a stage's sharding rather than of the stage
    rows: Callable[[Any], list[Row]]  # of its value in format 2
    value: Callable[[list[Row]], Any]
    subject: Callable[[Row], str]
    write: Callable[[Sequence[Item], Any], Any]  # items and the definitions by parent, as JSON
    read: Callable[[Any], Iterator[Row | Reference | str]]
    pairs: bool = False  # rows are (name, value), and the last one of a name counts


class Reference(NamedTuple):
    """Layers named in a file."""

    text: str
    path: str
    name: str  # of a definition
    start: str | int | None = None  # of the definition's rows: the name or the number of the first one
    stop: str | int | None = None  # ... and of the one behind the last one


def _as(folded: FoldedLayers) -> str:
    return f" as {folded.definition}" if folded.definition != _DEFAULT else ""


def labels_of(rows: Sequence[Row]) -> list[str]:
    """What the rows of a definition are called: `mlp/linear#0`."""
    return [str(row[0]).removeprefix("@").removeprefix(".") for row in rows]


def _ends(folded: FoldedLayers, definitions: dict[str, Definitions]) -> str:
    """` from mlp/linear#0 before /add#1`; "" for a whole layer."""
    labels, (start, stop) = labels_of(definitions[folded.parent].rows[folded.definition]), folded.part
    return f" from {labels[start]}" * (start > 0) + (f" before {labels[stop]}" if stop is not None else "")


def _operator_rows(lines: list[str]) -> list[Row]:
    return [
        (f"{path}/{name}",) for path, _, names in (line.rpartition(": ") for line in lines) for name in names.split()
    ]


def _write_operators(items: Sequence[Item], definitions: dict[str, Definitions]) -> list[str]:
    found: list[str] = []
    keys: list[str] = []
    for item in items:
        if not isinstance(item, FoldedLayers):
            keys.append(item[0])
            continue
        found += operator_lines(keys)
        keys = []
        found.append(f"{item.path}{_as(item)}{_ends(item, definitions)}")
    return found + operator_lines(keys)


def _read_operators(value: Any) -> Iterator[Row | Reference | str]:
    for index, entry in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(entry) if isinstance(entry, str) else None
        if line is not None:
            yield from ((f"{line[1]}/{name}",) for name in line[2].split(" "))
            continue
        found = ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if found is None or REFERENCE.fullmatch(found["path"]) is None:
            yield (
                f"[{index}] must be like 'module.path: linear#0 relu#1', or layers such as 'model.layers.0-7', got "
                f"{entry!r}"
            )
        else:
            yield Reference(entry, found["path"], found["name"] or _DEFAULT, found["start"], found["stop"])


def _write_pairs(items: Sequence[Item], definitions: dict[str, Definitions]) -> dict[str, str]:
    """Neighbouring operators of one module with one value make one entry, `mlp: linear#0 add#1`."""
    found: dict[str, str] = {}
    for (module, text), run in itertools.groupby(items, key=_module_and_value):
        for item in run if module is None else ():
            if isinstance(item, FoldedLayers) and item.path in found:  # another part of the layer: a name stands once
                found |= dict(unfolded(item, definitions[item.parent].rows[item.definition]))
            elif isinstance(item, FoldedLayers):
                found[item.path] = f"as {item.definition}{_ends(item, definitions)}"
            else:
                found[item[0]] = item[1]
        if module is not None:
            line = operator_lines(row[0] for row in run if not isinstance(row, FoldedLayers))[0]
            found[line if " " in line.partition(": ")[2] else line.replace(": ", "/")] = text
    return found


def _module_and_value(item: Item) -> tuple[str | None, str]:
    """Of an operator's row; (None, "") for other ones."""
    if isinstance(item, FoldedLayers):
        return None, ""
    module, slash, operator = item[0].rpartition("/")
    return (module, item[1]) if slash and OPERATOR_LINE.fullmatch(f"{module}: {operator}") else (None, "")


def _read_pairs(value: Any) -> Iterator[Row | Reference | str]:
    for name, text in value.items() if isinstance(value, dict) else ():
        found = ENTRY.fullmatch(f"{name} {text}") if isinstance(text, str) and text.startswith("as ") else None
        line = OPERATOR_LINE.fullmatch(name)
        if found is not None and REFERENCE.fullmatch(name):
            yield Reference(f"{name}: {text}", name, found["name"], found["start"], found["stop"])
        elif line is not None:
            yield from ((f"{line[1]}/{operator}", text) for operator in line[2].split(" "))
        else:
            yield name, text


def _write_lists(items: Sequence[Item], _: Any) -> list[list[Any]]:
    return [_reference_row(item) if isinstance(item, FoldedLayers) else list(item) for item in items]


def _reference_row(item: FoldedLayers) -> list[str]:
    start, stop = item.part
    part = "" if item.part == (0, None) else f"[{start or ''}:{'' if stop is None else stop}]"
    return [item.path, f"as {item.definition}{part}"]


def _row_reference(row: Any) -> Reference | None:
    """What `["model.layers.0-7", "as A[2:]"]` names."""
    if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str) or not isinstance(row[1], str):
        return None
    found = _PART.fullmatch(row[1])
    if found is None or not REFERENCE.fullmatch(row[0]):
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


def _write_redistributions(items: Sequence[Item], definitions: Any) -> list[list[Any]]:
    """[tensor, steps that readers share, steps of each reader, readers ...]; `.weight` is that of the first reader's
    module, and "" stands for where the readers' own steps begin."""
    found: list[list[Any]] = []
    last: tuple[Any, ...] = ()
    for item in items:
        if isinstance(item, FoldedLayers):
            found += _write_lists([item], definitions)
            last = ()
            continue
        tensor, reader, shared, own = item
        if last == (tensor, shared, own):
            found[-1].append(reader)
            continue
        module = reader.rpartition("/")[0]
        short = tensor.removeprefix(module) if module and tensor.startswith(f"{module}.") else tensor
        found.append([short, "" if shared == _begin(own) else shared, own, reader])
        last = (tensor, shared, own)
    return found


def _begin(passage: str) -> str:
    """Where steps begin and, if the gradient takes some, where those end: `S0, back S0` of `S0 > R, back P > S0`."""
    forward, back, backward = passage.partition(", back ")
    return f"{forward.partition(' > ')[0]}{back}{backward.rpartition(' > ')[2]}"


def _read_redistributions(value: Any) -> Iterator[Row | Reference | str]:
    for entry in _lists("tensor, shared steps, own steps, readers ..", str, str, str, str, more=str)(value):
        if isinstance(entry, tuple) and not isinstance(entry, Reference):
            tensor, shared, own, *readers = entry
            whole = f"{readers[0].rpartition('/')[0]}{tensor}" if tensor.startswith(".") else tensor
            yield from ((whole, reader, shared or _begin(own), own) for reader in readers)
        else:
            yield entry


def _write_repeated(items: Sequence[Item], definitions: Any) -> list[list[Any]]:
    """Neighbouring operators of one module make one row, `["mlp: linear#0 add#1", 1e-6, 2e-6]`."""
    found: list[list[Any]] = []
    for module, run in itertools.groupby(items, key=lambda item: _module_and_value(item)[0]):
        if module is None:
            found += _write_lists(list(run), definitions)
        else:
            rows = [row for row in run if not isinstance(row, FoldedLayers)]
            found.append([operator_lines(row[0] for row in rows)[0], *(row[1] for row in rows)])
    return found


def _read_repeated(value: Any) -> Iterator[Row | Reference | str]:
    each = _lists("operators, seconds ..", str, _NUMBER)
    for index, row in enumerate(value if isinstance(value, list) else ()):
        line = OPERATOR_LINE.fullmatch(row[0]) if isinstance(row, list) and row and isinstance(row[0], str) else None
        names = [f"{line[1]}/{name}" for name in line[2].split(" ")] if line is not None else []
        if names and len(names) + 1 != len(row):
            yield f"[{index}] has {len(names)} operators and {len(row) - 1} numbers of seconds, {row!r}"
        for one in each([[name, seconds] for name, seconds in zip(names, row[1:], strict=False)] if names else [row]):
            yield one if not isinstance(one, str) else f"[{index}]{one[3:]}"


def _write_exchanges(items: Sequence[Item], definitions: Any) -> list[list[Any]]:
    """[operator, tensor, numbers ..., tensor, numbers ...]; `.weight` is that of the operator's module."""
    found: list[list[Any]] = []
    for item in items:
        if isinstance(item, FoldedLayers):
            found += _write_lists([item], definitions)
            continue
        operator, tensor, *numbers = item
        module = operator.rpartition("/")[0]
        cells = [tensor.removeprefix(module) if module and tensor.startswith(f"{module}.") else tensor, *numbers]
        if found and found[-1][0] == operator:
            found[-1] += cells
        else:
            found.append([operator, *cells])
    return found


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


KINDS = (
    Kind(
        "operators",
        False,
        _operator_rows,
        lambda rows: operator_lines(row[0] for row in rows),
        lambda row: str(row[0]),
        _write_operators,
        _read_operators,
    ),
    *(
        Kind(
            name,
            True,
            lambda value: list(value.items()),
            dict,
            lambda row: str(row[0]),
            _write_pairs,
            _read_pairs,
            True,
        )
        for name in ("strategies", "parameters")
    ),
    Kind(
        "redistributions",
        True,
        lambda value: [tuple(row) for row in value],
        lambda rows: [list(row) for row in rows],
        lambda row: str(row[1] or row[0]),
        _write_redistributions,
        _read_redistributions,
    ),
    Kind(
        "exchanges",
        True,
        lambda value: [tuple(row) for row in value],
        lambda rows: [list(row) for row in rows],
        lambda row: str(row[0]),
        _write_exchanges,
        _read_exchanges,
    ),
    Kind(
        "repeated",
        True,
        lambda value: [(one["operator"], one["seconds"]) for one in value],
        lambda rows: [dict(zip(("operator", "seconds"), row, strict=True)) for row in rows],
        lambda row: str(row[0]),
        _write_repeated,
        _read_repeated,
    ),
)
