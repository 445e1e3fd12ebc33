"""How far predicted steps are from measured ones, and which automatic plans lost: three architectures, several plans.

All plans of a model run in turn, with two that calibrate: the plain model, and the whole model on both devices. They
give the machine's present speed (`PresentSpeed`), by which the predictions of all others are scaled:

    plain model | both devices | automatic | searched | pipelines ...    round after round
    '---- scale ---'             '-------- predicted x scale, against measured --------'
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import autopar
from autopar import Comparison, Plan
from autopar.costs.prediction_error import Distribution
from autopar.costs.present_speed import PresentSpeed
from autopar.runtime.comparing.comparison import Row
from autopar.runtime.other_systems.independent import CEILING
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.zoo import Subject, gpt2, resnet, t5

log = logging.getLogger(__name__)

DEVICES = ["cpu", "cpu"]
NAMES = ("cpu:0", "cpu:1")
MODELS: tuple[Callable[[bool], Subject], ...] = (resnet, gpt2, t5)
PLAIN, BOTH, AUTOMATIC, SEARCHED = "plain model", "data parallel by hand", "automatic", "searched"
CALIBRATING = (PLAIN, BOTH)
# What each plan fixes, next to the free ones: pure pipelines under every schedule, few and many micro-batches.
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"max_replicas": 1},
    {"max_replicas": 1, "schedule": "gpipe", "n_microbatches": 2},
    {"max_replicas": 1, "schedule": "1f1b", "n_microbatches": 4},
    {"max_replicas": 1, "schedule": "zb-h1", "n_microbatches": 4},
)
REPEATS = 9


@dataclass(frozen=True)
class Step:
    """One plan of one model: its step as predicted, as expected of the machine as it is, and as measured."""

    model: str
    plan: str  # what was fixed
    schedule: str
    stages: int
    devices: int
    n_microbatches: int
    predicted: float  # s
    expected: float | None  # s, predicted x the machine's present speed; None for the steps that tell this speed
    measured: float  # s, the median
    fastest: float  # s, the shortest step
    steps: int
    rounds: tuple[float, ...] = ()  # s, the steps
    same_as: str = ""  # the name under which errors count the same plan; "": this one

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def expected_error(self) -> float | None:
        return None if self.expected is None else self.expected / self.measured - 1


@dataclass(frozen=True)
class Loss:
    """An automatic plan that was slower than another one."""

    model: str
    automatic: float  # s
    rival: str
    measured: float  # s, of the rival

    @property
    def slower(self) -> float:
        """By this share of the rival's step."""
        return self.automatic / self.measured - 1


def run_accuracy(quick: bool, kept: Kept) -> Report:
    """In a history of its own: measurements start from nothing, too."""
    before = os.environ.get("AUTOPAR_CACHE_DIR")
    steps: list[Step] = []
    ceilings: dict[str, tuple[float, ...]] = {}  # s, by model
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE_DIR"] = folder
        try:
            for build in MODELS[:2] if quick else MODELS:
                found = kept.case(build.__name__, make=partial(_compared, build, quick))
                mine = [as_row(Step, step) for step in found["steps"]]
                ceilings[mine[0].model] = tuple(found["ceiling"])
                steps += mine
                gc.collect()  # copies of a model refer to themselves, and the next ones need the memory
        finally:
            if before is None:
                del os.environ["AUTOPAR_CACHE_DIR"]
            else:
                os.environ["AUTOPAR_CACHE_DIR"] = before
    return dataclasses.replace(report_of(steps), measured=_rounds(steps, ceilings))


def _rounds(steps: Sequence[Step], ceilings: dict[str, tuple[float, ...]]) -> tuple[Rounds, ...]:
    return tuple(
        Rounds(
            model, {CEILING: taken, **{s.plan: s.rounds for s in steps if s.model == model and not s.same_as}}, CEILING
        )
        for model, taken in ceilings.items()
    )


def _compared(build: Callable[[bool], Subject], quick: bool) -> dict[str, Any]:
    """The steps of one model and those of the ceiling, as JSON has them."""
    subject = build(quick)
    log.info("%s: planning and running", subject.name)
    found = _compare(subject)
    assert found.ceiling is not None
    return {"steps": [asdict(step) for step in steps_of(subject.name, found)], "ceiling": found.ceiling.steps}


def report_of(steps: Sequence[Step]) -> Report:
    lost = losses(steps)
    rows = [asdict(step) | {"error": step.error, "expected_error": step.expected_error} for step in steps]
    data = {"lost": [asdict(loss) | {"slower": loss.slower} for loss in lost], "rows": rows}
    tables = (_lost_table(lost, steps), _distributions(steps), _steps_table(steps))
    return Report("Plans that lost, and predicted steps against measured ones", tables, data)


def _compare(subject: Subject) -> Comparison:
    def planned(**options: Any) -> Plan:
        return autopar.plan(subject.model, DEVICES, example_kwargs=subject.inputs, **options)

    both = Plan.from_split({"": 0}, n_microbatches=len(DEVICES), schedule="gpipe", devices=[NAMES])
    plans: dict[str, Plan | None] = {BOTH: both, AUTOMATIC: planned(), SEARCHED: None}
    plans |= {constraint_text(one): planned(tune=0, **one) for one in CONSTRAINTS}
    found = autopar.compare(
        subject.model, DEVICES, plans, example_kwargs=subject.inputs, repeats=REPEATS, systems=[CEILING]
    )
    assert isinstance(found, Comparison), "the devices are at hand"
    return found


