"""What a plan costs, before it runs: stage times, transfers and memory from the cost graph, laid out by the simulator.

One account for every plan, whether the search found it or a user wrote it: a stage is some of the atoms. A plan made
by hand may put operators anywhere; its stages are then the atoms.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import reduction_seconds
from autopar.plan.plan import Plan, Stage, StageTransfer
from autopar.planner.inter_op.atoms import Atoms, gather
from autopar.planner.sharded_stages import with_sharded
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Transfer
from autopar.schedule.simulate import StageTimes, simulate
from autopar.schedule.timeline import StageMemory, Timeline

# Seconds that the runtime itself needs for one micro-batch in one stage, forward and backward: taking messages, making
# leaves, starting autograd (`python -m benchmarks overhead` measures it).
ACTION_OVERHEAD = 6e-5


@dataclass(frozen=True)
class Arrangement:
    """Where and how the atoms run: some of them in each stage, each stage on its devices."""

    stages: tuple[tuple[int, ...], ...]  # atoms
    groups: tuple[tuple[DeviceGroup, ...], ...]  # replicas of each stage; of stages s and s + ranks the same
    n_microbatches: int
    schedule: str
    recompute: tuple[bool, ...]  # of each stage
    configurations: tuple[str, ...] = ()  # of each stage, by name, where groups are meshes

    @property
    def ranks(self) -> tuple[tuple[DeviceGroup, ...], ...]:
        """The groups of each place in the pipeline."""
        return tuple(dict.fromkeys(self.groups))

    @property
    def chunks(self) -> int:
        """Stages of each group."""
        return len(self.stages) // len(self.ranks)

    @property
    def n_groups(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def n_devices(self) -> int:
        return sum(len(group.devices) for rank in self.ranks for group in rank)

    def by_configuration(self, atoms: Atoms) -> list[tuple[Atoms, set[int]]]:
        """For every stage configuration in use the atoms with its bytes, and the numbers of its stages."""
        if not self.configurations:
            return [(atoms, set(range(len(self.stages))))]
        return [
            (atoms.of(name), {stage for stage, own in enumerate(self.configurations) if own == name})
            for name in dict.fromkeys(self.configurations)
        ]

    @property
    def busy(self) -> int:
        """Groups that compute at the same time: a single micro-batch is on one group after the other."""
        return self.n_groups if self.n_microbatches > 1 else 1

    @property
    def plain(self) -> bool:
        """Whether the runtime calls the model itself."""
        return self.n_groups == 1 and self.n_microbatches == 1 and not any(self.recompute)


@dataclass(frozen=True)
class Conditions:
    """What a step is like, whatever the plan."""

    optimizer: str = "adamw"  # whose state the memory holds
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards


class Times(NamedTuple):
    """Seconds of every atom."""

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray  # of `backward`, for gradients of parameters


def predict(costs: CostGraph, plan: Plan, stage_of: Mapping[str, int], conditions: Conditions) -> Plan:
    """`plan` with its costs filled in, as if the search had made it; what is not a cost stays.

    `stage_of`: node of the cost graph -> stage, as `plan.assign` says. Values must flow to later stages only. The costs
    of sharded stages, and of what they send, are those that the plan has: `costs` are of whole operators.
    """
    line: list[list[str]] = [[] for _ in plan.stages]
    for name, operator in costs.operators.items():
        if not operator.replicable:
            line[stage_of[name]].append(name)
    atoms = gather(costs, tuple(map(tuple, line)))
    group_of = {group.first: group for group in costs.groups}
    arrangement = Arrangement(
        tuple((s,) for s in range(len(line))),
        tuple(tuple(group_of[name] for name in stage.devices) for stage in plan.stages),
        min(plan.n_microbatches, max(costs.batch_size, 1)),
        plan.schedule,
        tuple(stage.recompute for stage in plan.stages),
    )
    found = as_plan(costs, atoms, arrangement, simulated(costs, atoms, arrangement, conditions), conditions)
    found = dataclasses.replace(found, split=plan.split, notes=plan.notes, model=plan.model)
    if not any(stage.sharding for stage in plan.stages):
        return found
    kept = with_sharded(found, plan)
    barrier = 0.0 if costs.training and not conditions.loss_inside else None
    timeline = plan_timeline(kept, barrier=barrier) if len(kept.transfers) == len(found.transfers) else None
    if timeline is None:
        return kept
    return dataclasses.replace(kept, predicted_step_time=timeline.step_time, bubble=timeline.bubble)


def simulated(
    costs: CostGraph,
    atoms: Atoms,
    arrangement: Arrangement,
    conditions: Conditions,
    *,
    link_speed: float = 1.0,
) -> Timeline:
    """One step of the arrangement in time and memory.

    `link_speed`: as if every transfer took one so many-th of the time.
    """
    m = arrangement.n_microbatches
    rows = _rows(costs.batch_size, m)
    overhead = 0.0 if arrangement.plain else ACTION_OVERHEAD
    split = arrangement.schedule == "zb-h1"
    kinds = _kinds(arrangement)
    by_rows = {
        (k, r): atom_times(costs, atoms, k, arrangement.busy, r) for k in dict.fromkeys(kinds) for r in set(rows)
    }
    contents = _contents(atoms, arrangement, conditions.optimizer)
    stages, memory = [], []
    for index, (inside, content) in enumerate(zip(arrangement.stages, contents, strict=True)):
        mine, again = list(inside), arrangement.recompute[index]
        times = [by_rows[kinds[index], r] for r in rows]
        forward = [float(t.forward[mine].sum()) for t in times]
        backward = [float(t.backward[mine].sum()) + (f if again else 0.0) for t, f in zip(times, forward, strict=True)]
        weight = [float(t.weight[mine].sum()) for t in times] if content.received_gradient else backward
        stages.append(
            StageTimes(
                tuple(f + overhead for f in forward),
                tuple(b + overhead * (2 if split else 1) for b in backward),
                tuple(w + overhead for w in weight) if split else (),
                reduction_seconds(costs, content.trained, arrangement.groups[index]),
            )
        )
        memory.append(_stage_memory(costs, atoms.of(kinds[index]), inside, content, again, rows))
    schedule = make_schedule(
        arrangement.schedule,
        m,
        [len(names) for names in arrangement.ranks],
        chunks=arrangement.chunks,
        training=costs.training,
    )
    transfers = [
        Transfer(
            t.source,
            t.target,
            tuple(s / link_speed for s in t.forward),
            tuple(s / link_speed for s in t.backward),
        )
        for t in _transfers(costs, atoms, arrangement)
    ]
    barrier = 0.0 if costs.training and not conditions.loss_inside else None
    return simulate(schedule, stages, transfers, memory=memory, barrier=barrier)


def as_plan(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, timeline: Timeline, conditions: Conditions
) -> Plan:
    """The arrangement and what its timeline predicts."""
    m = arrangement.n_microbatches
    peaks = timeline.peak_memory or ()
    contents = _contents(atoms, arrangement, conditions.optimizer)
    stages = []
    for index, (inside, kind, groups) in enumerate(
        zip(arrangement.stages, _kinds(arrangement), arrangement.groups, strict=True)
    ):
        mine = list(inside)
        times = atom_times(costs, atoms, kind, arrangement.busy, costs.batch_size / m)
        content, again, rows = contents[index], arrangement.recompute[index], _rows(costs.batch_size, m)
        memory = _stage_memory(costs, atoms.of(kind), inside, content, again, rows)
        nodes = sorted((n for atom in inside for n in atoms.nodes[atom]), key=lambda n: costs.operators[n].position)
        stages.append(
            Stage(
                devices=tuple(device for group in groups for device in group.devices),
                sharding=costs.configuration[kind].sharding(nodes) if kind in costs.configuration else None,
                operators=tuple(costs.operators[n].key for n in nodes),
                recompute=again,
                forward_time=float(times.forward[mine].sum()),
                backward_time=float(times.backward[mine].sum()),
                weight_time=float(times.weight[mine].sum()),
                parameter_bytes=int(content.parameters),
                activation_bytes=memory.activation[0],
                peak_memory=max((peaks[slot] for slot in timeline.schedule.slots_of(index)), default=0),
                sync_time=reduction_seconds(costs, content.trained, groups),
            )
        )
    links = []
    for (source, target), (forward, backward) in _stage_links(atoms, arrangement).items():
        ends = (arrangement.groups[source][0].first, arrangement.groups[target][0].first)
        seconds = 0.0  # within a device
        if ends[0] != ends[1]:
            seconds = costs.links[ends].seconds(forward / m) + (
                costs.links[ends].seconds(backward / m) if backward else 0
            )
        links.append(StageTransfer(source, target, int(forward / m), int(backward / m), seconds))
    return Plan(
        stages=tuple(stages),
        n_microbatches=m,
        schedule=arrangement.schedule,
        batch_size=costs.batch_size,
        devices=tuple(device.name for device in costs.devices),
        device_kinds=tuple(device.kind for device in costs.devices),
        training=costs.training,
        predicted_step_time=timeline.step_time,
        single_device_time=_single_device_time(costs, atoms),
        bubble=timeline.bubble,
        transfers=tuple(links),
    )


def plan_timeline(
    plan: Plan, *, link_speed: float = 1.0, batch_factor: int = 1, barrier: float | None = None
) -> Timeline | None:
    """One step drawn from a plan's own numbers; None where it has none (made by hand).

    `link_speed`: as if every transfer took one so many-th of the time. `batch_factor`: as if the batch were so many
    times as large, in so many times as many micro-batches. `barrier`: as of `simulate`.
    """
    if any(stage.forward_time is None or stage.backward_time is None for stage in plan.stages):
        return None
    m = plan.n_microbatches
    rows = _rows(plan.batch_size or m, m)
    share = [r * m / sum(rows) for r in rows] * batch_factor  # of the mean micro-batch
    m *= batch_factor
    split = plan.schedule == "zb-h1"
    again = [stage.recompute for stage in plan.stages]
    overhead = 0.0 if len(plan.used_devices) == 1 and plan.n_microbatches == 1 and not any(again) else ACTION_OVERHEAD
    stages = []
    for stage in plan.stages:
        forward = stage.forward_time or 0.0
        backward = (stage.backward_time or 0.0) + (forward if stage.recompute else 0.0)
        weight = stage.weight_time or 0.0
        stages.append(
            StageTimes(
                tuple(forward * s + overhead for s in share),
                tuple(backward * s + overhead * (2 if split else 1) for s in share),
                tuple(weight * s + overhead for s in share) if split else (),
                stage.sync_time or 0.0,
            )
        )
    transfers = []
    for link in plan.transfers:
        seconds = link.seconds / link_speed
        back = seconds / 2 if link.backward_bytes else 0.0  # a gradient is as large as its value
        transfers.append(Transfer(link.source, link.target, (seconds - back,) * m, (back,) * m))
    ranks = [stage.replicas for stage in plan.stages[: plan.ranks]]
    schedule = make_schedule(plan.schedule, m, ranks, chunks=plan.chunks, training=plan.training)
    return simulate(schedule, stages, transfers, barrier=barrier)


def atom_times(costs: CostGraph, atoms: Atoms, kind: str, workers: int, rows: float) -> Times:
    """Seconds of every atom at `rows` samples; the loss counts to the last."""
    table = costs.table(kind, workers)
    forward, backward, loss = table.at(rows)
    share = atoms.weight_shares(costs, table.nodes)
    f, b, w = (atoms.sums(table.nodes, times) for times in (forward, backward, backward * share))
    f[-1] += loss[0]
    b[-1] += loss[1]
    return Times(f, b, w)


def _kinds(arrangement: Arrangement) -> list[str]:
    """The stage configuration of each stage, or its device kind: that of its first replica."""
    return list(arrangement.configurations) or [groups[0].kind for groups in arrangement.groups]


def _rows(batch: int, m: int) -> list[int]:
    """Samples in each micro-batch (as the runtime splits: as even as they go, larger ones first)."""
    small, more = divmod(batch, m)
    return [small + 1] * more + [small] * (m - more)


def _stage_links(atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes (forward, backward) of the whole batch between each pair of stages that talk to each other; between meshes
    each device of one sends what a device of the other has."""
    stage_of = {atom: i for i, inside in enumerate(arrangement.stages) for atom in inside}
    found: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for own, mine in arrangement.by_configuration(atoms):
        for value in own.values:
            source = stage_of[value.producer]
            for target in sorted(({stage_of[c] for c in value.consumers} & mine) - {source}):
                forward, backward = found[source, target]
                found[source, target] = (forward + value.nbytes, backward + value.grad_nbytes)
    return dict(sorted(found.items()))


