"""A selection made small before it is solved: options that cannot be needed are dropped, equal labels made one.

An option a stands in for b, whatever the neighbours choose, if

    u_a - u_b + sum over edges e of max over x of (c_e[a, x] - c_e[b, x]) <= 0        (and bytes_a <= bytes_b)

(R. Goldstein, "Efficient rotamer elimination applied to protein side-chains and related spin glasses", 1994). Dropping
b may make labels of the neighbours needless, and so drop more: repeated until nothing changes. All of it is worked out
once for equal variables with equal edges.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.intra_op.elimination.choices import SelectionProblem

# Labels of the other end by which a first look tells which options cannot stand in for which.
_SEEN = 12
# Entries that are compared at a time: few enough for the cache.
_CHUNK = 1 << 16
# Labels up to which they are numbered anew through an array of all instead of by sorting.
_FEW = 1 << 12


# The number of an array in `Tokens`: of options' classes (a partition), of seconds, of bytes or of a table.
Token = NewType("Token", int)


class Tokens:
    """Numbers for arrays, the same for equal ones. A partition of options is the array of their classes."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []  # by token
        self._by_value: dict[tuple[str, tuple[int, ...], bytes], Token] = {}
        self._by_identity: dict[int, tuple[np.ndarray, Token]] = {}  # holds the array, so that its id stays its own
        self._refined: dict[tuple[Token, Token], Token] = {}
        self._first: dict[Token, np.ndarray] = {}

    def of(self, array: np.ndarray, kept: bool = False) -> Token:
        """The token of an array that does not change. `kept`: the same object will come again; find it by identity."""
        if kept and id(array) in self._by_identity:
            return self._by_identity[id(array)][1]
        key = (array.dtype.str, array.shape, array.tobytes())
        token = self._by_value.setdefault(key, Token(len(self.arrays)))
        if token == len(self.arrays):
            self.arrays.append(array)
        if kept:
            self._by_identity[id(array)] = (array, token)
        return token

    def refined(self, a: Token, b: Token) -> Token:
        """The coarsest partition that tells apart what either of two tells apart."""
        if a == b:
            return a
        key = (a, b) if a < b else (b, a)
        if key not in self._refined:
            left, right = self.arrays[key[0]], self.arrays[key[1]]
            self._refined[key] = self.of(_without_gaps(left * (int(right.max()) + 1) + right))
        return self._refined[key]

    def first(self, token: Token) -> np.ndarray:
        """The first option of each class of a partition."""
        if token not in self._first:
            self._first[token] = np.unique(self.arrays[token], return_index=True)[1]
        return self._first[token]

    def size(self, token: Token) -> int:
        """The number of classes of a partition."""
        return len(self.first(token))


def _without_gaps(labels: np.ndarray) -> np.ndarray:
    """The same partition by classes 0, 1, ..."""
    if labels.max() >= _FEW:
        return np.unique(labels, return_inverse=True)[1].astype(np.int64)
    used = np.zeros(_FEW, dtype=np.int64)
    used[labels] = 1
    return (used.cumsum() - 1)[labels]


def _equal_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of a table the first of each set of equal rows, and of every row its set."""
    known: dict[bytes, int] = {}
    of_row = np.array([known.setdefault(row.tobytes(), len(known)) for row in table])
    return table[np.unique(of_row, return_index=True)[1]], of_row


def _most_more(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The most, over the last axis, that the entries of one table are more than those of another."""
    with np.errstate(invalid="ignore"):
        more = first - second
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        more[np.isnan(more)] = -np.inf  # neither is allowed
    found: np.ndarray = more.max(axis=-1)
    return found


class Pair(NamedTuple):
    """An edge between variables i < j: table[rows[s], columns[t]] seconds for option s of i and option t of j."""

    i: int
    j: int
    rows: Token  # partition of i's options
    columns: Token  # partition of j's options
    table: Token  # array [classes, classes] in s


class _Side(NamedTuple):
    """An edge as one of its variables sees it."""

    labels: Token  # partition of the variable's options
    table: Token
    turned: bool  # the variable's labels are the columns


