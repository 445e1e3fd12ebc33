"""The collectives of a plan file: each is written once, and named by its number wherever it happens.

"collectives": {"0-1": ["all_reduce tensor backward", 262144, 7.1e-06, 8192, 1.4e-08]}     bytes and seconds of each
"exchanges": [["layers.3.mlp.up: linear", "layers.3.norm/mul#1", 0], ...]                        operators, tensor, numbers

Collectives of equal bytes and seconds that always follow one another have one number: the gradients of a parameter are
reduced, and then its parts gathered. Formats 3 to 5 have a list with a row for each.

"2": ["reduce_scatter data backward once, all_gather once", 8192, 1.4e-08]
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_NAMES = ("collective", "axis", "nbytes", "seconds")
_ENDS = ("operator", "tensor")
_FLAGS = ("backward", "once")
_WORDS = r"(?: backward)?(?: once)?"
_KIND = re.compile(rf"(?P<kind>\S+) (?P<axis>\S+?)(?P<flags>{_WORDS})(?P<more>(?:, \S+{_WORDS})*)")


class Collectives:
    """The table, as it is filled by writing or read from a file."""

    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    @classmethod
    def read(cls, table: Any, problems: list[str]) -> Collectives:
        """What is no table goes into `problems`."""
        found = cls()
        for index, row in enumerate(table if isinstance(table, list) else [table]):
            well_formed = isinstance(row, list) and len(row) > len(_NAMES) and len(row) % 2
            if not well_formed:
                problems.append(
                    f"collectives[{index}] must be [{', '.join(_NAMES)}, flags, collective, flags ..], got {row!r}"
                )
            found.table.append(row if well_formed else ["", "", 0, 0.0, ""])
        return found

    @classmethod
    def read_groups(cls, groups: Any, problems: list[str]) -> Collectives:
        """The same of format 6."""
        found = cls()
        if not isinstance(groups, dict):
            problems.append(f"collectives must be an object from numbers such as '0-3' to collectives, got {groups!r}")
            return found
        for name, row in groups.items():
            text, *values = row if isinstance(row, list) and row else [None]
            match = _KIND.fullmatch(text) if isinstance(text, str) else None
            first, n = len(found.table), len(values) // 2
            if match is None or not values or len(values) % 2:
                problems.append(
                    f"collectives['{name}'] must be like ['all_reduce data backward', nbytes, seconds, nbytes, seconds "
                    f"..], got {row!r}"
                )
                continue
            kind, axis = match["kind"], match["axis"]
            more = (one.partition(" ") for one in (match["more"] or "").split(", ")[1:])
            flags = [(match["flags"] or "").strip(), *(part for name, _, words in more for part in (name, words))]
            found.table += ([kind, axis, *values[i : i + 2], *flags] for i in range(0, len(values), 2))
            if name != _numbers(first, n):
                problems.append(
                    f"collectives['{name}'] has {n} collectives, which are '{_numbers(first, n)}', as others before it "
                    f"are those before {first}"
                )
        return found

    def groups(self, lists: Sequence[list[list[Any]]]) -> dict[str, list[Any]]:
        """The table, with collectives of one kind together; they are renumbered, in all `lists` of rows."""
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(self.table):
            alike[tuple(row[:2] + row[4:])].append(number)
        found: dict[str, list[Any]] = {}
        renumbered: dict[int, int] = {}
        for kind, numbers in alike.items():
            values = itertools.chain.from_iterable(self.table[number][2:4] for number in numbers)
            found[_numbers(len(renumbered), len(numbers))] = [_text(*kind), *values]
            renumbered |= {number: len(renumbered) + place for place, number in enumerate(numbers)}
        for row in itertools.chain(*lists):
            row[2:] = [renumbered[number] for number in row[2:]]
        return found

    def rows(self, exchanges: Sequence[dict[str, Any]]) -> list[list[Any]]:
        """[operator, tensor, numbers of collectives ...] of exchanges as format 2 has them."""
        found = []
        for (operator, tensor), run in itertools.groupby(exchanges, key=lambda one: tuple(one[name] for name in _ENDS)):
            found.append([operator, tensor, *(self._number(one) for one in run)])
        return found

    def exchanges(self, rows: Sequence[list[Any]], where: str, problems: list[str]) -> list[dict[str, Any]]:
        """The exchanges of rows; numbers that the table does not have go into `problems`."""
        found = []
        for operator, tensor, *numbers in rows:
            for number in numbers:
                if not 0 <= number < len(self.table):
                    problems.append(
                        f"{where}: '{operator}' has collective {number}, but there are {len(self.table)} collectives"
                    )
                    continue
                first, *values = self.table[number][: len(_NAMES)]
                more = [first, *self.table[number][len(_NAMES) :]]
                for name, flags in zip(more[::2], more[1::2], strict=True):
                    one = dict(zip(_NAMES, [name, *values], strict=True))
                    one |= {"operator": operator, "tensor": tensor}
                    found.append(one | {flag: True for flag in _FLAGS if flag in str(flags).split()})
        return found

    def joined(self, lists: Sequence[list[list[Any]]]) -> None:
        """Give collectives that always follow one another, with equal axis, bytes and seconds, one number, in the table
        and in all `lists` of rows."""
        after: dict[int | None, set[int | None]] = defaultdict(set)
        before: dict[int | None, set[int | None]] = defaultdict(set)
        for _, _, *numbers in itertools.chain(*lists):
            for one, other in itertools.pairwise([None, *numbers, None]):
                after[one].add(other)
                before[other].add(one)
        follows: dict[int, int] = {}  # the one before
        for number, others in after.items():
            other = next(iter(others))
            if number is None or other is None or len(others) > 1:
                continue
            if other != number and before[other] == {number} and self.table[other][1:4] == self.table[number][1:4]:
                follows[other] = number
        table: list[list[Any]] = []
        renumbered: dict[int, int] = {}
        for number, row in enumerate(self.table):  # a collective gets its number after the one before it
            if number in follows and follows[number] < number:
                renumbered[number] = renumbered[follows[number]]
                table[renumbered[number]] += [row[0], row[4]]
            else:
                follows.pop(number, None)
                renumbered[number] = len(table)
                table.append(list(row))
        self.table = table
        for row in itertools.chain(*lists):
            row[2:] = [renumbered[number] for number in row[2:] if number not in follows]

    def _number(self, exchange: dict[str, Any]) -> int:
        flags = " ".join(flag for flag in _FLAGS if exchange.get(flag))
        row = (*(exchange[name] for name in _NAMES), flags)
        if row not in self._numbers:
            self._numbers[row] = len(self.table)
            self.table.append(list(row))
        return self._numbers[row]


def _text(kind: str, axis: str, flags: str, *more: str) -> str:
    """`reduce_scatter data backward once, all_gather once`"""
    first = f"{kind} {axis} {flags}".rstrip()
    return ", ".join([first, *(f"{name} {words}".rstrip() for name, words in zip(more[::2], more[1::2], strict=True))])


def _numbers(first: int, n: int) -> str:
    """`0-3`"""
    return f"{first}-{first + n - 1}" if n > 1 else str(first)
