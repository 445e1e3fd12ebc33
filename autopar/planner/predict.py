"""What a plan costs, before it runs: stage times, transfers and memory from the cost graph.

The cost of an operator goes forward once:

    cost table --atom_times--> atoms --predicted_step--> stages --PredictedStep.timeline--> step --as_plan--> Plan

Plans of the search and plans of users go the same way: a stage is some of the atoms. A user's plan may put operators
anywhere; then each of its stages is one atom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import DeviceGroup
from autopar.costs.gradient_reduction import bucket_seconds, reduction_seconds
from autopar.costs.operator_cost import OperatorCost
from autopar.costs.python_overhead import NOT_MEASURED, one_worker_suffices
from autopar.costs.sends import Sent, estimated_sends, pass_seconds
from autopar.costs.shared_hardware import SHARED_GPU, hardware_of, shared_gpu_notes
from autopar.plan.plan import DROPPED, Plan
from autopar.plan.recompute import Recompute
from autopar.plan.scaling import notes_without_scale
from autopar.plan.stage import Stage, StageTransfer
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.atom_times import AtomTimes, atom_times, seconds_once
from autopar.planner.inter_op.atoms import Atoms, gather_all
from autopar.planner.inter_op.optimizer_seconds import optimizer_rates, optimizer_seconds, stepped, sum_of
from autopar.planner.predicted_step import ONE_WORKER, PredictedStage, PredictedStep, step_of_plan
from autopar.planner.rehearsed_memory import BY_FORMULA, Peaks, rehearsed
from autopar.planner.stage_contents import Traffic, stage_contents, stage_traffic, tied_gradients
from autopar.schedule.clock import Transfer
from autopar.schedule.micro_batches import split_sizes
from autopar.schedule.timeline import Timeline
from cost_models import Cluster


def predict(
    costs: CostGraph,
    plan: Plan,
    stage_of: Mapping[str, int],
    conditions: Conditions,
    configurations: tuple[str, ...] = (),
) -> Plan:
    """`plan` with its costs filled in, as if the search had found it; fields that are not costs stay.

    `stage_of`: node of the cost graph -> stage, as `plan.assign` returns it. Values must flow to later stages only.
    `configurations`: what each stage's costs are found by (`Arrangement.cost_names`). Without, sharded stages and what
    they send keep the plan's own costs: `costs` are those of whole operators.
    """
    atoms, arrangement = arranged(costs, plan, stage_of, configurations)
    step = predicted_step(costs, atoms, arrangement, conditions)
    peaks = rehearsed(costs, atoms, arrangement, conditions)
    priced = as_plan(costs, atoms, arrangement, step, step.timeline(), conditions.optimizer, peaks)
    shared = shared_gpu_notes([device.name for device in costs.devices], used=plan.used_devices)
    priced = replace(
        priced, split=plan.split, notes=(*_notes_of(plan), *peaks.notes, *shared, *step.notes), model=plan.model
    )
    if configurations or not any(stage.sharding for stage in plan.stages):
        return priced
    kept = _with_sharded(priced, plan)
    sharded_step = step_of_plan(kept, barrier=step.barrier) if len(kept.transfers) == len(priced.transfers) else None
    if sharded_step is None:
        return kept
    timeline = sharded_step.timeline()
    return replace(kept, predicted_step_time=timeline.step_time, bubble=timeline.bubble)


def _notes_of(plan: Plan) -> Iterator[str]:
    """The notes that stay when a plan is predicted anew."""
    notes = (note.removesuffix(DROPPED) for note in notes_without_scale(plan))
    return (note for note in notes if not note.startswith((BY_FORMULA, SHARED_GPU, ONE_WORKER)))


def arranged(
    costs: CostGraph, plan: Plan, stage_of: Mapping[str, int], configurations: tuple[str, ...] = ()
) -> tuple[Atoms, Arrangement]:
    """A user's plan in the planner's form: every stage is one atom. For the arguments see `predict`."""
    line: list[list[str]] = [[] for _ in plan.stages]
    for name, operator in costs.operators.items():
        if not operator.replicable:
            line[stage_of[name]].append(name)
    atoms = gather_all(costs, tuple(map(tuple, line)))
    arrangement = Arrangement(
        tuple((s,) for s in range(len(line))),
        tuple(
            tuple(map(costs.group, _replicas(stage, stage.shards if configurations else 1))) for stage in plan.stages
        ),
        min(plan.n_microbatches, max(costs.batch_size, 1)),
        plan.schedule,
        tuple(stage.mode for stage in plan.stages),
        configurations,
    )
    return atoms, arrangement


def _replicas(stage: Stage, width: int) -> Iterator[tuple[str, ...]]:
    """The devices of each replica of a stage."""
    for first in range(0, len(stage.devices), width):
        yield stage.devices[first : first + width]


def predict_plan(plan: Plan, example: Example, costs: CostGraph, conditions: Conditions) -> Plan:
    """`plan` for the example's call, on the devices of `costs`, with its costs filled in.

    Raises PlanError where the plan fits neither.
    """
    plan = completed(plan, example, costs)
    stage_of = {node.name: stage for node, stage in plan.assign(example.program, example.batching.storages).items()}
    return predict(costs, plan, stage_of, conditions)


def completed(plan: Plan, example: Example, costs: CostGraph) -> Plan:
    """`plan` on the devices of `costs`, with all operators of the example's call. Raises PlanError."""
    plan = plan.on([device.name for device in costs.devices], [device.kind for device in costs.devices])
    if example.batching.obstacle:
        plan = plan.with_decision("the batch of this model cannot be split", n_microbatches=1)
    return plan.listing(example.program, example.batching.storages)


