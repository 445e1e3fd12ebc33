"""Training steps of real models and of tiny stages by autopar and by other pipelines, in turn; and against a bound."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

import autopar
from autopar import PipelinedModule, Plan
from autopar.runtime.other_systems.blocks import balanced, block_seconds, sizes_in_words
from autopar.runtime.other_systems.gpipe import gpipe_step, worker_a_stage
from autopar.runtime.other_systems.independent import CEILING
from autopar.runtime.other_systems.pipelining import PER_RANK
from autopar.runtime.other_systems.processes import Processes
from benchmarks import peer_models
from benchmarks.bound import Alone, Noted, lower_bound
from benchmarks.distributed_systems import STAGES, BenchmarkRank
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.peer_models import Builder, Gradients, Subject, gradients_of
from benchmarks.timing import interleave, ratio, slope
from benchmarks.training import DEVICES
from cost_models.hardware.devices import operator_threads

log = logging.getLogger(__name__)

AUTOPAR = "autopar"
GPIPE, GPIPE_WORKERS = "torchgpipe", "torchgpipe, a worker a stage"
GLOO = {f"torch.distributed.pipelining, {schedule}": schedule for schedule in PER_RANK}
ALONE = "autopar's actions, one at a time"
SYSTEMS = (AUTOPAR, GPIPE, GPIPE_WORKERS, *GLOO, CEILING)

TOLERANCE = 1e-3  # of losses and gradients, relative to the plain model's: single precision, summed in another order
_N_CHECKED = 8  # parameters whose gradients are compared


@dataclass(frozen=True)
class Scale:
    counts: tuple[int, ...]  # n_microbatches of the models
    rounds: int
    tiny_counts: tuple[int, ...]  # of the tiny stages
    tiny_rounds: int
    balancing: float  # s, of torchgpipe's own search for its cut
    block_rounds: int  # of timing blocks for the cut of torch.distributed.pipelining


FULL = Scale((2, 4, 8), 4, (2, 4, 8, 16, 32), 40, 3.0, 3)
QUICK = Scale((2, 4), 20, (2, 4), 20, 0.1, 3)


@dataclass(frozen=True)
class Row:
    """One system that runs a model's step with n micro-batches. A system that cannot run it has no row."""

    system: str
    n_microbatches: int
    how: str  # devices and schedule of the plan, or the cut, in words
    steps: tuple[float, ...]  # s, measured in turn with the other rows of the same model and number
    over_autopar: float  # median over rounds of its time / autopar's
    # Relative to the plain model's, the same micro-batches one after the other. None of the ceiling, which has parts
    # of the batch.
    loss_error: float | None
    gradient_error: float | None  # largest norm of a difference / largest norm, of a few parameters
    alone: float | None = None  # s, the simulator's bound from actions one at a time; autopar's rows alone
    over_bound: float | None = None  # median over rounds of the time / the bound from the actions of that very step

    @property
    def measured(self) -> float:
        """s, median."""
        return median(self.steps)


@dataclass(frozen=True)
class Outcome:
    """What a step came to."""

    loss: float
    gradients: Gradients

    def errors(self, reference: Outcome) -> tuple[float, float]:
        """Of the loss and of the gradients, relative to `reference`."""
        largest = max(float(np.linalg.norm(g)) for g in reference.gradients.values())
        zeros = {name: np.zeros_like(g) for name, g in reference.gradients.items()}
        mine = {**zeros, **self.gradients}
        far = [float(np.linalg.norm(mine[name] - g)) for name, g in reference.gradients.items()]
        return abs(self.loss - reference.loss) / abs(reference.loss), float(np.max(far)) / largest


@dataclass(frozen=True)
class System:
    """A way to run the step, ready for it."""

    how: str
    step: Callable[[], float]  # the mean loss
    gradients: Callable[[], Gradients]


