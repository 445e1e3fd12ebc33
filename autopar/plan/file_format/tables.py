"""The tables of a sharding: what each operator, or each parameter, of a stage has, and how a plan file writes it.

table             of an operator or parameter            in a file
strategies        placements                             {"S0 R -> S0": ["mlp.gate,up: linear", "norm: mul"]}
parameters        placements                             {"S0": "mlp.gate,up: weight"}
redistributions   (tensor, shared steps, own steps) ..   [["norm/mul#0", "", "S0 > R, back", "mlp: linear"], ..]
exchanges         (tensor, numbers of collectives) ..    [["mlp.up: linear", "norm/mul#0", 1, ".weight", 2, 3]]
repeated          seconds                                [[1e-6, "mlp: mul#0", "norm: add"]]

Lines are those of `names.py`. A tensor `.weight` is that of the operator's module. In redistributions, "" means that
the shared steps end where the readers' own steps begin, or the other way round; with "S0 > R, back" the gradient goes
back the same way, "P > S0". A reader puts rows in the order of the stage's operators; reader "" is what comes after the
stage. An operator that has nothing although its layer's definition says so: "none", or a row without values. A table
whose rows are in another order, or of operators that the stage does not have, is {"rows": [...]}, with all.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.plan.file_format.names import OPERATORS, OUTPUT, PARAMETERS, Known, lines_for

Value = Any  # what a table has of a key: texts and numbers, in tuples; hashable
Pairs = list[tuple[str, Value]]
ROWS = "rows"
NOTHING = "none"
_GRADIENTS = str.maketrans("RP", "PR")  # of placements
_NUMBER = (int, float)


class LineValue(NamedTuple):
    """Of a table in a file: what the keys that a line names have; `value` None: nothing."""

    line: str
    value: Value


class Wrong(NamedTuple):
    """What cannot be read; `text` follows the table's place."""

    text: str


class TableFormat(NamedTuple):
    """How a table is written."""

    name: str
    separator: str
    pairs: Callable[[Any], Pairs]  # of its value in format 2
    flat: Callable[[Pairs], Any]  # ... and back
    write: Callable[[Sequence[tuple[list[str], Value]]], Any]  # lines and what their keys have, as JSON
    read: Callable[[Any], Iterator[LineValue | Wrong]]
    adds: bool  # entries of one key add up; otherwise the last one counts
    is_object: bool  # in JSON: otherwise a list


def compact(table: TableFormat, values: Mapping[str, Value], known: Known) -> Any:
    """A table as JSON: each value once, with lines for the keys that have it. `known`: operators."""
    keys: dict[Value, list[str]] = defaultdict(list)
    for key, value in values.items():
        keys[_kind_of(value)].append(key)
    known = known._replace(separator=table.separator)
    exact = set() if table.adds or table.separator == PARAMETERS else _by_number(keys, known)
    return table.write([(lines_for(mine, known, exact.difference(mine)), value[1]) for value, mine in keys.items()])


def _by_number(keys: Mapping[Any, list[str]], known: Known) -> set[str]:
    """Operators that are named by their numbers since most others of their kind, in the same module, have another
    value: a line may then name the kind."""
    value_of = {key: value for value, mine in keys.items() for key in mine}
    found: set[str] = set()
    for module, names in known.names.items():
        kinds: dict[str, list[str]] = defaultdict(list)
        for name in names:
            kinds[name.rpartition("#")[0]].append(f"{module}/{name}")
        for mine in kinds.values():
            if all(key in value_of for key in mine):
                usual, times = Counter(value_of[key] for key in mine).most_common(1)[0]
                if len(mine) > 2 * (len(mine) - times):
                    found |= {key for key in mine if value_of[key] != usual}
    return found


def _kind_of(value: Value) -> tuple[str, Value]:
    """1 and 1.0 are equal, but are not written alike."""
    return repr(value), value


# -- texts by name ----------------------------------------------------------------------------------------------------


