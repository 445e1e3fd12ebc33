"""The collectives of a plan file: each is written once, and named by its number wherever it happens.

"collectives": [[0, "all_reduce tensor backward", 262144, 7.1e-06, 8192, 1.4e-08]]       0 and 1: bytes and seconds
"exchanges": [["layers.3.mlp.up: linear", "layers.3.norm/mul#1", 0], ...]                operators, tensor, numbers

A row may have several kinds of collectives, each with these bytes and seconds: first all of the first kind, then all of
the second one. Collectives of equal bytes and seconds that always follow one another have one number: the gradients of
a parameter are reduced, and then its parts gathered. Formats 3 to 5 have a list with a row for each.

[2, "reduce_scatter data backward once, all_gather once", 8192, 1.4e-08]
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_NAMES = ("collective", "axis", "nbytes", "seconds")
_ENDS = ("operator", "tensor")
_FLAGS = ("backward", "once", "again")
_WORDS = "".join(f"(?: {flag})?" for flag in _FLAGS)
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
        for index, row in enumerate(groups if isinstance(groups, list) else [groups]):
            number, *rest = row if isinstance(row, list) and row else [None]
            matches = [_KIND.fullmatch(text) for text in itertools.takewhile(lambda cell: isinstance(cell, str), rest)]
            values = rest[len(matches) :]
            if type(number) is not int or not matches or None in matches or not values or len(values) % 2:
                problems.append(
                    f"collectives[{index}] must be like [number, 'all_reduce data backward', nbytes, seconds, nbytes, "
                    f"seconds ..], got {row!r}"
                )
                continue
            if number != len(found.table):
                problems.append(f"collectives[{index}] has number {number}, but there are {len(found.table)} before it")
            for match in filter(None, matches):
                more = (one.partition(" ") for one in match["more"].split(", ")[1:])
                flags = [match["flags"].strip(), *(part for name, _, words in more for part in (name, words))]
                kind, axis = match["kind"], match["axis"]
                found.table += ([kind, axis, *values[i : i + 2], *flags] for i in range(0, len(values), 2))
        return found

    def groups(self, lists: Sequence[list[list[Any]]]) -> list[list[Any]]:
        """The table, with collectives of one kind together; they are renumbered, in all `lists` of rows."""
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(self.table):
            alike[tuple(row[:2] + row[4:])].append(number)
        kinds: dict[str, list[tuple[Any, ...]]] = defaultdict(list)  # that have the same bytes and seconds
        for kind, numbers in alike.items():
            kinds[repr([self.table[number][2:4] for number in numbers])].append(kind)
        found: list[list[Any]] = []
        renumbered: dict[int, int] = {}
        for same in kinds.values():
            values = itertools.chain.from_iterable(self.table[number][2:4] for number in alike[same[0]])
            found.append([len(renumbered), *(_text(*kind) for kind in same), *values])
            for kind in same:
                n = len(renumbered)
                renumbered |= {number: n + place for place, number in enumerate(alike[kind])}
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
