"""The step of an arrangement by the cost graph: what each stage computes, holds, sends and adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import bucket_seconds, reduction_seconds
from autopar.costs.python_overhead import NOT_MEASURED, one_worker_suffices
from autopar.costs.sends import Sent, estimated_sends, pass_seconds
from autopar.costs.shared_hardware import hardware_of
from autopar.plan.recompute import Recompute
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.atom_times import AtomTimes, atom_times, seconds_once
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.optimizer_seconds import stage_steps
from autopar.planner.predicted_step import PredictedStage, PredictedStep
from autopar.planner.stage_contents import Traffic, stage_contents, stage_traffic, tied_gradients
from autopar.schedule.builders import SPLIT_BACKWARD
from autopar.schedule.clock import Transfer
from autopar.schedule.micro_batches import split_sizes
from cost_models import Cluster

Pair = tuple[int, int]  # of stages


def predicted_step(costs: CostGraph, atoms: Atoms, arrangement: Arrangement, conditions: Conditions) -> PredictedStep:
    """One step of the arrangement: what each stage takes for each micro-batch, holds, and sends."""
    m = arrangement.n_microbatches
    sizes, names = split_sizes(costs.batch_size, m), arrangement.cost_names
    shares = [size / costs.batch_size for size in sizes]
    split = arrangement.schedule in SPLIT_BACKWARD
    times = {
        (name, size): atom_times(costs, atoms, name, arrangement.busy, size).under(arrangement.schedule)
        for name in dict.fromkeys(names)
        for size in set(sizes)
    }
    stages = []
    contents = stage_contents(atoms, arrangement, conditions.optimizer, costs.training)
    tied = tied_seconds(costs, atoms, arrangement)
    stepping = stage_steps(costs, atoms, arrangement, conditions.optimizer)
    whole = costs.whole_batch.get(arrangement.groups[-1][0].kind)
    on_whole_batch = 0 if whole is None else whole.nbytes + whole.outputs  # beside all activations in flight
    for number, content in enumerate(contents):
        inside, recompute = list(arrangement.stages[number]), Recompute(arrangement.recompute[number])
        mine = {size: times[names[number], size].running(recompute) for size in dict.fromkeys(sizes)}
        passes = {size: t.stage(inside, split=split) for size, t in mine.items()}
        forward, backward, weight = zip(*(passes[size] for size in sizes), strict=True)
        again: tuple[float, ...] = ()
        longer = passes
        if recompute == Recompute.SELECTIVE or recompute.by_layer:
            longer = {size: t.stage(inside, split=split, recompute=recompute) for size, t in mine.items()}
            weight = tuple(longer[size].weight for size in sizes)
            again = tuple(longer[size].backward - passes[size].backward for size in sizes)
        memory = content.memory(atoms.of(names[number]), inside, recompute, shares)
        beside = on_whole_batch if number == len(contents) - 1 else 0
        stages.append(
            PredictedStage(
                forward,
                backward,
                weight,
                recompute,
                tied[number]
                + content.once
                + collectives_once(costs, content.gradients, arrangement, number, tuple(mine.values())),
                optimizer=stepping[number].seconds,
                sends_gradient=content.received_gradient > 0,
                memory=replace(memory, step=stepping[number].held, transient=max(memory.transient, beside)),
                again=again,
                accumulation=min(t.not_accumulated(inside, longer[s], split=split) for s, t in mine.items()),
            )
        )
    one_worker = _one_worker(costs, atoms, arrangement)
    return PredictedStep(
        tuple(stages),
        tuple(_transfers(costs, atoms, arrangement)),
        arrangement.schedule,
        m,
        tuple(map(len, arrangement.ranks)),
        arrangement.chunks,
        costs.training,
        plain=arrangement.plain,
        barrier=_barrier(costs, arrangement, conditions),
        overhead=costs.python.alone if one_worker or arrangement.n_groups == 1 else costs.python.busy,
        handling=0.0 if costs.ranks is None else costs.ranks.handling,
        hardware=hardware_of(group.first for rank in arrangement.ranks for group in rank),
        one_worker=one_worker,
    )


def _barrier(costs: CostGraph, arrangement: Arrangement, conditions: Conditions) -> float | None:
    """`PredictedStep.barrier`. The model's outputs are on the device of the last stage, and so is what follows."""
    found = costs.whole_batch.get(arrangement.groups[-1][0].kind)
    if found is not None:
        return found.seconds
    return 0.0 if costs.training and not conditions.loss_inside else None


