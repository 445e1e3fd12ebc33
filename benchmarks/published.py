"""Published training runs, predicted by the product itself: each row of a table is a plan by hand on a cluster.

table --forms--> Case --Plan.by_hand's way--> predicted step and memory --errors--> report
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from benchmarks.published_runs.cases import Case, Degrees
from benchmarks.published_runs.errors import Errors, regrets
from benchmarks.published_runs.forms import PublishedTable, Unread, read_cases
from benchmarks.published_runs.models import Sizes
from benchmarks.published_runs.pricing import Priced, Pricer
from benchmarks.published_runs.tables import read_each

log = logging.getLogger(__name__)

QUICK_CASES = 1  # of a table
_LONG_TABLE = 64  # rows for which further processes are worth their start

_READING = (
    "Errors are fractions of the published figure, in its unit: of a step's time where the table has that, else of "
    "the throughput. tau: Kendall's, over all rows. regret: how much longer, as measured, the plan takes that is "
    "predicted to be the fastest of one model, batch and cluster than the fastest one there; mean over groups of two "
    "or more. Fitted to rows, so that these are calibration: the host of vTrain's traces (rows of one node with hidden "
    "size 1024 and one stage), and how the rates of torchtitan's devices fall with their power. Nothing else was."
)


@dataclass(frozen=True)
class Figures:
    """What a case was priced at, without the plan itself, which is large."""

    seconds: float | None  # of a step; None: no plan
    memory: float | None  # bytes on the device that needs most
    degrees: Degrees
    candidates: int  # plans that were priced
    why_not: str

    @classmethod
    def of(cls, priced: Priced) -> Figures:
        return cls(priced.seconds, priced.memory, dict(priced.degrees), priced.candidates, priced.why_not)


@dataclass(frozen=True)
class Outcome:
    """A published figure and what is predicted for it."""

    case: Case
    priced: Figures

    @property
    def seconds(self) -> float | None:
        return self.priced.seconds

    @property
    def predicted(self) -> float | None:
        """In the figure's unit."""
        return None if self.seconds is None else self.case.figure(self.seconds)

    @property
    def error(self) -> float | None:
        """Fraction, signed: above 0 where too much is predicted."""
        return None if self.predicted is None else self.predicted / self.case.published - 1

    @property
    def memory_error(self) -> float | None:
        """The same of the peak memory; None where there is no prediction, or none was published."""
        if self.case.memory is None or self.priced.memory is None:
            return None
        return self.priced.memory / self.case.memory - 1


def run_published(folder: Path | None, quick: bool, kept: Kept | None = None) -> Report | None:
    """Every table of `folder`; None without a folder, or if it has none of a known form.

    Rows that cannot be read have no prediction, like those for which no plan fits. Other files are skipped.

    Raises:
        TableError: no file is a table.
    """
    files = sorted(folder.glob("*.csv")) if folder else []
    read = read_each({path.name: path for path in files}, _read)
    tables = {path.stem: read[path.name] for path in files if path.name in read}
    if quick:
        tables = {name: replace(table, cases=table.cases[:QUICK_CASES]) for name, table in tables.items()}
    if not tables:
        return None
    kept = Kept() if kept is None else kept
    digests = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files if path.stem in tables}
    found = {
        name: Evaluated(tuple(evaluate(name, table.cases, kept=kept.part(name, digests[name]))), table.unread)
        for name, table in tables.items()
    }
    shown = [_summary(found), *(_table(name, one) for name, one in found.items())]
    data = {name: as_json(one) for name, one in found.items()}
    return Report("Published training runs, predicted", tuple(shown), data, by_case=True)