def _write_texts(groups: Sequence[tuple[list[str], Value]]) -> dict[str, Any]:
    return {NOTHING if text is None else text: lines[0] if len(lines) == 1 else lines for lines, text in groups}


def _read_texts(value: Any) -> Iterator[LineValue | Wrong]:
    if not isinstance(value, dict):
        yield Wrong(f" must be an object from placements to names, got {value!r}")
        return
    for text, lines in value.items():
        each = lines if isinstance(lines, list) else [lines]
        wrong = [line for line in each if not isinstance(line, str)]
        turned = [line for line in each if isinstance(line, str) and " -> " in line]
        if wrong:
            yield Wrong(f" must be an object from placements such as 'S0R' to names, got {wrong[0]!r} for '{text}'")
        elif turned:
            yield Wrong(f" has names before placements; write '{turned[0]}': '{text}'")
        else:
            yield from (LineValue(line, None if text == NOTHING else text) for line in each)


# -- rows -------------------------------------------------------------------------------------------------------------


def end(passage: str) -> str:
    """Where steps end and, if the gradient takes some, where those begin: `R, back P` of `S0 > R, back P > S0`."""
    forward, back, backward = passage.partition(", back ")
    return f"{forward.rpartition(' > ')[2]}{back}{backward.partition(' > ')[0]}"


def _rows(what: str, value: Any, fewest: int, wrong: Callable[[list[Any]], list[Any]]) -> Iterator[list[Any] | Wrong]:
    """Rows of a list. `what`: the values of one, for errors. `wrong`: those of a row that have a wrong type."""
    if not isinstance(value, list):
        yield Wrong(f" must be a list, got {value!r}")
        return
    for index, row in enumerate(value):
        if not isinstance(row, list) or not row or 1 < len(row) < fewest:
            yield Wrong(f"[{index}] must be [{what}], got {row!r}")
        elif cells := wrong(row):
            yield Wrong(f"[{index}] has a value of a wrong type, {cells[0]!r}, in {row!r}")
        else:
            yield row


def _no_texts(cells: Sequence[Any]) -> list[Any]:
    return [cell for cell in cells if not isinstance(cell, str)]


def _redistribution_pairs(rows: Any) -> Pairs:
    runs = itertools.groupby(rows, key=lambda row: row[1] or f"{OUTPUT}{row[0]}")
    return [(reader, tuple((tensor, shared, own) for tensor, _, shared, own in run)) for reader, run in runs]


def _flat_redistributions(pairs: Pairs) -> list[list[str]]:
    return [[tensor, _reader(reader), shared, own] for reader, value in pairs for tensor, shared, own in value]


def _reader(line: str) -> str:
    return "" if line.startswith(OUTPUT) else line


def _write_redistributions(groups: Sequence[tuple[list[str], Value]]) -> list[list[str]]:
    found = []
    for lines, value in groups:
        if value is None:
            found += [[line] for line in lines]
            continue
        readers = [_reader(line) for line in lines]
        found += [[tensor, *_short_passages(shared, own), *readers] for tensor, shared, own in value]
    return found


def _short_passages(shared: str, own: str) -> tuple[str, str]:
    if shared == begin(own):
        return "", _short(own)
    return _short(shared), "" if own == end(shared) else _short(own)


def _short(passage: str) -> str:
    """`S0 > R, back` of `S0 > R, back P > S0`: the gradient goes back the same way, summed where the value is whole and
    whole where it is summed."""
    forward, back, _ = passage.partition(", back ")
    short = f"{forward}, back"
    return short if back and _whole(short) == passage else passage


def _whole(passage: str) -> str:
    forward = passage.removesuffix(", back")
    if forward == passage:
        return passage
    return f"{passage} {' > '.join(reversed(forward.translate(_GRADIENTS).split(' > ')))}"