def predicted_step(costs: CostGraph, atoms: Atoms, arrangement: Arrangement, conditions: Conditions) -> PredictedStep:
    """One step of the arrangement: what each stage takes for each micro-batch, holds, and sends."""
    m = arrangement.n_microbatches
    sizes, names = split_sizes(costs.batch_size, m), arrangement.cost_names
    shares = [size / costs.batch_size for size in sizes]
    split = arrangement.schedule == "zb-h1"
    times = {
        (name, size): atom_times(costs, atoms, name, arrangement.busy, size).under(arrangement.schedule)
        for name in dict.fromkeys(names)
        for size in set(sizes)
    }
    stages = []
    contents = stage_contents(atoms, arrangement, conditions.optimizer, costs.training)
    tied = tied_seconds(costs, atoms, arrangement)
    stepping = optimizer_seconds(costs, atoms, arrangement, conditions.optimizer)
    for number, content in enumerate(contents):
        inside, recompute = list(arrangement.stages[number]), Recompute(arrangement.recompute[number])
        mine = {size: times[names[number], size].running(recompute) for size in dict.fromkeys(sizes)}
        passes = {size: t.stage(inside, split=split) for size, t in mine.items()}
        forward, backward, weight = zip(*(passes[size] for size in sizes), strict=True)
        again: tuple[float, ...] = ()
        if recompute == Recompute.SELECTIVE or recompute.by_layer:
            longer = {size: t.stage(inside, split=split, recompute=recompute) for size, t in mine.items()}
            weight = tuple(longer[size].weight for size in sizes)
            again = tuple(longer[size].backward - passes[size].backward for size in sizes)
        stages.append(
            PredictedStage(
                forward,
                backward,
                weight,
                recompute,
                tied[number]
                + content.once
                + collectives_once(costs, content.gradients, arrangement, number, tuple(mine.values())),
                optimizer=stepping[number],
                sends_gradient=content.received_gradient > 0,
                memory=content.memory(atoms.of(names[number]), inside, recompute, shares),
                again=again,
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
        barrier=costs.training and not conditions.loss_inside,
        overhead=costs.python.alone if one_worker or arrangement.n_groups == 1 else costs.python.busy,
        handling=0.0 if costs.ranks is None else costs.ranks.handling,
        hardware=hardware_of(group.first for rank in arrangement.ranks for group in rank),
        one_worker=one_worker,
    )


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


def as_plan(
    costs: CostGraph,
    atoms: Atoms,
    arrangement: Arrangement,
    step: PredictedStep,
    timeline: Timeline,
    optimizer: str = "none",
    peaks: Peaks | None = None,
) -> Plan:
    """The arrangement as a plan, with what its step predicts. `optimizer`: as in the conditions of the step.
    `peaks`: as rehearsed."""
    stages = _plan_stages(costs, atoms, arrangement, step, timeline)
    stages = [
        stage if one is None else replace(stage, peak_memory=one.peak, activation_bytes=one.activation)
        for stage, one in zip(stages, peaks.stages if peaks else [None] * len(stages), strict=True)
    ]
    return Plan(
        stages=tuple(stages),
        n_microbatches=arrangement.n_microbatches,
        schedule=arrangement.schedule,
        batch_size=costs.batch_size,
        devices=tuple(device.name for device in costs.devices),
        device_kinds=tuple(device.kind for device in costs.devices),
        training=costs.training,
        predicted_step_time=timeline.step_time,
        single_device_time=_single_device_time(costs, atoms, optimizer),
        bubble=timeline.bubble,
        one_worker=step.one_worker,
        action_time=step.overhead if costs.python != NOT_MEASURED else None,
        message_time=step.handling or None,
        transfers=tuple(_plan_transfers(costs, atoms, arrangement, step)),
    )


def _plan_stages(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, step: PredictedStep, timeline: Timeline
) -> list[Stage]:
    """Times of a stage are those of a micro-batch of the mean size, without Python's overhead for an action."""
    peaks = timeline.peak_memory or ()
    stages = []
    for number, (name, predicted) in enumerate(zip(arrangement.cost_names, step.stages, strict=True)):
        inside, memory = list(arrangement.stages[number]), predicted.memory
        assert memory is not None, "a step that was predicted from costs knows its memory"
        rows = costs.batch_size / arrangement.n_microbatches
        each = atom_times(costs, atoms, name, arrangement.busy, rows).under(arrangement.schedule)
        each = each.running(predicted.recompute)
        mean, longer = (
            each.stage(inside, split=arrangement.schedule == "zb-h1", recompute=mode)
            for mode in (Recompute.NONE, predicted.recompute)
        )
        nodes = sorted((n for atom in inside for n in atoms.nodes[atom]), key=lambda n: costs.operators[n].position)
        configuration = costs.configuration.get(name)
        run_again = {n for n in nodes if _runs_again(costs.operators[n], predicted.recompute)}
        stages.append(
            Stage(
                devices=tuple(device for group in arrangement.groups[number] for device in group.devices),
                sharding=None if configuration is None else configuration.sharding(nodes, run_again),
                operators=tuple(costs.operators[n].key for n in nodes),
                recompute=predicted.recompute == Recompute.STAGE,
                layerwise=predicted.recompute.by_layer,
                keeps_products=predicted.recompute == Recompute.OPERATORS,
                selective=predicted.recompute == Recompute.SELECTIVE,
                recompute_time=(sum(predicted.again) / len(predicted.again)) if predicted.again else None,
                forward_time=mean.forward,
                backward_time=mean.backward,
                weight_time=longer.weight,
                parameter_bytes=memory.parameters,
                activation_bytes=memory.activation[0],
                peak_memory=max((peaks[slot] for slot in timeline.schedule.slots_of(number)), default=0),
                sync_time=predicted.once,
                optimizer_time=predicted.optimizer or None,
                hidden_time=each.hidden(inside) or None,
                gradient_bytes=memory.gradients,
                optimizer_bytes=memory.optimizer,
                transient_bytes=memory.transient,
                usable_memory=int(min(group.memory for group in arrangement.groups[number])),
            )
        )
    return stages


def _runs_again(operator: OperatorCost, recompute: Recompute) -> bool:
    """Whether an operator runs again for its own backward, or with its layer; not with the whole stage."""
    if recompute == Recompute.SELECTIVE:
        return operator.core is not None
    return recompute == Recompute.FULL and operator.block is not None


def _plan_transfers(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, step: PredictedStep
) -> list[StageTransfer]:
    """The transfers of the step, of one micro-batch."""
    m, traffic = arrangement.n_microbatches, _traffic(costs, atoms, arrangement)
    found = []
    for transfer in step.transfers:
        forward, backward = traffic[transfer.source, transfer.target].nbytes
        there, back = transfer.forward[0], transfer.backward[0]
        usual = back == (there if backward else 0.0)
        nbytes, seconds = (int(forward / m), int(backward / m)), (there + back, None if usual else back)
        ends = transfer.source, transfer.target
        found.append(StageTransfer(*ends, *nbytes, *seconds, blocking=not transfer.overlap))
    return found


def _transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[Transfer]:
    """On a cluster what goes at once shares cards; measured seconds are those of the slowest link between any two
    replicas. Meshes at hand send whole values: the first device joins them before, and cuts them after."""
    m, traffic = arrangement.n_microbatches, _traffic(costs, atoms, arrangement)
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


def _traffic(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], Traffic]:
    """What each pair of stages exchanges: in one process whole values, also between meshes."""
    return stage_traffic(atoms, arrangement if costs.shards is None else replace(arrangement, configurations=()))