def evaluate(name: str, cases: Sequence[Case], processes: int | None = None, kept: Kept | None = None) -> list[Outcome]:
    """The cases of one table. Those of a model share work, so they are priced one after another; models of a long table
    are shared out over `processes` (default: one a core), which changes no price."""
    by_model: dict[Sizes, list[int]] = defaultdict(list)
    for place, case in enumerate(cases):
        by_model[case.model].append(place)
    places = sorted(by_model.values(), key=lambda mine: (-len(mine), mine))  # long ones first
    for mine in places:
        mine.sort(key=lambda place: (str(cases[place].options), cases[place].batch))
    kept = Kept() if kept is None else kept
    missing = [number for number in range(len(places)) if kept.get(number) is None]
    groups = [[cases[place] for place in places[number]] for number in missing]
    if processes is None:
        processes = (os.cpu_count() or 1) if len(cases) >= _LONG_TABLE else 1
    for number, priced in zip(missing, _priced(groups, min(processes, len(groups))), strict=True):
        log.info("%s, model %d of %d: %d rows", name, number + 1, len(places), len(priced))
        kept.put(number, value=[asdict(one) for one in priced])
    found: dict[int, Outcome] = {}
    for number, mine in enumerate(places):
        found.update(
            (place, Outcome(cases[place], Figures(**one))) for place, one in zip(mine, kept.get(number), strict=True)
        )
    return [found[place] for place in range(len(cases))]


def _priced(groups: Sequence[Sequence[Case]], processes: int) -> Iterator[list[Figures]]:
    if processes <= 1:
        yield from map(_priced_in_turn, groups)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:  # threads of torch do not fork
        yield from pool.map(_priced_in_turn, groups)


def _priced_in_turn(cases: Sequence[Case]) -> list[Figures]:
    """The cases of one model. Plans stay in this process: they are large."""
    pricer = Pricer(cases)
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])  # captured graphs are large and live long: a fifth of the time
    try:
        return [Figures.of(pricer.price(case)) for case in cases]
    finally:
        gc.set_threshold(*thresholds)


def _read(path: Path) -> PublishedTable | None:
    table = read_cases(path)
    if table is None:
        print(f"{path.name}: skipped, its columns are those of no known form", file=sys.stderr)
        return None
    if not (table.cases or table.unread):
        print(f"{path.name}: skipped, it has no rows", file=sys.stderr)
        return None
    for row in table.unread:
        print(f"{path.name}, {row.why}", file=sys.stderr)
    return table