def _one_worker(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> bool:
    """Whether the runtime will have one of several workers do all actions, because their operators are tiny."""
    on_cpu = all(device.torch_device.type == "cpu" for device in costs.devices)
    if costs.python == NOT_MEASURED or not on_cpu or arrangement.n_groups == 1 or costs.ranks is not None:
        return False
    # On one busy device: where several are, what they wait for the interpreter counts in the seconds of operators.
    m, everything = arrangement.n_microbatches, range(len(atoms.nodes))
    each = atom_times(costs, atoms, costs.devices[0].kind, 1, costs.batch_size / m).stage(everything)
    phases, passes = (2, 3) if costs.training else (1, 1)
    operators = sum(map(len, atoms.nodes))
    return one_worker_suffices(
        m * (each.forward + each.backward), m * phases * len(arrangement.stages), m * passes * operators
    )


def _transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[Transfer]:
    """On a cluster what goes at once shares cards; measured seconds are those of the slowest link between any two
    replicas. Meshes at hand send whole values: the first device joins them before, and cuts them after."""
    m, traffic = arrangement.n_microbatches, traffic_of(costs, atoms, arrangement)
    if estimated_sends(costs.cluster):
        there, back = _over_networks(costs.cluster, arrangement, traffic)
        overlap = costs.overlap.sends
        return [Transfer(*pair, (there[pair],) * m, (back[pair],) * m, overlap=overlap) for pair in traffic]
    devices = [[group.first for group in groups] for groups in arrangement.groups]
    found = []
    for (source, target), sent in traffic.items():
        links = {costs.links[a, b] for a in devices[source] for b in devices[target] if a != b}
        groups = arrangement.groups[source], arrangement.groups[target]
        crowds = (1, 1) if costs.ranks is None else (costs.ranks.crowd(*groups), costs.ranks.crowd(*groups[::-1]))
        ends = [group[0] for group in groups]
        slowest = [
            max((link.seconds(crowd * n / m) for link in links if n), default=0.0) + _joined(costs, ends, n / m)
            for n, crowd in zip(sent.nbytes, crowds, strict=True)
        ]
        both = (slowest[0],) * m, (slowest[1],) * m
        found.append(Transfer(source, target, *both, overlap=costs.overlap.sends))
    return found


def traffic_of(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], Traffic]:
    """What each pair of stages exchanges: in one process whole values, also between meshes."""
    return stage_traffic(atoms, arrangement if costs.shards is None else replace(arrangement, configurations=()))


def _joined(costs: CostGraph, ends: Sequence[DeviceGroup], nbytes: float) -> float:
    """Seconds in which meshes at hand join a value of `nbytes` that they send, and cut one that they receive."""
    if costs.shards is None or not nbytes:
        return 0.0
    meshes = [group.devices for group in ends if len(group.devices) > 1]
    return sum(costs.shards.cluster.seconds("all_gather", nbytes, devices) for devices in meshes)


def _over_networks(
    cluster: Cluster, arrangement: Arrangement, traffic: Mapping[Pair, Traffic]
) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """Seconds of a micro-batch, forward and backward, by the two stages."""
    m, groups = arrangement.n_microbatches, arrangement.groups

    def seconds(sent: Mapping[Pair, Sequence[Sent]]) -> dict[Pair, float]:
        """Of each message; by stages that send and receive."""
        found = {}
        for sender in dict.fromkeys(sender for sender, _ in sent):
            values = {to: [v.per_micro_batch(m) for v in own] for (by, to), own in sent.items() if by == sender}
            known = pass_seconds(cluster, groups[sender], {to: groups[to] for to in values}, values, m)
            found.update({(sender, to): taken for to, taken in known.items()})
        return found

    there = seconds({pair: sent.forward for pair, sent in traffic.items()})
    back = seconds({(target, source): sent.backward for (source, target), sent in traffic.items()})
    return there, {(source, target): taken for (target, source), taken in back.items()}


def collectives_once(
    costs: CostGraph, gradients: float, arrangement: Arrangement, stage: int, times: Sequence[AtomTimes]
) -> float:
    """What a stage adds to a step once: collectives inside of its mesh, and `gradients` (bytes) added up over replicas.

    `times`: for each size of a micro-batch. Collectives behind kernels run behind the shortest passes.
    """
    inside, replicas = list(arrangement.stages[stage]), arrangement.groups[stage]
    split = arrangement.schedule in SPLIT_BACKWARD
    exposed, reduction = float(times[0].once[inside].sum()), reduction_seconds(costs, gradients, replicas)
    behind = times[0].behind(inside)
    if costs.overlap.gradients and reduction:
        bucket = behind.bucket + bucket_seconds(costs, replicas)
        behind = behind._replace(gradients=behind.gradients + reduction, bucket=bucket)
        reduction = 0.0
    if not (behind.gradients or behind.parameters):
        return exposed + reduction
    added = max(seconds_once(behind, t.stage(inside, split=split), t.network(inside), split=split) for t in times)
    return float(exposed + reduction + added)


def tied_seconds(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[float]:
    """Seconds of each stage once a step to add up the gradients of parameters that other stages have, too."""
    seconds = [0.0] * len(arrangement.stages)
    for holders, nbytes in tied_gradients(atoms, arrangement).items() if costs.training else ():
        groups = list(dict.fromkeys(arrangement.groups[stage][0] for stage in holders))
        for stage in holders:
            seconds[stage] += reduction_seconds(costs, nbytes, groups)
    return seconds
