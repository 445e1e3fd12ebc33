"""Names of equal layers as one: `layers.0-31.mlp/linear`."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?:(?<=[.#])|^)(\d+)(?=[./#]|$)")


def folded(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ in one number as one text each, with the names: module paths, operator keys or parameters.

    It folds the first number first, so that experts of layers become `layers.0-31.experts.0-7`.
    """
    rows = {tuple(_NUMBER.split(name)): [name] for name in dict.fromkeys(names)}  # text, number, text, number, ..
    for place in range(1, max(map(len, rows), default=0), 2):
        alike: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
        for row in rows:
            alike[(*row[:place], "", *row[place + 1 :])].append(row)
        rows = {
            (*row[:place], _ranges([int(one[place]) for one in several]), *row[place + 1 :])
            if len(row) > place
            else row: [name for one in several for name in rows[one]]
            for row, several in alike.items()
            for row in several[:1]
        }
    return {"".join(row): members for row, members in rows.items()}


def operator_text(key: str) -> str:
    """`layers.0-31.fc linear` for `layers.0-31.fc/linear#0`; further operators of a module keep their number."""
    path, _, name = key.rpartition("/")
    return f"{path or 'the model itself'} {name.removesuffix('#0')}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7`."""
    runs = itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