def run_peers(quick: bool, kept: Kept) -> Report:
    scale = QUICK if quick else FULL
    models = [partial(build, quick) for build in (peer_models.resnet, peer_models.gpt, peer_models.bert)]
    with ExitStack() as stack:
        stack.enter_context(operator_threads(1))
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ, AUTOPAR_CACHE_DIR=cache))
        has_gloo = dist.is_available() and dist.is_gloo_available()
        ranks = stack.enter_context(Processes(BenchmarkRank, STAGES)) if has_gloo else None
        title, tiny = compare(peer_models.tiny, scale.tiny_counts, scale.tiny_rounds, scale, ranks, kept.part("tiny"))
        found = dict(
            compare(build, scale.counts, scale.rounds, scale, ranks, kept.part(build.func.__name__)) for build in models
        )
    tables = [_tiny_table(title, tiny), *(_model_table(*model) for model in found.items())]
    tables += [_ratio_table(found), _bound_table(found)]
    rows = {name: [_values(row) for row in rows] for name, rows in {title: tiny, **found}.items()}
    data = {"torchgpipe": version(GPIPE) if _has_gpipe() else None, "models": rows}
    measured = tuple(
        _rounds(name, m, [row for row in rows if row.n_microbatches == m])
        for name, rows in {title: tiny, **found}.items()
        for m in sorted({row.n_microbatches for row in rows})
    )
    return Report("Beside other pipelines, two devices of a core each", tuple(tables), data, measured=measured)


def _rounds(title: str, m: int, rows: list[Row]) -> Rounds:
    seconds = {row.system: row.steps for row in rows}
    return Rounds(f"{title}, {m} micro-batches", seconds, CEILING if CEILING in seconds else None)


def compare(
    build: Builder, counts: tuple[int, ...], rounds: int, scale: Scale, ranks: Processes | None, kept: Kept
) -> tuple[str, list[Row]]:
    """The model's title, and rows for every number of micro-batches and every system that is installed.

    Raises RuntimeError where a system computes something else than the plain model.
    """
    subject = build()
    title = subject.workload.title
    if ranks is not None:
        ranks.call(BenchmarkRank.load, build)
    rows: list[Row] = []
    for m in counts:
        found = kept.case(m, make=partial(_values_of, subject, m, rounds, scale, ranks))
        rows += [as_row(Row, row) for row in found]
        gc.collect()  # modules and graphs refer to each other, and what comes next needs the memory
    return title, rows


def _values_of(subject: Subject, m: int, rounds: int, scale: Scale, ranks: Processes | None) -> list[dict[str, Any]]:
    log.info("%s, %d micro-batches: preparing", subject.workload.title, m)
    return [dataclasses.asdict(row) for row in _measured(subject, m, rounds, scale, ranks)]


def _measured(subject: Subject, m: int, rounds: int, scale: Scale, ranks: Processes | None) -> Iterator[Row]:
    workload = subject.workload

    def clear() -> None:
        workload.clear()
        if ranks is not None:
            ranks.call(BenchmarkRank.clear)

    # The model's parameters move nowhere, so that all in this process share the one model.
    names = _some([name for name, p in workload.model.named_parameters() if p.requires_grad])
    here = partial(gradients_of, workload.model, names)
    module, plan = _autopar(subject, m)
    systems = {AUTOPAR: System(f"{plan.places}, {plan.schedule}", _train_step(module, subject), here)}
    systems |= _gpipe(subject, m, scale.balancing, here) | _gloo(subject, m, scale.block_rounds, ranks, names)
    errors = _errors(subject, m, systems, here, clear)
    systems = {name: system for name, system in systems.items() if name in errors}
    if ranks is not None:
        ranks.call(BenchmarkRank.independent, CEILING)
        systems[CEILING] = System(f"{STAGES} independent processes", partial(_step, ranks, CEILING), here)
    alone, noted = Alone(module, workload), Noted(module, systems[AUTOPAR].step)
    log.info("%s, %d micro-batches: comparing", workload.title, m)
    steps: dict[str, Callable[[], object]] = {name: system.step for name, system in systems.items()}
    steps[AUTOPAR] = noted.step
    seconds = interleave({**steps, ALONE: alone.step}, rounds, clear)
    bound = lower_bound(alone.schedule, alone.taken[1:])  # the first warmed up
    over_bound = ratio(seconds[AUTOPAR], [lower_bound(alone.schedule, [taken]) for taken in noted.taken[1:]])
    module.close()
    clear()
    for name, system in systems.items():
        over = ratio(seconds[name], seconds[AUTOPAR])
        bounds = (bound, over_bound) if name == AUTOPAR else (None, None)
        yield Row(name, m, system.how, seconds[name], over, *errors.get(name, (None, None)), *bounds)


