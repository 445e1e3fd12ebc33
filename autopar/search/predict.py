"""What a plan costs, before it runs: stage times, transfers and memory from the cost graph, laid out by the simulator.

One account for every plan, whether the search found it or a user wrote it: the operators stand in a line of atoms, and
every stage is a span of it. A plan made by hand may put operators anywhere; its stages are then the atoms.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costgraph import CostGraph
from autopar.plan import Link as StageLink
from autopar.plan import Plan, Stage
from autopar.schedule import make_schedule
from autopar.search.atoms import Atoms, gather
from autopar.search.problem import Shared
from autopar.simulate import StageMemory, StageTimes, Timeline, Transfer, simulate
from cost_models import optimizer_state_bytes

# Seconds that the runtime itself needs for one micro-batch in one stage, forward and backward: taking messages, making
# leaves, starting autograd (`python -m benchmarks overhead` measures it).
ACTION_OVERHEAD = 6e-5


@dataclass(frozen=True)
class Arrangement:
    """Where and how the atoms run: a span of them a stage, each on its devices."""

    spans: tuple[slice, ...]
    devices: tuple[tuple[str, ...], ...]  # names, of each stage
    n_microbatches: int
    schedule: str

    @property
    def n_devices(self) -> int:
        return sum(map(len, self.devices))

    @property
    def busy(self) -> int:
        """Devices that compute at the same time: one micro-batch is on one device after the other."""
        return self.n_devices if self.n_microbatches > 1 else 1


@dataclass(frozen=True)
class Conditions:
    """What a step is like, whatever the plan."""

    optimizer: str = "adamw"  # whose state the memory holds
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards


def predict(costs: CostGraph, plan: Plan, stage_of: Mapping[str, int], conditions: Conditions) -> Plan:
    """`plan` with its costs filled in, as if the search had made it; notes and `split` stay.

    `stage_of`: node of the cost graph -> stage, as `plan.assign` says. Values must flow to later stages only.
    """
    line: list[list[str]] = [[] for _ in plan.stages]
    for name, data in costs.graph.nodes(data=True):
        if not data["replicable"]:
            line[stage_of[name]].append(name)
    atoms = gather(costs, tuple(map(tuple, line)))
    arrangement = Arrangement(
        tuple(slice(s, s + 1) for s in range(len(line))),
        tuple(stage.devices for stage in plan.stages),
        min(plan.n_microbatches, max(costs.batch_size, 1)),
        plan.schedule,
    )
    found = as_plan(costs, atoms, arrangement, simulated(costs, atoms, arrangement, conditions), conditions)
    return dataclasses.replace(found, split=plan.split, notes=plan.notes)


def simulated(costs: CostGraph, atoms: Atoms, arrangement: Arrangement, conditions: Conditions) -> Timeline:
    """One step of the arrangement in time and memory."""
    m = arrangement.n_microbatches
    rows = _rows(costs.batch_size, m)
    plain = arrangement.n_devices == 1 and m == 1  # the runtime calls the model itself
    overhead = 0.0 if plain else ACTION_OVERHEAD
    kinds = _kinds(costs, arrangement)
    by_rows = {
        (k, r): atom_times(costs, atoms, k, arrangement.busy, r) for k in dict.fromkeys(kinds) for r in set(rows)
    }
    stages, memory = [], []
    for span, kind, names in zip(arrangement.spans, kinds, arrangement.devices, strict=True):
        times = [by_rows[kind, r] for r in rows]
        stages.append(
            StageTimes(
                tuple(float(f[span].sum()) + overhead for f, _ in times),
                tuple(float(b[span].sum()) + overhead for _, b in times),
                _sync_time(costs, atoms, span, len(names)),
            )
        )
        memory.append(_stage_memory(costs, atoms, conditions, span, rows))
    barrier = 0.0 if costs.training and not conditions.loss_inside else None
    schedule = make_schedule(
        arrangement.schedule if barrier is None else "gpipe",  # the barrier makes every schedule this one
        m,
        [len(names) for names in arrangement.devices],
        training=costs.training,
    )
    return simulate(schedule, stages, _transfers(costs, atoms, arrangement), memory=memory, barrier=barrier)


def as_plan(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, timeline: Timeline, conditions: Conditions
) -> Plan:
    """The arrangement and what its timeline predicts."""
    m = arrangement.n_microbatches
    order = {name: data["position"] for name, data in costs.graph.nodes(data=True)}
    peaks = timeline.peak_memory or ()
    stages = []
    for index, (span, kind, names) in enumerate(
        zip(arrangement.spans, _kinds(costs, arrangement), arrangement.devices, strict=True)
    ):
        f, b = atom_times(costs, atoms, kind, arrangement.busy, costs.batch_size / m)
        memory = _stage_memory(costs, atoms, conditions, span, _rows(costs.batch_size, m))
        inside = sorted((n for atom in atoms.nodes[span] for n in atom), key=order.__getitem__)
        slots = timeline.schedule.slots_of(index)
        stages.append(
            Stage(
                devices=names,
                operators=tuple(costs.graph.nodes[n]["key"] for n in inside),
                forward_time=float(f[span].sum()),
                backward_time=float(b[span].sum()),
                parameter_bytes=int(_touched([s for s, _ in atoms.parameters], span)),
                activation_bytes=memory.activation[0],
                peak_memory=max(peaks[slots.start : slots.stop], default=0),
                sync_time=_sync_time(costs, atoms, span, len(names)),
            )
        )
    links = []
    for (source, target), (forward, backward) in _stage_links(atoms, arrangement).items():
        pair = costs.links[arrangement.devices[source][0], arrangement.devices[target][0]]
        seconds = pair.seconds(forward / m) + (pair.seconds(backward / m) if backward else 0.0)
        links.append(StageLink(source, target, int(forward / m), int(backward / m), seconds))
    return Plan(
        stages=tuple(stages),
        n_microbatches=m,
        schedule=arrangement.schedule,
        batch_size=costs.batch_size,
        devices=tuple(d.name for d in costs.devices),
        training=costs.training,
        predicted_step_time=timeline.step_time,
        single_device_time=_single_device_time(costs, atoms),
        bubble=timeline.bubble,
        transfers=tuple(links),
    )


def plan_timeline(plan: Plan) -> Timeline | None:
    """One step drawn from a plan's own numbers; None where it has none (made by hand)."""
    if any(stage.forward_time is None or stage.backward_time is None for stage in plan.stages):
        return None
    m = plan.n_microbatches
    rows = _rows(plan.batch_size or m, m)
    share = [r * m / sum(rows) for r in rows]  # of the mean micro-batch
    overhead = 0.0 if len(plan.used_devices) == 1 and m == 1 else ACTION_OVERHEAD
    stages = [
        StageTimes(
            tuple((stage.forward_time or 0.0) * s + overhead for s in share),
            tuple((stage.backward_time or 0.0) * s + overhead for s in share),
            stage.sync_time or 0.0,
        )
        for stage in plan.stages
    ]
    transfers = []
    for link in plan.transfers:
        back = link.seconds / 2 if link.backward_bytes else 0.0  # a gradient is as large as its value
        transfers.append(Transfer(link.source, link.target, (link.seconds - back,) * m, (back,) * m))
    schedule = make_schedule(plan.schedule, m, [len(s.devices) for s in plan.stages], training=plan.training)
    return simulate(schedule, stages, transfers)