def constraint_text(fixed: dict[str, Any]) -> str:
    """Such as "pure pipeline, gpipe, 2 micro-batches"."""
    parts = ["pure pipeline", fixed.get("schedule")]
    parts += [f"{fixed['n_microbatches']} micro-batches"] if "n_microbatches" in fixed else []
    return ", ".join(part for part in parts if part)


def steps_of(model: str, found: Comparison) -> list[Step]:
    """The rows of a comparison, with predictions scaled by those that calibrate.

    Names of one plan (what the search chose, and the same by hand) have the same steps.
    """
    rows = {PLAIN: found.single, **{row.name: row for row in found.plans}}
    speed = PresentSpeed.of((rows[name].plan, rows[name].steps) for name in CALIBRATING if name in rows)
    ran_as = {name: name for name in rows} | dict(found.same)
    return [
        _step(
            model,
            name,
            rows[ran],
            None if ran in CALIBRATING or rows[ran].error is None else speed,
            "" if ran == name else ran,
        )
        for name, ran in ran_as.items()
    ]


def _step(model: str, name: str, row: Row, speed: PresentSpeed | None, same_as: str) -> Step:
    assert row.predicted is not None, "plans without shards have predictions"
    factor = None if speed is None else speed.factor(row.plan)
    plan = row.plan
    shape = (plan.schedule, len(plan.stages), len(plan.used_devices), plan.n_microbatches)
    expected = None if factor is None else row.predicted * factor
    times = (median(row.steps), min(row.steps), len(row.steps), row.steps)
    return Step(model, name, *shape, row.predicted, expected, *times, same_as)


def losses(steps: Sequence[Step]) -> list[Loss]:
    """The automatic plans that were slower than the fastest other plan of their model; those that lost most first.

    What the search alone chose is no rival: it is among the plans that the automatic one was chosen from.
    """
    found = []
    for automatic in (step for step in steps if step.plan == AUTOMATIC):
        others = [s for s in steps if s.model == automatic.model and s.plan not in (AUTOMATIC, SEARCHED)]
        for rival in others:
            if rival.measured < automatic.measured and (rival.plan == PLAIN or rival is min(others, key=_measured)):
                found.append(Loss(automatic.model, automatic.measured, rival.plan, rival.measured))
    return sorted(found, key=lambda loss: -loss.slower)


def _measured(step: Step) -> float:
    return step.measured


def _lost_table(lost: Sequence[Loss], steps: Sequence[Step]) -> Table:
    rows = tuple(
        (
            loss.model,
            f"{loss.automatic * 1e3:.0f}",
            loss.rival,
            f"{loss.measured * 1e3:.0f}",
            f"{loss.slower:.1%}",
        )
        for loss in lost
    )
    models, losers = len({step.model for step in steps}), len({loss.model for loss in lost})
    note = (
        f"Medians of {min((s.steps for s in steps), default=0)} steps in turn. {losers} of {models} automatic plans on "
        f"{', '.join(DEVICES)} were slower than the plain model on one device, or than the fastest plan under a "
        "constraint or by hand."
    )
    columns = ("model", "automatic plan, ms", "beaten by", "its step, ms", "automatic plan slower by")
    return Table("Plans that lost", columns, rows, note)


def _distributions(steps: Sequence[Step]) -> Table:
    scaled = [step for step in steps if step.expected_error is not None and not step.same_as]
    named: dict[str, Iterable[float]] = {
        "as predicted": [step.error for step in scaled],
        "scaled by the machine's present speed": _expected(scaled),
    }
    for schedule in sorted({step.schedule for step in scaled}):
        named[f"scaled, {schedule}"] = _expected(step for step in scaled if step.schedule == schedule)
    rows = []
    for name, errors in named.items():
        known = list(errors)
        if known:
            d = Distribution.of_errors(known)
            numbers = (f"{d.median:.1%}", f"{d.p95:.1%}", f"{d.worst:.1%}", f"{d.signed_median:+.1%}")
            rows.append((name, str(d.n), *numbers))
    note = (
        "|predicted - measured| / measured of the step time; the signed median is above 0 where steps were faster. "
        f"Without the steps that tell the present speed ({' and '.join(CALIBRATING)}), and those of the plain model on "
        "the caller's threads, where predictions are for a worker's. A plan with several names counts once, with all "
        "of its steps."
    )
    return Table("Error of predictions", ("", "plans", "median", "p95", "worst", "signed median"), tuple(rows), note)


def _expected(steps: Iterable[Step]) -> list[float]:
    return [step.expected_error for step in steps if step.expected_error is not None]


def _steps_table(steps: Sequence[Step]) -> Table:
    rows = tuple(
        (
            s.model,
            f"{s.plan} (= {s.same_as})" if s.same_as else s.plan,
            s.schedule,
            str(s.stages),
            str(s.devices),
            str(s.n_microbatches),
            f"{s.predicted * 1e3:.0f}",
            "-" if s.expected is None else f"{s.expected * 1e3:.0f}",
            f"{s.measured * 1e3:.0f}",
            f"{s.error:+.1%}",
            "-" if s.expected_error is None else f"{s.expected_error:+.1%}",
        )
        for s in steps
    )
    columns = ("model", "plan", "schedule", "stages", "devices", "micro-batches", "predicted, ms", "scaled, ms")
    return Table("Every plan", (*columns, "measured, ms", "error", "error, scaled"), rows)