@dataclass(frozen=True)
class Evaluated:
    """A table, row by row."""

    outcomes: tuple[Outcome, ...]
    unread: tuple[Unread, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Of figures, the table's own first."""
        return tuple(dict.fromkeys([*(o.case.column for o in self.outcomes), *(row.column for row in self.unread)]))


def by_column(table: Evaluated) -> dict[str, Errors]:
    """The errors of every column of figures."""
    found = {}
    for column in table.columns:
        mine = [o for o in table.outcomes if o.case.column == column and o.predicted is not None]
        found[column] = Errors.of([o.predicted or 0.0 for o in mine], [o.case.published for o in mine])
    return found


def regret(table: Evaluated) -> float | None:
    """Mean over groups of rivals in the first column; None without such groups."""
    mine = [o for o in table.outcomes if o.case.column == table.columns[0]]
    seconds, known = [o.seconds for o in mine], [o.case.published_seconds for o in mine]
    found = regrets([o.case.rivals for o in mine], seconds, known)
    return fmean(found) if found else None


def as_json(table: Evaluated) -> dict[str, Any]:
    """A table's own figures are those of its first column; rows without a prediction are in none."""
    errors, outcomes = by_column(table), table.outcomes
    first = next(iter(errors.values()))
    found: dict[str, Any] = {
        "mean_abs_error": first.mean,
        "median_abs_error": first.median,
        "p95_abs_error": first.p95,
        "signed_mean_error": first.signed,
        "kendall_tau": first.tau,
        "regret_mean": regret(table),
        "without_prediction": [
            *(f"{o.case.name}, {o.case.column}" for o in outcomes if o.seconds is None),
            *(f"{row.name}, {row.column}" for row in table.unread),
        ],
        "rows": [*map(_row, outcomes), *map(_unread_row, table.unread)],
    }
    if len(errors) > 1:
        found["mean_abs_errors"] = {column: one.mean for column, one in errors.items()}
    if any(outcome.case.memory is not None for outcome in outcomes):
        memory = [error for o in outcomes if (error := o.memory_error) is not None]
        found["memory_mean_abs_error"] = fmean(map(abs, memory)) if memory else None
        found["memory_worst_under"] = max(0.0, -min(memory)) if memory else None
    return found


def _row(outcome: Outcome) -> dict[str, Any]:
    case, priced = outcome.case, outcome.priced
    return {
        "name": case.name,
        "column": case.column,
        "cluster": case.cluster.title,
        "batch": case.batch,
        "unit": case.unit,
        "published": case.published,
        "predicted": outcome.predicted,
        "error": outcome.error,
        "published_seconds": case.published_seconds,
        "seconds": outcome.seconds,
        "published_memory_bytes": case.memory,
        "memory_bytes": priced.memory,
        "plan": dict(priced.degrees),
        "candidates": priced.candidates,
        "why_not": priced.why_not,
    }


def _unread_row(row: Unread) -> dict[str, Any]:
    """As `_row`, without figures."""
    figures = ("batch", "unit", "published", "predicted", "error", "published_seconds", "seconds")
    return {
        "name": row.name,
        "column": row.column,
        "cluster": None,
        **dict.fromkeys((*figures, "published_memory_bytes", "memory_bytes")),
        "plan": {},
        "candidates": 0,
        "why_not": row.why,
    }


def _summary(tables: Mapping[str, Evaluated]) -> Table:
    columns = ("table", "rows", "mean", "median", "p95", "signed", "tau", "regret", "memory", "no prediction")
    return Table(
        "All tables", columns, tuple(row for name, one in tables.items() for row in _lines(name, one)), _READING
    )


def _lines(name: str, table: Evaluated) -> list[tuple[str, ...]]:
    """One for each column of figures."""
    found = []
    for number, (column, errors) in enumerate(by_column(table).items()):
        mine = [o for o in table.outcomes if o.case.column == column]
        unread = sum(row.column == column for row in table.unread)
        memory = [error for o in mine if (error := o.memory_error) is not None]
        regretted = regret(table) if number == 0 else None
        found.append(
            (
                f"{name}, {column}",
                str(len(mine) + unread),
                *map(_percent, (errors.mean, errors.median, errors.p95)),
                _signed(errors.signed),
                "-" if errors.tau is None else f"{errors.tau:.2f}",
                _percent(regretted),
                f"{_percent(fmean(map(abs, memory)))}, under by {_percent(max(0.0, -min(memory)))}" if memory else "-",
                str(sum(o.seconds is None for o in mine) + unread),
            )
        )
    return found


def _table(name: str, table: Evaluated) -> Table:
    outcomes = table.outcomes
    units = ", ".join(dict.fromkeys(f"{o.case.column} in {o.case.unit}" for o in outcomes))
    missing = dict.fromkeys(
        [*(o.priced.why_not for o in outcomes if o.seconds is None), *(r.why for r in table.unread)]
    )
    several = any(len(o.case.plans) > 1 for o in outcomes)
    note = f"{units}. " * bool(units) + "Memory: of the device that needs most, in GB."
    if several:
        note += " '*': the fastest of several plans that fit, as the table does not tell the plan."
    if missing:
        note += " Without prediction: " + "; ".join(missing) + "."
    columns = ("", "plan", "predicted", "published", "error", "memory")
    unread = tuple((row.name, "-", "no prediction", "-", "-", "-") for row in table.unread)
    return Table(name, columns, (*map(_cells, outcomes), *unread), note)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    case, priced = outcome.case, outcome.priced
    name = f"{case.name}, {case.column}*" if len(case.plans) > 1 else case.name
    if outcome.predicted is None or priced.memory is None:
        return (name, "-", "no prediction", f"{case.published:.4g}", "-", "-")
    memory = f"{priced.memory / 1e9:.1f}" + (f" of {case.memory / 1e9:.1f}" if case.memory else "")
    plan = ", ".join(f"{key} {value}" for key, value in priced.degrees.items() if value not in (1, 0, False, "none"))
    return (
        name,
        plan or "one device",
        f"{outcome.predicted:.4g}",
        f"{case.published:.4g}",
        _signed(outcome.error),
        memory,
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