class Reduced(NamedTuple):
    """Choices with needless options and labels dropped."""

    options: tuple[np.ndarray, ...]  # of every variable: the numbers that its options had, ascending
    seconds: tuple[Token, ...]  # by variable: array [options] in s
    bytes: tuple[Token, ...]  # by variable: array [options] in bytes
    pairs: tuple[Pair, ...]
    tokens: Tokens


def reduced(choices: SelectionProblem, with_bytes: bool) -> Reduced:
    """Choices without the options that no best choice needs, nor one within any memory limit if `with_bytes`.

    Raises InfeasibleError if a variable has no option that its neighbours allow.
    O(options^2 x edges + labels^3) for each distinct variable.
    """
    reduction = _Reduction(choices, with_bytes)
    while reduction.drop():
        pass
    return Reduced(
        tuple(reduction.options),
        tuple(reduction.seconds),
        tuple(reduction.bytes),
        tuple(reduction.pairs),
        reduction.tokens,
    )


class _Reduction:
    def __init__(self, choices: SelectionProblem, with_bytes: bool) -> None:
        of = self.tokens = Tokens()
        self.options = [np.arange(len(seconds)) for seconds in choices.seconds]
        self.seconds = [of.of(seconds, kept=True) for seconds in choices.seconds]
        self.bytes = [of.of(size, kept=True) for size in choices.bytes]
        self.with_bytes = with_bytes
        self.pairs: list[Pair] = []
        self._compact: dict[tuple[Token, Token, Token], tuple[Token, Token, Token]] = {}
        self._least_slack: dict[tuple[Token, bool], np.ndarray] = {}
        self._needed: dict[tuple[Token, Token, tuple[_Side, ...]], np.ndarray] = {}
        self._transposed: dict[Token, Token] = {}
        for e in choices.edges:
            pair = Pair(e.source, e.target, of.of(e.out, True), of.of(e.into, True), of.of(e.seconds, True))
            if e.source == e.target:
                self._add(e.source, e.seconds[e.out, e.into])
            elif e.source > e.target:
                self.pairs.append(Pair(pair.j, pair.i, pair.columns, pair.rows, self._transpose(pair.table)))
            else:
                self.pairs.append(pair)
        self._restrict({i: self.options[i] == option for i, option in choices.fixed.items()})

    def drop(self) -> bool:
        """One round; whether it dropped an option."""
        self._merge_labels()
        around: list[list[_Side]] = [[] for _ in self.options]
        for pair in self.pairs:
            around[pair.i].append(_Side(pair.rows, pair.table, False))
            around[pair.j].append(_Side(pair.columns, pair.table, True))
        dropping: dict[int, np.ndarray] = {}
        for i, edges in enumerate(around):
            key = (self.seconds[i], self.bytes[i], tuple(edges))
            if key not in self._needed:
                self._needed[key] = self._needed_options(*key)
            needed = self._needed[key]
            if not needed.any():
                raise InfeasibleError(f"no option of variable {i} is allowed together with those of its neighbours")
            if not needed.all():
                dropping[i] = needed
        self._restrict(dropping)
        return bool(dropping)

    def _merge_labels(self) -> None:
        """Labels that no option has dropped, those with equal seconds made one, edges that one end decides made its."""
        pairs = []
        for i, j, *tokens in self.pairs:
            key = (tokens[0], tokens[1], tokens[2])
            if key not in self._compact:
                self._compact[key] = self._compacted(*(self.tokens.arrays[token] for token in tokens))
            rows, columns, token = self._compact[key]
            table = self.tokens.arrays[token]
            if table.shape[0] == 1:
                self._add(j, table[0][self.tokens.arrays[columns]])
            elif table.shape[1] == 1:
                self._add(i, table[:, 0][self.tokens.arrays[rows]])
            else:
                pairs.append(Pair(i, j, rows, columns, token))
        self.pairs = pairs

    def _compacted(self, rows: np.ndarray, columns: np.ndarray, table: np.ndarray) -> tuple[Token, Token, Token]:
        used_rows, rows = np.unique(rows, return_inverse=True)
        used_columns, columns = np.unique(columns, return_inverse=True)
        table, merged_rows = _equal_rows(table[np.ix_(used_rows, used_columns)])
        turned, merged_columns = _equal_rows(table.T)
        table = np.ascontiguousarray(turned.T, dtype=np.float64)
        return self.tokens.of(merged_rows[rows]), self.tokens.of(merged_columns[columns]), self.tokens.of(table)

    def _needed_options(self, seconds: Token, size: Token, edges: tuple[_Side, ...]) -> np.ndarray:
        """[options] whether no other option stands in for it."""
        own, held = self.tokens.arrays[seconds], self.tokens.arrays[size]
        least = own + sum(
            (self._seen_from(edge).min(axis=1)[self.tokens.arrays[edge.labels]] for edge in edges),
            start=np.zeros(len(own)),
        )
        needed = np.isfinite(least)
        allowed = np.flatnonzero(needed)
        held = (held if held.ndim > 1 else held[:, None]) if self.with_bytes else np.zeros((len(own), 1))
        # Only an earlier one in this order may stand in, so that of several equal ones one stays, rounding or not.
        order = allowed[np.lexsort((allowed, held[allowed].sum(axis=1), least[allowed]))]
        at = [self.tokens.arrays[edge.labels][order] for edge in edges]
        with np.errstate(invalid="ignore"):  # inf - inf: not a number, which stands in for nothing
            excess = own[order][:, None] - own[order]
            for place, edge in zip(at, edges, strict=True):
                excess = excess + self._least_slack_of(edge)[np.ix_(place, place)]
            fewer = (held[order][:, None] <= held[order]).all(axis=2)
            possible = np.triu((excess <= 0) & fewer, k=1)
            a, b = np.nonzero(possible)
            if not len(a):
                return needed
            exact = own[order][a] - own[order][b]
            for place, edge in zip(at, edges, strict=True):
                exact = exact + self._slack(edge, place[a], place[b])
            stands_in = np.zeros(len(order), dtype=bool)
            stands_in[b[exact <= 0]] = True
        needed[order[stands_in]] = False
        return needed

    def _seen_from(self, edge: _Side) -> np.ndarray:
        """[own labels, labels of the other end] s"""
        table = self.tokens.arrays[edge.table]
        return table.T if edge.turned else table

    def _least_slack_of(self, edge: _Side) -> np.ndarray:
        """[a, b]: a lower bound of `_slack`, from some labels of the other end."""
        key = edge.table, edge.turned
        if key not in self._least_slack:
            table = self._seen_from(edge)
            seen = np.unique(np.linspace(0, table.shape[1] - 1, _SEEN).astype(int))
            self._least_slack[key] = _most_more(table[:, None, seen], table[:, seen])
        return self._least_slack[key]

    def _slack(self, edge: _Side, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """[pairs] the most that label a takes longer than label b, over all labels of the other end."""
        table = np.ascontiguousarray(self._seen_from(edge))
        if table.shape[1] <= _SEEN:
            found: np.ndarray = self._least_slack_of(edge)[a, b]
            return found
        pairs, number = np.unique(a * len(table) + b, return_inverse=True)
        slack = np.empty(len(pairs))
        rows = max(1, _CHUNK // table.shape[1])
        for start in range(0, len(pairs), rows):
            first, second = np.divmod(pairs[start : start + rows], len(table))
            slack[start : start + rows] = _most_more(table[first], table[second])
        return slack[number]

    def _transpose(self, table: Token) -> Token:
        if table not in self._transposed:
            turned = self.tokens.of(np.ascontiguousarray(self.tokens.arrays[table].T))
            self._transposed |= {table: turned, turned: table}
        return self._transposed[table]

    def _add(self, i: int, seconds: np.ndarray) -> None:
        self.seconds[i] = self.tokens.of(self.tokens.arrays[self.seconds[i]] + seconds)

    def _restrict(self, needed: dict[int, np.ndarray]) -> None:
        for i, mask in needed.items():
            self.options[i] = self.options[i][mask]
            self.seconds[i] = self._kept(self.seconds[i], mask)
            self.bytes[i] = self._kept(self.bytes[i], mask)
        for n, (i, j, rows, columns, table) in enumerate(self.pairs):
            if i in needed:
                rows = self._kept(rows, needed[i])
            if j in needed:
                columns = self._kept(columns, needed[j])
            self.pairs[n] = Pair(i, j, rows, columns, table)

    def _kept(self, token: Token, mask: np.ndarray) -> Token:
        return self.tokens.of(self.tokens.arrays[token][mask])
