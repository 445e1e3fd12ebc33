"""Step times of published training runs, predicted by the cost models, and plans that a search finds beside theirs."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hybrid import Step, predict
from benchmarks.hybrid_plan import PARTS, Split
from benchmarks.hybrid_search import difference, search
from benchmarks.hybrid_tables import Case, read_cases
from benchmarks.output import Report, Table

log = logging.getLogger(__name__)

QUICK_CASES = 1  # of a table


@dataclass(frozen=True)
class Outcome:
    """A published figure and what is predicted for it."""

    case: Case
    split: Split | None  # that is predicted: the published one, or else the best that was found
    step: Step | None  # None: nothing fits
    found: Split | None
    found_step: Step | None
    candidates: int  # plans that run and fit, of which the best was found

    @property
    def predicted(self) -> float | None:
        """In the figure's unit."""
        return None if self.step is None else self.case.work / self.step.seconds

    @property
    def error(self) -> float | None:
        """Fraction, signed: above 0 where too much is predicted."""
        return None if self.predicted is None else self.predicted / self.case.published - 1

    @property
    def why(self) -> str:
        """What the plan that was found does otherwise."""
        if self.found is None or self.found_step is None or self.split is None or self.step is None:
            return "no plan fits"
        if self.case.split is None:
            return "none was published"
        return difference((self.split, self.step), (self.found, self.found_step))


def run_published(folder: Path | None, quick: bool) -> Report | None:
    """Every table of `folder`; None without a folder, or if it has none of a known form.

    Raises:
        TableError: a row that cannot be read.
    """
    read = {path.stem: _cases(path) for path in sorted(folder.glob("*.csv"))} if folder else {}
    tables = {name: cases[:QUICK_CASES] if quick else cases for name, cases in read.items() if cases}
    if not tables:
        return None
    outcomes: dict[str, list[Outcome]] = {}
    for name, cases in tables.items():
        outcomes[name] = []
        for case in cases:
            log.info("%s: %s, %s", name, case.name, case.column)
            outcomes[name].append(evaluate(case))
    shown = [table for name, found in outcomes.items() for table in _tables(name, found)]
    data = {name: _json(found) for name, found in outcomes.items()}
    return Report("Published training runs, predicted", tuple(shown), data, plain=True)


def evaluate(case: Case) -> Outcome:
    """The published plan, where there is one, and the search."""
    step = predict(case.job, case.split) if case.split else None
    found = search(case.job, case.space, [case.split] if case.split else [])
    if found is None:
        return Outcome(case, case.split, step, None, None, 0)
    if step is None:
        return Outcome(case, found.split, found.step, found.split, found.step, found.candidates)
    return Outcome(case, case.split, step, found.split, found.step, found.candidates)


def _cases(path: Path) -> list[Case]:
    def tell(what: str) -> None:
        print(what, file=sys.stderr)

    cases = read_cases(path, tell)
    if cases is None:
        tell(f"{path.name}: skipped, its columns are those of no known form")
    return cases or []


def _errors(outcomes: list[Outcome]) -> dict[str, float]:
    """Mean absolute error of each column of figures."""
    errors = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.case.column].append(abs(outcome.error))
    return {column: fmean(found) for column, found in errors.items()}


def _json(outcomes: list[Outcome]) -> dict[str, Any]:
    """The table's own error is that of its first column of figures; rows for which no plan fits are in none."""
    errors = _errors(outcomes)
    return {
        "mean_abs_error": next(iter(errors.values()), None),
        "mean_abs_errors": errors,
        "without_prediction": [f"{o.case.name}, {o.case.column}" for o in outcomes if o.step is None],
        "rows": [_row(outcome) for outcome in outcomes],
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    case, step = outcome.case, outcome.step
    return {
        "name": case.name,
        "column": case.column,
        "model": dataclasses.asdict(case.job.model),
        "cluster": case.job.cluster.title,
        "batch": case.job.batch,
        "unit": case.unit,
        "published": case.published,
        "predicted": outcome.predicted,
        "error": outcome.error,
        "published_seconds": case.work / case.published,
        "published_memory_bytes": case.memory,
        **_plan(outcome.split, step),
        "published_plan": case.split is not None,
        "found": {
            **_plan(outcome.found, outcome.found_step),
            "predicted": None if outcome.found_step is None else case.work / outcome.found_step.seconds,
            "candidates": outcome.candidates,
            "difference": outcome.why,
        },
    }


def _plan(split: Split | None, step: Step | None) -> dict[str, Any]:
    return {
        "plan": None if split is None else dataclasses.asdict(split),
        "seconds": None if step is None else step.seconds,
        "parts": None if step is None else step.parts,
        "memory_bytes": None if step is None else step.memory.total,
        "fits": None if step is None else step.fits,
    }


def _tables(name: str, outcomes: list[Outcome]) -> list[Table]:
    errors = ", ".join(f"{column} {error:.1%}" for column, error in _errors(outcomes).items())
    missing = sum(outcome.step is None for outcome in outcomes)
    predicted = Table(
        f"{name}: predicted and published",
        ("", "plan", "step, s", "predicted", "published", "error", "memory, GB", "where the seconds go"),
        tuple(_predicted(outcome) for outcome in outcomes),
        f"Figures in {outcomes[0].case.unit} a device. Mean absolute error: {errors or 'nothing fits'}"
        f"{f', without {missing} for which no plan fits' * bool(missing)}. Seconds are of "
        "the device that is busy the longest. '*': the best plan that the search found, where none was published.",
    )
    published = [outcome for outcome in outcomes if outcome.case.split is not None]
    if not published:
        return [predicted]
    found = Table(
        f"{name}: plans that were found",
        ("", "found", "predicted", "of the published plan", "memory, GB", "what it does otherwise"),
        tuple(_found(outcome) for outcome in published),
        "The fastest that fits the devices' memory, by the model, of all tensor, pipeline and data sizes, "
        "micro-batches, interleaving, recomputation and ZeRO. Their figures count the work that the published plan's "
        "count, whatever they recompute; of the published plan: how many times as fast.",
    )
    return [predicted, found]


def _predicted(outcome: Outcome) -> tuple[str, ...]:
    case, step = outcome.case, outcome.step
    name = case.name if case.split else f"{case.name}, {case.column}*"
    if step is None:
        return (name, "nothing fits", "-", "-", f"{case.published:.4g}", "-", "-", "-")
    parts = sorted(((part, seconds) for part, seconds in step.parts.items()), key=lambda pair: -pair[1])
    shares = [f"{PARTS[part]} {seconds / step.seconds:.0%}" for part, seconds in parts if seconds > 0.01 * step.seconds]
    memory = f"{step.memory.total / 1e9:.0f}" + (f" ({case.memory / 1e9:.0f} published)" if case.memory else "")
    return (
        name,
        str(outcome.split),
        f"{step.seconds:.2f}",
        f"{outcome.predicted:.4g}",
        f"{case.published:.4g}",
        f"{outcome.error:+.1%}",
        memory + ("" if step.fits else ", does not fit"),
        ", ".join(shares),
    )


def _found(outcome: Outcome) -> tuple[str, ...]:
    case, step = outcome.case, outcome.found_step
    if step is None or outcome.step is None:
        return (case.name, "nothing fits", "-", "-", "-", "-")
    gain = outcome.step.seconds / step.seconds
    memory = f"{step.memory.total / 1e9:.0f}"
    return (case.name, str(outcome.found), f"{case.work / step.seconds:.4g}", f"{gain:.2f}", memory, outcome.why)
