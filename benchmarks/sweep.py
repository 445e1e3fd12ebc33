"""The grid of hand-made plans that the automatic plan has to beat. Every point of it is run.

cut:            one stage | another, at several shares of the model's time; or no cut and two replicas
n_microbatches: 1 2 3 4 6 8 12

All points run in turn with the automatic plans and the plain model, round by round (`timing.interleave`), so that
every number of the figure and of the tables comes from the same minutes on the same machine:

    round 1: plain | automatic | pure pipeline | point 1 | point 2 | ... | point n
    round 2: plain | automatic | pure pipeline | point 1 | ...

The fastest of many noisy medians is low partly by luck. These rounds therefore only choose the best of the grid. It is
compared with the automatic plan in rounds of their own, in which both are counted once:

    final round 1: automatic | pure pipeline | best of the grid | best pipeline of the grid
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import numpy as np

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.example import examine
from autopar.costs.cost_graph import CostGraph
from autopar.plan.stage import Stage
from autopar.planner.arrangement import Conditions
from autopar.planner.inter_op.atoms import make_atoms
from autopar.planner.predict import predict
from autopar.runtime.signatures import captures
from benchmarks.models import Workload
from benchmarks.timing import Step, ratio
from cost_models.measuring.intervals import Interval, paired_ratio_interval

PIPELINE, REPLICAS = "pipeline", "replicas"
SHARES = (0.35, 0.65)  # of the model's time, before the earliest and the latest cut


@dataclass(frozen=True)
class Grid:
    cuts: int
    counts: tuple[int, ...]  # n_microbatches


@dataclass(frozen=True)
class GridPlan:
    """One plan of the grid. With one micro-batch stages do not overlap: the grid has only the middle cut there."""

    shape: str  # PIPELINE or REPLICAS
    share: float | None  # of the model's time before the cut
    module: str  # where the second stage begins
    plan: Plan
    predicted: float  # s

    def to_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "plan": self.plan.to_json()}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GridPlan:
        return cls(**{**data, "plan": Plan.from_json(data["plan"])})

    def __str__(self) -> str:
        where = "two replicas" if self.share is None else f"cut at {self.share:.0%} ({self.module})"
        return f"{where}, n_microbatches {self.plan.n_microbatches}"


@dataclass(frozen=True)
class Point:
    """A plan of the grid as measured."""

    name: str
    shape: str  # PIPELINE or REPLICAS
    share: float | None  # of the model's time before the cut
    n_microbatches: int
    predicted: float  # s
    measured: float  # s, median over the rounds
    over_auto: float  # median over the rounds of its time / the automatic plan's
    steps: tuple[float, ...]  # s, one per round


@dataclass(frozen=True)
class Final:
    """The automatic plan against the best hand-made one, in rounds that chose neither."""

    rival: str  # the point of the grid
    same: bool  # both are one plan, which ran once: the ratio is 1
    automatic: tuple[float, ...]  # s, one per round
    best: tuple[float, ...]  # s, in the same rounds
    over_best: float  # median over rounds of the automatic plan's time / the rival's
    interval: Interval  # of that ratio

    @classmethod
    def of(cls, rival: str, automatic: Sequence[float], best: Sequence[float], *, same: bool) -> Final:
        auto, other = tuple(automatic), tuple(automatic if same else best)
        return cls(rival, same, auto, other, ratio(auto, other), paired_ratio_interval(auto, other))


@dataclass(frozen=True)
class Sweep:
    """The grid as measured, in the same rounds as the automatic plan."""

    points: tuple[Point, ...]

    @property
    def fastest(self) -> Point:
        return min(self.points, key=attrgetter("measured"))

    @property
    def fastest_pipeline(self) -> Point:
        return min((p for p in self.points if p.shape == PIPELINE), key=attrgetter("measured"))

    def best(self, shape: str, seconds: Callable[[Point], float]) -> dict[int, Point]:
        """The point of a shape with the fewest `seconds`, by n_microbatches."""
        best: dict[int, Point] = {}
        for point in self.points:
            count = point.n_microbatches
            if point.shape == shape and (count not in best or seconds(point) < seconds(best[count])):
                best[count] = point
        return dict(sorted(best.items()))


@contextmanager
def grid_steps(workload: Workload, devices: Sequence[str], plans: Sequence[GridPlan]) -> Iterator[dict[str, Step]]:
    """A training step of every plan, by the plan's name. All modules stay ready while the context is open."""
    modules: dict[str, PipelinedModule] = {}
    try:
        for plan in plans:
            modules[str(plan)] = autopar.parallelize(workload.model, list(devices), plan=plan.plan)
        with _captured_once():  # by the first step of each, the warm-up
            yield {name: training_step(workload, module) for name, module in modules.items()}
    finally:
        for module in modules.values():
            module.close()


def training_step(workload: Workload, module: PipelinedModule) -> Step:
    return lambda: module.train_step(**workload.inputs, target=workload.target, loss_fn=workload.loss)


def summary(plans: Sequence[GridPlan], seconds: Mapping[str, tuple[float, ...]], auto: tuple[float, ...]) -> Sweep:
    """`seconds`: of every plan by its name; `auto`: of the automatic plan; all in the same rounds."""
    points = tuple(
        Point(
            str(plan),
            plan.shape,
            plan.share,
            plan.plan.n_microbatches,
            plan.predicted,
            float(np.median(seconds[str(plan)])),
            ratio(seconds[str(plan)], auto),
            seconds[str(plan)],
        )
        for plan in plans
    )
    return Sweep(points)


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


def grid_plans(costs: CostGraph, grid: Grid) -> Iterator[GridPlan]:
    """Every plan of the grid, with its predicted step."""
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
                yield _grid_plan(costs, PIPELINE, share, first[cut], Plan(stages, m), stage_of)
    together = (Stage(tuple(names[:2]), line),)
    for m in counts:
        if m > 1:
            everything = {n: 0 for atom in atoms.nodes for n in atom}
            yield _grid_plan(costs, REPLICAS, None, "", Plan(together, m), everything)


def _grid_plan(
    costs: CostGraph, shape: str, share: float | None, module: str, plan: Plan, stage_of: dict[str, int]
) -> GridPlan:
    """`stage_of`: the stage of every operator, by its name in the cost graph."""
    predicted = predict(costs, plan, stage_of, Conditions(loss_inside=True)).predicted_step_time
    assert predicted is not None
    return GridPlan(shape, share, module, plan, predicted)


@contextmanager
def _captured_once() -> Iterator[None]:
    """Inside, all pipelined modules wrap one model that is called in one way: they share its capture, which takes
    longer than a step."""
    known: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not known:
            known.append(examine(*args, **kwargs))
        return known[0]

    with patch.object(captures, "examine", once):
        yield