def _transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[Transfer]:
    m = arrangement.n_microbatches
    devices = [[group.first for group in groups] for groups in arrangement.groups]
    transfers = []
    for (source, target), (forward, backward) in _stage_links(atoms, arrangement).items():
        links = {costs.links[a, b] for a in devices[source] for b in devices[target] if a != b}
        slowest = [max((link.seconds(n / m) for link in links), default=0.0) for n in (forward, backward)]
        transfers.append(Transfer(source, target, (slowest[0],) * m, (slowest[1],) * m))
    return transfers


@dataclass
class _Content:
    """Bytes of one stage; activations and messages of the whole batch."""

    parameters: float = 0.0
    trained: float = 0.0  # of them
    state: float = 0.0  # of the optimizer
    saved: float = 0.0
    received: float = 0.0
    received_gradient: float = 0.0  # that it sends back for what it received


def _contents(atoms: Atoms, arrangement: Arrangement, optimizer: str) -> list[_Content]:
    """What each device of every stage holds and receives."""
    stage_of = {atom: i for i, inside in enumerate(arrangement.stages) for atom in inside}
    contents = [_Content() for _ in arrangement.stages]
    for own, mine in arrangement.by_configuration(atoms):
        for shared, weight in own.parameters:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].parameters += shared.nbytes
                if weight.trained:
                    contents[stage].trained += shared.nbytes
                    contents[stage].state += weight.state(optimizer)
        for shared in own.saved:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].saved += shared.nbytes
        for value in own.values:
            for stage in ({stage_of[atom] for atom in value.consumers} & mine) - {stage_of[value.producer]}:
                contents[stage].received += value.nbytes
                contents[stage].received_gradient += value.grad_nbytes
    return contents


def _stage_memory(
    costs: CostGraph,
    atoms: Atoms,
    inside: Collection[int],
    content: _Content,
    recompute: bool,
    rows: Sequence[int],
) -> StageMemory:
    trained = content.trained if costs.training else 0.0
    share = [r / costs.batch_size for r in rows]
    kept = content.received if recompute else content.saved + content.received
    transient = float(atoms.transient[list(inside)].max()) + (content.saved if recompute else 0.0)
    return StageMemory(
        parameters=int(content.parameters),
        gradients=int(trained),
        optimizer=int(content.state) if costs.training else 0,
        activation=tuple(int(kept * s) for s in share),
        transient=int(transient * max(share)),
    )


def _single_device_time(costs: CostGraph, atoms: Atoms) -> float:
    times = atom_times(costs, atoms, costs.devices[0].kind, 1, costs.batch_size)
    return float(times.forward.sum() + times.backward.sum())
