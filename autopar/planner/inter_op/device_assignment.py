"""Devices as the search sees them, by kind; and which device of a kind serves which stage, where links differ."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.costs.cost_graph import CostGraph
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.problem import DeviceKind
from autopar.planner.inter_op.refinement import PartitionResult
from autopar.planner.predict import ACTION_OVERHEAD, sync_seconds_per_byte
from cost_models import Device

_STARTS = 8  # devices tried for the first stage
# Devices of one kind whose memory differs by less than this factor are taken for equal, with the smaller memory.
_SAME_MEMORY = 1.1
_MOST_PLACED = 64
# Bytes of gradients that are reduced together: the rate of large messages counts.
_BUCKET = 1 << 28


def group_devices(devices: Sequence[Device]) -> list[list[Device]]:
    """Devices of one kind, and about as much memory, together; in the order in which they were given."""
    by_kind: dict[str, list[Device]] = defaultdict(list)
    for device in devices:
        by_kind[device.kind].append(device)
    groups: list[list[Device]] = []
    for same in by_kind.values():
        mine: list[list[Device]] = []
        for device in sorted(same, key=lambda d: -d.memory):
            if mine and mine[-1][0].memory <= device.memory * _SAME_MEMORY:
                mine[-1].append(device)
            else:
                mine.append([device])
        order = {device.name: place for place, device in enumerate(devices)}
        groups += [sorted(group, key=lambda d: order[d.name]) for group in mine]
    return groups


def kind_of(costs: CostGraph, group: Sequence[Device], memory: float) -> DeviceKind:
    """Devices that cost the same, with `memory` bytes each; transfers over the fastest of their links (`place` picks
    the devices)."""
    links = costs.links_into(group)
    return DeviceKind(
        name=group[0].kind,
        count=len(group),
        memory=float(memory),
        latency=min((link.latency for link in links), default=0.0) + ACTION_OVERHEAD,
        seconds_per_byte=1 / max((link.bandwidth for link in links), default=math.inf),
        reduce_seconds_per_byte=sync_seconds_per_byte(costs, group),
        all_reduce=_all_reduce(costs, group),
    )


def _all_reduce(costs: CostGraph, group: Sequence[Device]) -> tuple[float, ...]:
    """Seconds per byte among the first 1, 2, .. devices of `group` that are processes of a cluster."""
    if costs.cluster is None:
        return ()
    names = [device.name for device in group]
    counts = range(1, len(names) + 1)
    return tuple(
        costs.cluster.seconds("all_reduce", _BUCKET, names[:count], costs.lines(names[:count])) / _BUCKET
        for count in counts
    )


def place(
    costs: CostGraph,
    groups: Sequence[Sequence[Device]],
    atoms: Atoms,
    stages: Sequence[tuple[int, ...]],
    found: PartitionResult,
    chunks: int,
) -> tuple[tuple[str, ...], ...]:
    """Names of each stage's devices; with `chunks`, the stages of one round are repeated on the same devices.

    Where all links are alike, or devices are many, they are taken in the order in which they were given (a cluster's:
    node by node). Else, stage by stage, those to which what it receives travels fastest from the stages already placed,
    tried from several devices for the first stage; the seconds of all transfers of a micro-batch decide.
    """
    ranks = len(stages) // chunks
    solution, pools = found.solution, found.problem.pools
    kind_of = [pools[stage.kind] for stage in solution.stages[:ranks]]
    replicas = [stage.replicas for stage in solution.stages[:ranks]]
    if costs.one_link is not None or not costs.links or len(costs.devices) > _MOST_PLACED:
        free = [[d.name for d in group] for group in groups]
        alike: list[tuple[str, ...]] = []
        for kind, number in zip(kind_of, replicas, strict=True):
            alike.append(tuple(free[kind][:number]))
            del free[kind][:number]
        return tuple(alike) * chunks
    flows = _flows(atoms, stages, ranks)
    first = groups[kind_of[0]]
    starts = range(0, len(first), max(1, len(first) // _STARTS))
    tried = [_from(costs, groups, kind_of, replicas, flows, start) for start in starts]
    return min(tried, key=lambda found: found[0])[1] * chunks


def _from(
    costs: CostGraph,
    groups: Sequence[Sequence[Device]],
    kind_of: Sequence[int],
    replicas: Sequence[int],
    flows: Sequence[dict[int, float]],
    start: int,
) -> tuple[float, tuple[tuple[str, ...], ...]]:
    """Seconds of all transfers, and devices, if the first stage takes the device `start` of its kind first."""
    free = [[d.name for d in group] for group in groups]
    first = free[kind_of[0]]
    free[kind_of[0]] = first[start:] + first[:start]
    total, chosen = 0.0, list[tuple[str, ...]]()
    for rank, flow in enumerate(flows):
        mine = free[kind_of[rank]]
        # Replicas reduce their gradients among themselves: each costs as much as a message to those chosen before it.
        seconds = {
            name: float(
                sum(costs.links[other, name].seconds(n) for early, n in flow.items() for other in chosen[early])
            )
            for name in mine
        }
        names: list[str] = []
        for _ in range(replicas[rank]):
            name = min(mine, key=seconds.__getitem__)
            total += seconds[name]
            names.append(name)
            mine.remove(name)
            for other in mine:
                seconds[other] += costs.links[name, other].seconds(0.0)
        chosen.append(tuple(names))
    return total, tuple(chosen)


def _flows(atoms: Atoms, stages: Sequence[tuple[int, ...]], ranks: int) -> list[dict[int, float]]:
    """For every rank the bytes, both ways, between it and each earlier one."""
    rank_of = {atom: index % ranks for index, inside in enumerate(stages) for atom in inside}
    flows: list[dict[int, float]] = [{} for _ in range(ranks)]
    for value in atoms.values:
        source = rank_of[value.producer]
        for target in {rank_of[c] for c in value.consumers} - {source}:
            early, late = sorted((source, target))
            flows[late][early] = flows[late].get(early, 0.0) + value.nbytes + value.grad_nbytes
    return flows
