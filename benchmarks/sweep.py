"""The grid of plans that the automatic one has to stand against, every point of it run.

cut:            one stage | another, at several shares of the model's time; or no cut and two replicas
n_microbatches: 1 2 3 4 6 8 12
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.example import examine
from autopar.costs.cost_graph import CostGraph
from autopar.plan.plan import Stage
from autopar.planner.inter_op.atoms import make_atoms
from autopar.planner.predict import Conditions, predict
from autopar.runtime import module as runtime
from benchmarks.models import Workload
from benchmarks.timing import interleave, ratio

log = logging.getLogger(__name__)

PIPELINE, REPLICAS = "pipeline", "replicas"
SHARES = (0.35, 0.65)  # of the model's time, before the earliest and the latest cut


@dataclass(frozen=True)
class Grid:
    cuts: int
    counts: tuple[int, ...]  # n_microbatches
    steps: int  # at every point
    finalists: int  # of each shape, measured again
    rounds: int  # of measuring them again


@dataclass(frozen=True)
class Point:
    """One plan of the grid. With one micro-batch stages do not overlap: only the middle cut is measured there."""

    shape: str  # PIPELINE or REPLICAS
    share: float | None  # of the model's time before the cut
    module: str  # where the second stage begins
    n_microbatches: int
    measured: float  # s, the fastest of a few steps
    predicted: float  # s

    def __str__(self) -> str:
        where = "two replicas" if self.share is None else f"cut at {self.share:.0%} ({self.module})"
        return f"{where}, n_microbatches {self.n_microbatches}"


@dataclass(frozen=True)
class Final:
    """A plan that was measured again, in turn with the other finalists."""

    name: str
    shape: str
    measured: float  # s, median
    over_auto: float  # median over rounds of its time / that of the automatic plan


@dataclass(frozen=True)
class Sweep:
    points: tuple[Point, ...]
    finals: tuple[Final, ...]
    auto_over_best: float  # step time of the automatic plan / of the best of the grid, median over rounds
    pure_over_best: float  # of the automatic pure pipeline / of the best pipeline of the grid

    def best(self, shape: str, seconds: Callable[[Point], float]) -> dict[int, float]:
        """The least `seconds` of a shape, by n_microbatches."""
        found: dict[int, float] = {}
        for point in self.points:
            if point.shape == shape:
                count = point.n_microbatches
                found[count] = min(seconds(point), found.get(count, math.inf))
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class _Candidate:
    shape: str
    share: float | None
    module: str
    plan: Plan
    stage_of: dict[str, int]  # of the operators, by their names in the cost graph


def run_sweep(
    workload: Workload,
    devices: Sequence[str],
    costs: CostGraph,
    grid: Grid,
    auto: PipelinedModule,
    pure: PipelinedModule,
) -> Sweep:
    """Measure every plan of the grid on two `devices`, and the best of them again in turn with `auto` and `pure`."""
    found: list[tuple[Point, Plan]] = []
    with _captured_once():
        candidates = list(_candidates(costs, grid))
        for index, candidate in enumerate(candidates):
            point = _measured(workload, devices, costs, candidate, grid.steps)
            log.info("%d/%d %s: %.4g s", index + 1, len(candidates), point, point.measured)
            found.append((point, candidate.plan))
        found.sort(key=lambda pair: pair[0].measured)
        best = [pair for s in (PIPELINE, REPLICAS) for pair in [p for p in found if p[0].shape == s][: grid.finalists]]
        modules = [autopar.parallelize(workload.model, list(devices), plan=plan) for _, plan in best]
        steps = {"automatic": _step(workload, auto), "automatic, pure pipeline": _step(workload, pure)}
        steps |= {str(point): _step(workload, module) for (point, _), module in zip(best, modules, strict=True)}
        seconds_of = interleave(steps, grid.rounds, workload.clear)
        for module in modules:
            module.close()
    shapes = dict(zip(steps, ["", PIPELINE, *(point.shape for point, _ in best)], strict=True))
    finals = tuple(
        Final(name, shapes[name], float(np.median(seconds)), ratio(seconds, seconds_of["automatic"]))
        for name, seconds in seconds_of.items()
    )
    rivals = finals[2:]
    fastest = min(rivals, key=lambda f: f.measured)
    fastest_pipeline = min((f for f in rivals if f.shape == PIPELINE), key=lambda f: f.measured)
    return Sweep(
        tuple(point for point, _ in found),
        finals,
        ratio(seconds_of["automatic"], seconds_of[fastest.name]),
        ratio(seconds_of["automatic, pure pipeline"], seconds_of[fastest_pipeline.name]),
    )


def choose_cuts(seconds: np.ndarray, modules: Sequence[tuple[str, str]], n: int) -> list[int]:
    """Cut positions near `n` shares of the time, evenly spaced over `SHARES`, at the outermost module boundaries.

    Args:
        seconds: [pieces] of every piece of the model, in order; cut c lies between pieces c - 1 and c.
        modules: for every cut 1, 2, ... the paths of the modules that end and begin there.
    """
    before = np.cumsum(seconds) / np.sum(seconds)  # before[c - 1]: the share before cut c
    depth = [_shared_depth(a.split("."), b.split(".")) for a, b in modules]
    reach = (SHARES[1] - SHARES[0]) / max(n - 1, 1) / 2
    chosen = []
    for target in np.linspace(*SHARES, n) if n > 1 else [sum(SHARES) / 2]:
        far = [abs(before[c - 1] - target) for c in range(1, len(seconds))]
        near = [c for c in range(1, len(seconds)) if far[c - 1] <= reach]
        if near:
            chosen.append(min(near, key=lambda c: (depth[c - 1], far[c - 1])))
        else:
            chosen.append(int(np.argmin(far)) + 1)
    return sorted(set(chosen))


def _shared_depth(one: Sequence[str], other: Sequence[str]) -> int:
    """How many names two paths have in common from their root on."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _candidates(costs: CostGraph, grid: Grid) -> Iterator[_Candidate]:
    atoms = make_atoms(costs)
    table = costs.tables[0]
    forward, backward, _ = table.at(costs.batch_size)
    seconds = atoms.sums(table.nodes, forward + backward)
    operators = costs.operators
    first = [operators[atom[0]].module for atom in atoms.nodes]
    last = [operators[atom[-1]].module for atom in atoms.nodes]
    keys = [tuple(operators[n].key for n in atom) for atom in atoms.nodes]
    line = tuple(key for atom in keys for key in atom)
    names = [d.name for d in costs.devices]
    counts = [m for m in grid.counts if m <= costs.batch_size]
    cuts = choose_cuts(seconds, list(zip(last[:-1], first[1:], strict=True)), grid.cuts)
    for cut in cuts:
        size = sum(map(len, keys[:cut]))
        stages = (Stage((names[0],), line[:size]), Stage((names[1],), line[size:]))
        share = float(seconds[:cut].sum() / seconds.sum())
        stage_of = {name: int(index >= cut) for index, atom in enumerate(atoms.nodes) for name in atom}
        for m in counts:
            if m > 1 or cut == cuts[len(cuts) // 2]:
                yield _Candidate(PIPELINE, share, first[cut], Plan(stages, m), stage_of)
    together = (Stage(tuple(names[:2]), line),)
    for m in counts:
        if m > 1:
            yield _Candidate(REPLICAS, None, "", Plan(together, m), {n: 0 for atom in atoms.nodes for n in atom})


def _measured(workload: Workload, devices: Sequence[str], costs: CostGraph, candidate: _Candidate, steps: int) -> Point:
    expected = predict(costs, candidate.plan, candidate.stage_of, Conditions(loss_inside=True)).predicted_step_time
    assert expected is not None
    seconds = _fastest(workload, devices, candidate.plan, steps)
    return Point(candidate.shape, candidate.share, candidate.module, candidate.plan.n_microbatches, seconds, expected)


def _fastest(workload: Workload, devices: Sequence[str], plan: Plan, steps: int) -> float:
    """Seconds of the fastest step, which excludes the first one's preparations if `steps` > 1."""
    module = autopar.parallelize(workload.model, list(devices), plan=plan)
    step = _step(workload, module)
    seconds = []
    for _ in range(steps):
        workload.clear()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    module.close()
    return min(seconds)


def _step(workload: Workload, module: PipelinedModule) -> Callable[[], object]:
    return lambda: module.train_step(**workload.inputs, target=workload.target, loss_fn=workload.loss)


@contextmanager
def _captured_once() -> Iterator[None]:
    """Within, all pipelined modules are of one model called in one way, and share its capture, which takes longer than
    a step does."""
    known: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not known:
            known.append(examine(*args, **kwargs))
        return known[0]

    with patch.object(runtime, "examine", once):
        yield