def atom_times(costs: CostGraph, atoms: Atoms, kind: str, workers: int, rows: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every atom, forward and backward, at `rows` samples; the loss counts to the last."""
    table = costs.table(kind, workers)
    forward, backward, loss = table.at(rows)
    f, b = atoms.sums(table.nodes, forward), atoms.sums(table.nodes, backward)
    f[-1] += loss[0]
    b[-1] += loss[1]
    return f, b


def resident_bytes(nbytes: float, trained: bool, costs: CostGraph, optimizer: str) -> float:
    """Bytes that a parameter takes on its device: itself, its gradient, the optimizer's state."""
    if not (trained and costs.training):
        return nbytes
    return 2 * nbytes + optimizer_state_bytes(optimizer, int(nbytes))


def _kinds(costs: CostGraph, arrangement: Arrangement) -> list[str]:
    """Of each stage: its replicas are devices that cost the same, or are taken to."""
    kind_of = {device.name: device.kind for device in costs.devices}
    return [kind_of[names[0]] for names in arrangement.devices]


def _rows(batch: int, m: int) -> list[int]:
    """Samples in each micro-batch (as the runtime splits: as even as they go, larger ones first)."""
    small, more = divmod(batch, m)
    return [small + 1] * more + [small] * (m - more)


def _stage_links(atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes (forward, backward) of the whole batch between each pair of stages that talk to each other."""
    stage_of = {a: i for i, span in enumerate(arrangement.spans) for a in range(span.start, span.stop)}
    found: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for value in atoms.values:
        source = stage_of[value.producer]
        for target in sorted({stage_of[c] for c in value.consumers} - {source}):
            forward, backward = found[source, target]
            found[source, target] = (forward + value.nbytes, backward + value.grad_nbytes)
    return found


def _transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[Transfer]:
    m, devices = arrangement.n_microbatches, arrangement.devices
    transfers = []
    for (source, target), (forward, backward) in _stage_links(atoms, arrangement).items():
        pairs = [(a, b) for a in devices[source] for b in devices[target]]
        slowest = [max((costs.links[p].seconds(n / m) for p in pairs), default=0.0) for n in (forward, backward)]
        transfers.append(Transfer(source, target, (slowest[0],) * m, (slowest[1],) * m))
    return transfers


def _sync_time(costs: CostGraph, atoms: Atoms, span: slice, replicas: int) -> float:
    """Seconds once a step: the gradients of the replicas are added up."""
    trained = _touched([s for s, trained in atoms.parameters if trained], span) if costs.training else 0.0
    return (replicas - 1) * trained * costs.accumulate


def _stage_memory(
    costs: CostGraph, atoms: Atoms, conditions: Conditions, span: slice, rows: Sequence[int]
) -> StageMemory:
    held = [Shared(resident_bytes(s.nbytes, t, costs, conditions.optimizer), s.atoms) for s, t in atoms.parameters]
    received = sum(
        v.nbytes
        for v in atoms.values
        if v.producer < span.start and any(span.start <= c < span.stop for c in v.consumers)
    )
    activation = _touched(atoms.saved, span) + received
    share = [r / costs.batch_size for r in rows]
    transient = float(atoms.transient[span].max()) * max(share)
    return StageMemory(int(_touched(held, span)), tuple(int(activation * s) for s in share), int(transient))


def _touched(items: Sequence[Shared], span: slice) -> float:
    return sum(s.nbytes for s in items if any(span.start <= a < span.stop for a in s.atoms))


def _single_device_time(costs: CostGraph, atoms: Atoms) -> float:
    f, b = atom_times(costs, atoms, costs.devices[0].kind, 1, costs.batch_size)
    return float(f.sum() + b.sum())
