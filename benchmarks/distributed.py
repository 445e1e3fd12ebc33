"""Two processes over gloo: autopar's ranks beside its threads and beside what torch has, in turn."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import autopar
from autopar import AutoparError, Plan
from autopar.runtime.other_systems.blocks import balanced, block_seconds, sizes_in_words
from autopar.runtime.other_systems.independent import CEILING
from autopar.runtime.other_systems.pipelining import PER_RANK
from autopar.runtime.other_systems.processes import Processes
from benchmarks import peer_models
from benchmarks.distributed_systems import (
    AUTOPAR,
    DATA,
    PLANS,
    SHARDED,
    STAGES,
    TENSOR,
    THREADS,
    BenchmarkRank,
    train_step,
)
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.peer_models import Builder, Gradients, Subject, gradients_of
from benchmarks.peers import TOLERANCE, Outcome, _some
from benchmarks.timing import interleave, ratio
from cost_models.hardware.devices import operator_threads

log = logging.getLogger(__name__)

N_MICROBATCHES = 4


@dataclass(frozen=True)
class Row:
    """One system on one model. One that does not run, or computes something else, has no steps, and says why."""

    system: str
    how: str
    steps: tuple[float, ...] = ()  # s, measured in turn
    over_best: float | None = None  # median over rounds of its time / autopar's fastest system on processes
    loss_error: float | None = None
    gradient_error: float | None = None
    predicted: float | None = None  # s, scaled by the steps that it ran while it was planned
    priced: float | None = None  # s, as predicted from prices alone
    sent: int | None = None  # bytes of both ranks in a step, point to point
    planned: int | None = None  # bytes that the plan says

    @property
    def measured(self) -> float | None:
        return median(self.steps) if self.steps else None


@dataclass(frozen=True)
class System:
    how: str
    step: Callable[[], float]
    gradients: Callable[[list[str]], Gradients]
    plan: Plan | None = None


def run_distributed(quick: bool, kept: Kept) -> Report:
    rounds = 3 if quick else 11
    with ExitStack() as stack:
        stack.enter_context(operator_threads(1))
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ, AUTOPAR_CACHE_DIR=cache, LOCAL_WORLD_SIZE=str(STAGES)))
        ranks = stack.enter_context(Processes(BenchmarkRank, STAGES))
        models = [partial(build, quick) for build in (peer_models.bert, peer_models.gpt)]
        found = dict(_kept_rows(build, rounds, ranks, kept) for build in models)
    data = {
        title: [{**dataclasses.asdict(row), "measured": row.measured} for row in rows] for title, rows in found.items()
    }
    tables = [_table(title, rows) for title, rows in found.items()] + [_goals(found)]
    measured = tuple(
        Rounds(title, {row.system: row.steps for row in rows if row.steps}, CEILING) for title, rows in found.items()
    )
    return Report("Two processes over gloo, a core each", tuple(tables), {"models": data}, measured=measured)


def _kept_rows(build: partial[Subject], rounds: int, ranks: Processes, kept: Kept) -> tuple[str, list[Row]]:
    mine = kept.part(build.func.__name__)

    def made() -> tuple[str, list[dict[str, Any]]]:
        title, rows = compare(build, rounds, ranks, mine)
        return title, [dataclasses.asdict(row) for row in rows]

    title, rows = mine.case("rows", make=made)
    return title, [as_row(Row, row) for row in rows]


def compare(build: Builder, rounds: int, ranks: Processes, kept: Kept) -> tuple[str, list[Row]]:
    """The model's title, and a row for every system. Raises RuntimeError where one computes something else.

    `kept`: plans, times of blocks and rounds as they come, so that a run that goes on has the same systems.
    """
    subject = build()
    title = subject.workload.title
    ranks.call(BenchmarkRank.load, build)
    names = _some([name for name, p in subject.workload.model.named_parameters() if p.requires_grad])
    systems: dict[str, System] = {}
    refused: list[Row] = []
    for name, make in _makers(build, subject, ranks, kept).items():
        log.info("%s: preparing %s", title, name)
        try:
            systems[name] = make()
        except (AutoparError, RuntimeError, NotImplementedError) as error:
            if "ended" in str(error):  # a process; there is no going on
                raise
            refused.append(Row(name, str(error).strip().splitlines()[-1][:120]))

    def clear() -> None:
        subject.workload.clear()
        ranks.call(BenchmarkRank.clear)

    clear()
    subject.workload.step()
    reference = Outcome(_loss_of(subject), gradients_of(subject.workload.model, names))
    errors = {}
    for name, system in systems.items():
        clear()
        loss = system.step()
        errors[name] = Outcome(loss, system.gradients(names)).errors(reference)
        if not max(errors[name]) <= TOLERANCE:
            wrong = "errors of loss and gradients {:.0e}, {:.0e}".format(*errors[name])
            if name.startswith((AUTOPAR, THREADS)):
                raise RuntimeError(f"{name}, {title}: {wrong} against the plain model")
            refused.append(Row(name, wrong))
    systems = {name: system for name, system in systems.items() if max(errors[name]) <= TOLERANCE}
    ranks.call(BenchmarkRank.independent, CEILING)
    log.info("%s: comparing", title)
    steps: dict[str, Callable[[], object]] = {name: system.step for name, system in systems.items()}
    steps[CEILING] = partial(ranks.call, BenchmarkRank.step, CEILING)
    seconds = interleave(steps, rounds, clear, kept)
    best = min((name for name in seconds if name.startswith(AUTOPAR)), key=lambda name: median(seconds[name]))
    rows = [_row(n, s, seconds[n], ratio(seconds[n], seconds[best]), errors[n], ranks) for n, s in systems.items()]
    how = f"{STAGES} independent processes, each with its part of the batch"
    rows.append(Row(CEILING, how, seconds[CEILING], ratio(seconds[CEILING], seconds[best])))
    return title, [*rows, *refused]


def _row(
    name: str, system: System, steps: tuple[float, ...], over: float, errors: tuple[float, float], ranks: Processes
) -> Row:
    plan, sent, planned = system.plan, None, None
    if plan is not None and name.startswith(AUTOPAR):
        sent = sum(ranks.call(BenchmarkRank.bytes_sent, name))
        planned = sum(t.forward_bytes + t.backward_bytes for t in plan.transfers) * plan.n_microbatches
        if any(stage.sharding is not None for stage in plan.stages):
            sent = planned = None  # collectives, which the plan lists by themselves
    predicted = priced = None
    if plan is not None and not name.startswith(THREADS):
        predicted, priced = plan.predicted_step_time, plan.priced_step_time
    return Row(name, system.how, steps, over, *errors, predicted, priced, sent, planned)


def _loss_of(subject: Subject) -> float:
    workload = subject.workload
    return float(workload.loss(workload.model(**workload.inputs), workload.target).item())


def _makers(build: Builder, subject: Subject, ranks: Processes, kept: Kept) -> dict[str, Callable[[], System]]:
    """By name of the system, what gets it ready. Order matters: threads follow the plan of their processes."""
    plans: dict[str, Plan] = {}
    made: dict[str, Callable[[], System]] = {}
    for kind in PLANS:
        if kind != "tensor" or _is_bert(subject):
            made[f"{AUTOPAR}, {kind}"] = partial(_on_ranks, ranks, f"{AUTOPAR}, {kind}", kind, plans, kept)
            made[f"{THREADS}, {kind}"] = partial(_in_threads, build, kind, plans)
    for schedule in PER_RANK:
        made[f"pipelining, {schedule}"] = partial(_pipelining, ranks, schedule, subject, kept)
    others: dict[str, Any] = {DATA: BenchmarkRank.ddp, SHARDED: BenchmarkRank.fsdp}
    if _is_bert(subject):
        others[TENSOR] = BenchmarkRank.tensor_parallel
    for name, method in others.items():
        made[name] = partial(_of_torch, ranks, name, method)
    return made


def _is_bert(subject: Subject) -> bool:
    return hasattr(subject.workload.model, "bert")


def _on_ranks(ranks: Processes, name: str, kind: str, plans: dict[str, Plan], kept: Kept) -> System:
    text = kept.case("plan", kind, make=lambda: ranks.call(BenchmarkRank.plan, kind, N_MICROBATCHES)[0])
    ranks.call(BenchmarkRank.autopar, name, text)
    plans[kind] = plan = Plan.from_json(text)
    how = f"{plan.places}, {plan.schedule}, {plan.n_microbatches} micro-batches"
    return System(how, partial(_step, ranks, name), partial(_gradients, ranks, name), plan)


def _in_threads(build: Builder, kind: str, plans: Mapping[str, Plan]) -> System:
    """The plan that the processes follow, in this process."""
    if kind not in plans:
        raise RuntimeError("the processes have no such plan")
    subject = build()
    module = autopar.parallelize(subject.workload.model, ["cpu"] * STAGES, plan=plans[kind])
    model = subject.workload.model

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return train_step(module, subject)()

    return System("the same plan", step, partial(gradients_of, model), plans[kind])


def _pipelining(ranks: Processes, schedule: str, subject: Subject, kept: Kept) -> System:
    times = kept.case("seconds of blocks", make=lambda: block_seconds(subject.training_step, N_MICROBATCHES, 3))
    n_stages = STAGES * PER_RANK[schedule]
    if len(times) < n_stages:
        raise RuntimeError(f"{len(times)} blocks are too few for {n_stages} stages")
    cuts, name = balanced(times, n_stages), f"pipelining, {schedule}"
    ranks.call(BenchmarkRank.pipelining, name, schedule, N_MICROBATCHES, cuts)
    how = f"{sizes_in_words(cuts, len(times))}, {N_MICROBATCHES} micro-batches"
    return System(how, partial(_step, ranks, name), partial(_gradients, ranks, name))


def _of_torch(ranks: Processes, name: str, method: Callable[..., Any]) -> System:
    ranks.call(method, name)
    return System("", partial(_step, ranks, name), partial(_gradients, ranks, name))


def _step(ranks: Processes, name: str) -> float:
    losses = [loss for loss in ranks.call(BenchmarkRank.step, name) if loss is not None]
    return float(losses[-1])


def _gradients(ranks: Processes, name: str, names: list[str]) -> Gradients:
    first, last = ranks.call(BenchmarkRank.gradients, name, names)
    return {**first, **last}


# -- what is shown ----------------------------------------------------------------------------------------------------


def _table(title: str, rows: list[Row]) -> Table:
    return Table(
        f"Step of {title}",
        ("", "how", "measured ms", "/ autopar's best", "predicted / measured (priced)", "sent MB (plan)", "errors"),
        tuple(_line(row) for row in rows),
        "Forward and backward of a mean loss on two cores, measured in turn; medians, and of the ratios in each round. "
        "Predicted: scaled by the steps that the plan ran while it was planned, if it did; priced: from prices alone. "
        "What is sent: activations and their gradients between stages, by both ranks in a step. Errors of loss and "
        "gradients are relative to the plain model's.",
    )


def _line(row: Row) -> tuple[str, ...]:
    if row.measured is None or row.over_best is None:
        return (row.system, f"not timed: {row.how}", *[""] * 5)
    predicted = ""
    if row.predicted is not None and row.priced is not None:
        predicted = f"{row.predicted / row.measured:.2f} ({row.priced / row.measured:.2f})"
    sent = "" if row.sent is None or row.planned is None else f"{row.sent / 1e6:.2f} ({row.planned / 1e6:.2f})"
    errors = "" if row.loss_error is None else f"{row.loss_error:.0e}, {row.gradient_error:.0e}"
    return (row.system, row.how, f"{row.measured * 1e3:.1f}", f"{row.over_best:.2f}", predicted, sent, errors)


def _goals(found: Mapping[str, list[Row]]) -> Table:
    """Ratios against what was aimed for."""
    return Table(
        "Against others",
        (
            "",
            "autopar's best / the best other",
            "its pipeline / pipelining's best",
            "its pipeline / pipelining's 1F1B",
            "ceiling / pipelining's best",
            "processes / threads, same plan",
        ),
        tuple((title, *map(_ratio_text, _ratios(rows))) for title, rows in found.items()),
        "Of the medians over rounds of paired times. Aims: at most 1.03 for the first, at most 0.90 for the second. "
        "The ceiling is what two independent processes need: no pipeline can be faster.",
    )


def _ratios(rows: list[Row]) -> Iterator[float | None]:
    timed = {row.system: row.steps for row in rows if row.steps}
    ours = {name: steps for name, steps in timed.items() if name.startswith(AUTOPAR)}
    others = {name: steps for name, steps in timed.items() if not name.startswith((AUTOPAR, THREADS, CEILING))}
    pipes = {name: steps for name, steps in others.items() if name.startswith("pipelining")}
    yield _best_ratio(ours, others)
    pipeline = f"{AUTOPAR}, pipeline"
    mine = {pipeline: ours[pipeline]} if pipeline in ours else {}
    yield _best_ratio(mine, pipes)
    yield _best_ratio(mine, {name: steps for name, steps in pipes.items() if name == "pipelining, 1F1B"})
    yield _best_ratio({CEILING: timed[CEILING]} if CEILING in timed else {}, pipes)
    pairs = [(ours[n], timed[t]) for n in ours if (t := n.replace(AUTOPAR, THREADS)) in timed]
    yield median(ratio(*pair) for pair in pairs) if pairs else None


def _best_ratio(ours: Mapping[str, tuple[float, ...]], theirs: Mapping[str, tuple[float, ...]]) -> float | None:
    if not ours or not theirs:
        return None
    return ratio(min(ours.values(), key=median), min(theirs.values(), key=median))


def _ratio_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
