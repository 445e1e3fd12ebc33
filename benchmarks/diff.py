"""What became slower between two result files, as far as their noise allows to say.

Where both files have the machine's ceiling in the same rounds, times are compared as multiples of it, round by round:
a machine that was slower as a whole made the ceiling slower, too.

    before   system 0.61 0.63 0.90 0.62 0.64      after   0.71 0.70 0.74 0.72 0.73
             ceiling 0.55 0.56 0.81 0.55 0.57             0.55 0.54 0.58 0.55 0.56
             multiple 1.11 1.12 1.11 1.13 1.12            1.29 1.30 1.28 1.31 1.30      slower: 1.16x

A difference is claimed where the bootstrap interval of the ratio of both medians lies beyond the tolerance, at 95 % for
all systems together (Bonferroni). The tolerance covers what two runs of the same code differ by although each of
them is steady: other memory addresses, another temperature.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cost_models.measuring.intervals import LEVEL, Interval, ratio_interval

SLOWER, FASTER, SAME = "slower", "faster", "no difference that the noise allows to claim"
_LEAST_LEVEL = 0.9  # of confidence: five rounds or more in both files
_IDENTITY = ("processor", "torch", "python", "freed memory")


class ResultError(Exception):
    """A file holds no results that can be compared."""


@dataclass(frozen=True)
class Change:
    """One system in both files."""

    what: str  # the benchmark, model and batch
    system: str
    before: float  # s, median
    after: float
    ratio: float  # of the medians after / before; of multiples of the ceiling where `by_ceiling`
    interval: Interval  # of that ratio
    by_ceiling: bool
    verdict: str


@dataclass(frozen=True)
class _Group:
    """Systems that took turns."""

    seconds: Mapping[str, Sequence[float]]
    ceiling: Sequence[float] | None


def run_diff(before: Path, after: Path, tolerance: float) -> int:
    """Print the changes. The exit status: 1 if anything became slower, 2 for files that cannot be compared."""
    try:
        first, second = _read(before), _read(after)
        changes = compare(first, second, tolerance)
    except ResultError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 160)
    for line in _warnings(first, second):
        console.print(line, markup=False)
    console.print(_table(changes))
    counts = {verdict: sum(c.verdict == verdict for c in changes) for verdict in (SLOWER, FASTER)}
    console.print(
        f"{counts[SLOWER]} slower, {counts[FASTER]} faster, of {len(changes)}; tolerance {tolerance:.0%}, "
        "95 % for all together",
        markup=False,
    )
    return 1 if counts[SLOWER] else 0


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> list[Change]:
    """Every system that both results have. `before`, `after`: as the JSON files have them.

    Raises ResultError where they have none in common.
    """
    first, second = dict(_groups(before)), dict(_groups(after))
    pairs = [
        (what, system)
        for what in first
        if what in second
        for system in first[what].seconds
        if system in second[what].seconds
    ]
    if not pairs:
        for name, groups in (("the first file", first), ("the second file", second)):
            if not groups:
                raise ResultError(f"{name} has no measured steps, only what was predicted, planned or counted")
        raise ResultError(
            "the files have no measured system in common: they are of different benchmarks or models (--quick runs "
            "measure smaller models)"
        )
    level = 1 - (1 - LEVEL) / len(pairs)
    return [_change(what, system, first[what], second[what], level, tolerance) for what, system in pairs]


def _change(what: str, system: str, before: _Group, after: _Group, level: float, tolerance: float) -> Change:
    by_ceiling = all(_in_its_rounds(group, system) for group in (before, after))
    old, new = (_values(group, system, by_ceiling) for group in (before, after))
    interval = ratio_interval(new, old, level)
    if interval.level < _LEAST_LEVEL:
        verdict = f"too few rounds ({min(len(old), len(new))})"
    elif interval.low > 1 + tolerance:
        verdict = SLOWER
    elif interval.high < 1 / (1 + tolerance):
        verdict = FASTER
    else:
        verdict = SAME
    medians = median(before.seconds[system]), median(after.seconds[system])
    return Change(what, system, *medians, median(new) / median(old), interval, by_ceiling, verdict)


def _in_its_rounds(group: _Group, system: str) -> bool:
    """Whether each of the system's times has one of the ceiling in the same round. A plan with two names runs twice."""
    return group.ceiling is not None and len(group.ceiling) == len(group.seconds[system])


def _values(group: _Group, system: str, by_ceiling: bool) -> list[float]:
    seconds = group.seconds[system]
    if not by_ceiling:
        return list(seconds)
    assert group.ceiling is not None
    return [s / c for s, c in zip(seconds, group.ceiling, strict=True)]


def _groups(results: Mapping[str, Any]) -> Iterator[tuple[str, _Group]]:
    """Of the file of one benchmark, or of one that `all` wrote."""
    for name, result in ({"": results} if "measured" in results else results).items():
        every = result.get("measured", []) if isinstance(result, dict) else []
        if not isinstance(every, list):
            raise ResultError(f'"measured" must be a list of rounds, got {every!r:.60}; the file is of another version')
        for rounds in every:
            _check(rounds)
            ceiling = rounds["ceiling"]
            seconds = {system: taken for system, taken in rounds["seconds"].items() if system != ceiling}
            what = f"{name}: {rounds['what']}" if name else rounds["what"]
            yield what, _Group(seconds, None if ceiling is None else rounds["seconds"][ceiling])


def _check(rounds: Any) -> None:
    """Raise ResultError where an entry of "measured" is not as benchmarks write it."""
    names = ("what", "ceiling", "seconds")
    if not isinstance(rounds, dict) or any(name not in rounds for name in names):
        raise ResultError(f'an entry of "measured" must have {", ".join(names)}; the file is of another version')
    what, ceiling, seconds = (rounds[name] for name in names)
    if not isinstance(what, str):
        raise ResultError(f'"what" of an entry of "measured" must be a text, got {what!r:.60}')
    if not isinstance(seconds, dict) or not (ceiling is None or (isinstance(ceiling, str) and ceiling in seconds)):
        raise ResultError(f"{what}: there are no times of {ceiling!r}, the ceiling")
    for system, taken in seconds.items():
        if not isinstance(taken, list) or not taken or not all(map(_is_time, taken)):
            raise ResultError(f"{what}, {system}: seconds must be numbers above 0, one or more, got {taken!r:.60}")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path} is no JSON file of results: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("machine", {}), dict):
        raise ResultError(f"{path}: no results of a benchmark")
    return data


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What the results differ in besides the code, and what only one of them has."""
    one, other = before.get("machine", {}), after.get("machine", {})
    for name in _IDENTITY:
        if one.get(name) != other.get(name):
            yield f"measured with another {name}: {one.get(name)}; {other.get(name)}"
    first, second = ({(w, s) for w, group in _groups(data) for s in group.seconds} for data in (before, after))
    for only, where in ((first - second, "before"), (second - first, "after")):
        if only:
            yield f"only {where}: {', '.join(f'{what}, {system}' for what, system in sorted(only))}"


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE)
    for column in ("", "system", "before ms", "after ms", "ratio", "interval", "verdict"):
        table.add_column(column, justify="left" if column in ("", "system", "verdict") else "right")
    for one in sorted(changes, key=lambda c: -c.ratio):
        ratio = f"{one.ratio:.3f}{' of the ceiling' if one.by_ceiling else ''}"
        interval = f"{one.interval.low:.3f}-{one.interval.high:.3f}"
        times = f"{one.before * 1e3:.4g}", f"{one.after * 1e3:.4g}"
        table.add_row(one.what, one.system, *times, ratio, interval, one.verdict)
    return table