def begin(passage: str) -> str:
    """Where steps begin and, if the gradient takes some, where those end: `S0, back S0` of `S0 > R, back P > S0`."""
    forward, back, backward = passage.partition(", back ")
    return f"{forward.partition(' > ')[0]}{back}{backward.rpartition(' > ')[2]}"


def _read_redistributions(value: Any) -> Iterator[LineValue | Wrong]:
    for row in _rows("tensor, shared steps, own steps, readers ..", value, 4, _no_texts):
        if isinstance(row, Wrong):
            yield row
        elif len(row) == 1:
            yield LineValue(row[0], None)
        else:
            tensor, shared, own, *lines = row
            shared, own = _whole(shared), _whole(own)
            steps = (tensor, shared or begin(own), own or end(shared))
            yield from (LineValue(line or f"{OUTPUT}{tensor}", (steps,)) for line in lines)


def _exchange_pairs(rows: Any) -> Pairs:
    runs = itertools.groupby(rows, key=lambda row: row[0])
    return [(operator, tuple(tuple(row[1:]) for row in run)) for operator, run in runs]


def _flat_exchanges(pairs: Pairs) -> list[list[Any]]:
    return [[operator, *cells] for operator, value in pairs for cells in value]


def _write_exchanges(groups: Sequence[tuple[list[str], Value]]) -> list[list[Any]]:
    return [[line, *itertools.chain(*(value or ()))] for lines, value in groups for line in lines]


def _read_exchanges(value: Any) -> Iterator[LineValue | Wrong]:
    def wrong(row: list[Any]) -> list[Any]:
        return [cell for cell in row[1:] if type(cell) not in (int, str)] + _no_texts(row[:2])

    for row in _rows("operators, tensor, numbers ..", value, 3, wrong):
        if isinstance(row, Wrong):
            yield row
        else:
            line, *cells = row
            ends = [*(index for index, cell in enumerate(cells) if isinstance(cell, str)), len(cells)]
            yield LineValue(line, tuple(tuple(cells[a:b]) for a, b in itertools.pairwise(ends)) or None)


def _write_repeated(groups: Sequence[tuple[list[str], Value]]) -> list[list[Any]]:
    return [[seconds, *lines] for lines, seconds in groups]


def _read_repeated(value: Any) -> Iterator[LineValue | Wrong]:
    def wrong(row: list[Any]) -> list[Any]:
        return [cell for cell in row[:1] if cell is not None and type(cell) not in _NUMBER] + _no_texts(row[1:])

    for row in _rows("seconds, operators ..", value, 2, wrong):
        if isinstance(row, Wrong):
            yield row
        else:
            seconds, *lines = row
            yield from (LineValue(line, seconds) for line in lines)


STRATEGIES = "strategies"
PARAMETER_TABLE = "parameters"
EXCHANGES = "exchanges"

_TEXTS: dict[str, Any] = {
    "pairs": lambda value: list(value.items()),
    "flat": dict,
    "write": _write_texts,
    "read": _read_texts,
    "adds": False,
    "is_object": True,
}
TABLES = (
    TableFormat(STRATEGIES, OPERATORS, **_TEXTS),
    TableFormat(PARAMETER_TABLE, PARAMETERS, **_TEXTS),
    TableFormat(
        "redistributions",
        OPERATORS,
        _redistribution_pairs,
        _flat_redistributions,
        _write_redistributions,
        _read_redistributions,
        adds=True,
        is_object=False,
    ),
    TableFormat(
        EXCHANGES,
        OPERATORS,
        _exchange_pairs,
        _flat_exchanges,
        _write_exchanges,
        _read_exchanges,
        adds=True,
        is_object=False,
    ),
    TableFormat(
        "repeated",
        OPERATORS,
        lambda value: [(one["operator"], one["seconds"]) for one in value],
        lambda pairs: [{"operator": operator, "seconds": seconds} for operator, seconds in pairs],
        _write_repeated,
        _read_repeated,
        adds=False,
        is_object=False,
    ),
)