def _joined(costs: CostGraph, ends: Sequence[DeviceGroup], nbytes: float) -> float:
    """Seconds in which meshes at hand join a value of `nbytes` that they send, and cut one that they receive."""
    if costs.shards is None or not nbytes:
        return 0.0
    meshes = [group.devices for group in ends if len(group.devices) > 1]
    return sum(costs.shards.cluster.seconds("all_gather", nbytes, devices) for devices in meshes)


Pair = tuple[int, int]  # of stages


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
    split = arrangement.schedule == "zb-h1"
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


def _single_device_time(costs: CostGraph, atoms: Atoms, optimizer: str) -> float:
    """Seconds of the plain model on the first device, the whole batch at once, with what the step of a plan has."""
    times = atom_times(costs, atoms, costs.devices[0].kind, 1, costs.batch_size)
    whole = times.stage(range(len(atoms.nodes)))
    rates = optimizer_rates(costs, costs.devices[0].kind, optimizer)
    shares = [one.share for one in stepped(costs, atoms, optimizer)]
    return whole.forward + whole.backward + (0.0 if rates is None else rates.seconds(sum_of(shares)))


def _with_sharded(priced: Plan, own: Plan) -> Plan:
    """`priced`, but sharded stages and what they send with the numbers of `own`, and without a step.

    Stages for which `own` has no numbers have none afterwards.
    """
    sharded = {number for number, stage in enumerate(own.stages) if stage.sharding is not None}
    stages = tuple(
        replace(own.stages[number], operators=stage.operators) if number in sharded else stage
        for number, stage in enumerate(priced.stages)
    )
    sent = {(link.source, link.target): link for link in own.transfers}
    links = [
        sent.get((link.source, link.target)) if {link.source, link.target} & sharded else link
        for link in priced.transfers
    ]
    transfers = tuple(link for link in links if link is not None)
    return replace(priced, stages=stages, transfers=transfers, predicted_step_time=None, bubble=None)