def _errors(
    subject: Subject, m: int, systems: Mapping[str, System], here: Callable[[], Gradients], clear: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """Of every system's loss and gradients. One of another system that are too large end it with a message, those of
    autopar raise RuntimeError."""
    clear()
    reference = Outcome(_accumulated(subject, m), here())
    found = {}
    for name, system in systems.items():
        clear()
        loss = system.step()
        errors = Outcome(loss, system.gradients()).errors(reference)
        if max(errors) <= TOLERANCE:
            found[name] = errors
            continue
        text = (
            f"{name}, {subject.workload.title}, {m} micro-batches: the loss is off by {errors[0]:.1e} and gradients by "
            f"{errors[1]:.1e} of the plain model's"
        )
        if name == AUTOPAR:
            raise RuntimeError(text)
        log.warning("%s; it is not timed", text)
    return found


def _accumulated(subject: Subject, m: int) -> float:
    """The plain model's mean loss; micro-batch by micro-batch, since batch norm mixes samples."""
    workload, total = subject.workload, 0.0
    parts = [tensor.tensor_split(m) for tensor in (subject.input, workload.target)]
    (name,) = workload.inputs
    for x, target in zip(*parts, strict=True):
        loss = workload.loss(workload.model(**{name: x}), target) * (len(x) / workload.batch_size)
        loss.backward()
        total += loss.item()
    return total


def _some(names: list[str]) -> list[str]:
    """The first, the last and some between."""
    return [names[round(i)] for i in np.linspace(0, len(names) - 1, min(_N_CHECKED, len(names)))]


# -- the systems ------------------------------------------------------------------------------------------------------


def _autopar(subject: Subject, m: int) -> tuple[PipelinedModule, Plan]:
    workload = subject.workload
    split = Plan.from_split(subject.split, n_microbatches=m) if subject.split else None
    options: dict[str, Any] = {"plan": split} if split else {"max_replicas": 1, "n_microbatches": m, "tune": 0}
    module = autopar.parallelize(
        workload.model,
        list(DEVICES),
        example_kwargs=workload.inputs,
        target=workload.target,
        loss_fn=workload.loss,
        **options,
    )
    assert module.plan is not None
    return module, module.plan


def _train_step(module: PipelinedModule, subject: Subject) -> Callable[[], float]:
    workload = subject.workload
    return lambda: module.train_step(**workload.inputs, target=workload.target, loss_fn=workload.loss).item()


def _gpipe(subject: Subject, m: int, balancing: float, gradients: Callable[[], Gradients]) -> dict[str, System]:
    if not _has_gpipe():
        return {}
    step, sizes = gpipe_step(subject.training_step, STAGES, m, balancing)
    how = f"blocks {' | '.join(map(str, sizes))}"
    return {
        GPIPE: System(how, step, gradients),
        GPIPE_WORKERS: System(how, partial(worker_a_stage, step), gradients),
    }


def _has_gpipe() -> bool:
    return importlib.util.find_spec(GPIPE) is not None


def _gloo(subject: Subject, m: int, block_rounds: int, ranks: Processes | None, names: list[str]) -> dict[str, System]:
    """Those schedules that there are enough blocks and micro-batches for."""
    if ranks is None:
        return {}
    times = block_seconds(subject.training_step, m, block_rounds)
    systems = {}
    for name, schedule in GLOO.items():
        n_stages = STAGES * PER_RANK[schedule]
        if len(times) < n_stages:
            continue
        cuts = balanced(times, n_stages)
        try:
            ranks.call(BenchmarkRank.pipelining, name, schedule, m, cuts)
        except RuntimeError as error:
            if "ended" in str(error):  # a process; there is no going on
                raise
            log.info("%s, %d micro-batches: not run: %s", name, m, str(error).strip().splitlines()[-1])
            continue
        step, gradients = partial(_step, ranks, name), partial(_gradients, ranks, name, names)
        systems[name] = System(sizes_in_words(cuts, len(times)), step, gradients)
    return systems


def _step(ranks: Processes, name: str) -> float:
    losses = [loss for loss in ranks.call(BenchmarkRank.step, name) if loss is not None]
    return float(losses[-1])


def _gradients(ranks: Processes, name: str, names: list[str]) -> Gradients:
    first, last = ranks.call(BenchmarkRank.gradients, name, names)
    return {**first, **last}


# -- what is shown ----------------------------------------------------------------------------------------------------


def _values(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "measured": row.measured}


def _tiny_table(title: str, rows: list[Row]) -> Table:
    counts = sorted({row.n_microbatches for row in rows})
    lines = []
    for system in SYSTEMS:
        times = {row.n_microbatches: row.measured for row in rows if row.system == system}
        shown = [f"{times[m] * 1e3:.2f}" if m in times else _absent(system) for m in counts]
        lines.append((system, *shown, f"{slope(list(times), list(times.values())) * 1e6:.0f}" if times else ""))
    return Table(
        f"Step of {title}",
        ("", *(f"{m} micro-batches, ms" for m in counts), "us per extra micro-batch"),
        tuple(lines),
        "The processes of torch.distributed.pipelining get their commands by a pipe, which the slope leaves out.",
    )


def _model_table(title: str, rows: list[Row]) -> Table:
    counts = sorted({row.n_microbatches for row in rows})
    lines = [_model_line(system, m, _find(rows, system, m)) for m in counts for system in SYSTEMS]
    return Table(
        f"Step of {title}",
        ("", "micro-batches", "stages", "measured s", "range s", "/ autopar", "loss error", "gradient error"),
        tuple(lines),
        "Forward and backward of a mean loss, measured in turn; medians, and of the ratios in each round. Errors are "
        "relative to the plain model's that runs the micro-batches one after the other. torchgpipe runs all stages on "
        "CPUs in one worker, and all backwards in the caller's thread; 'a worker a stage' changes the first.",
    )


def _absent(system: str) -> str:
    return "not installed" if system.startswith(GPIPE) and not _has_gpipe() else "not run"


def _model_line(system: str, m: int, row: Row | None) -> tuple[str, ...]:
    if row is None:
        return (system, str(m), _absent(system), *[""] * 5)
    spread = f"{min(row.steps):.3f}-{max(row.steps):.3f}"
    errors = [f"{error:.1e}" if error is not None else "" for error in (row.loss_error, row.gradient_error)]
    return (system, str(m), row.how, f"{row.measured:.3f}", spread, f"{row.over_autopar:.2f}", *errors)


def _ratio_table(found: Mapping[str, list[Row]]) -> Table:
    lines = []
    for title, rows in found.items():
        for m in sorted({row.n_microbatches for row in rows}):
            others = [_find(rows, system, m) for system in (GPIPE, GPIPE_WORKERS)]
            gloo = [row for system in GLOO if (row := _find(rows, system, m)) is not None]
            best = min(gloo, key=lambda row: row.over_autopar, default=None)
            which = GLOO[best.system] if best else ""
            named = zip((GPIPE, GPIPE_WORKERS, "pipelining"), (*others, best), strict=True)
            cells = [f"{row.over_autopar:.2f}" if row else _absent(name) for name, row in named]
            lines.append((title, str(m), *cells, which))
    return Table(
        "Step time / autopar's",
        ("", "micro-batches", GPIPE, GPIPE_WORKERS, "torch.distributed.pipelining", "by its best schedule"),
        tuple(lines),
    )


def _bound_table(found: Mapping[str, list[Row]]) -> Table:
    lines = []
    for title, rows in found.items():
        for row in rows:
            if row.alone is not None:
                times = f"{row.measured:.3f}", f"{row.over_bound:.3f}", f"{row.measured / row.alone:.3f}"
                lines.append((title, str(row.n_microbatches), row.how, *times))
    return Table(
        "Step against the simulator's bound",
        ("", "micro-batches", "plan", "measured s", "/ bound", "/ bound, one worker at a time"),
        tuple(lines),
        "The bound: every forward and backward takes what it took in that very step, waiting left out; the schedule "
        "lays them out on the devices, and transfers take nothing. What is above it is the runtime's. In the last "
        "column the workers did the same actions one at a time, which leaves out what they cost each other (memory "
        "bandwidth, caches, the interpreter's lock).",
    )


def _find(rows: list[Row], system: str, m: int) -> Row | None:
    return next((row for row in rows if (row.system, row.n_microbatches) == (system, m)), None)
