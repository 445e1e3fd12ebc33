"""What a plan costs, before it runs: stage times, transfers and memory from the cost graph.

The cost of an operator goes forward once:

    cost table --atom_times--> atoms --predicted_step--> stages --PredictedStep.timeline--> step --as_plan--> Plan

Plans of the search and plans of users go the same way: a stage is some of the atoms. A user's plan may put operators
anywhere; then each of its stages is one atom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.gradient_reduction import reduction_seconds
from autopar.plan.plan import Plan, Stage, StageTransfer
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.atom_times import atom_times
from autopar.planner.inter_op.atoms import Atoms, gather_all
from autopar.planner.inter_op.optimizer_seconds import optimizer_rates, optimizer_seconds, stepped, sum_of
from autopar.planner.predicted_step import PredictedStage, PredictedStep, step_of_plan
from autopar.planner.stage_contents import stage_contents, stage_traffic, tied_gradients
from autopar.schedule.clock import Transfer
from autopar.schedule.micro_batches import split_sizes
from autopar.schedule.timeline import Timeline


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
    line: list[list[str]] = [[] for _ in plan.stages]
    for name, operator in costs.operators.items():
        if not operator.replicable:
            line[stage_of[name]].append(name)
    atoms = gather_all(costs, tuple(map(tuple, line)))
    group_of = {group.first: group for group in costs.groups}
    arrangement = Arrangement(
        tuple((s,) for s in range(len(line))),
        tuple(
            tuple(group_of[name] for name in stage.devices[:: stage.shards if configurations else 1])
            for stage in plan.stages
        ),
        min(plan.n_microbatches, max(costs.batch_size, 1)),
        plan.schedule,
        tuple(stage.recompute for stage in plan.stages),
        configurations,
    )
    step = predicted_step(costs, atoms, arrangement, conditions)
    priced = as_plan(costs, atoms, arrangement, step, step.timeline(), conditions.optimizer)
    priced = replace(priced, split=plan.split, notes=plan.notes, model=plan.model)
    if configurations or not any(stage.sharding for stage in plan.stages):
        return priced
    kept = _with_sharded(priced, plan)
    sharded_step = step_of_plan(kept, barrier=step.barrier) if len(kept.transfers) == len(priced.transfers) else None
    if sharded_step is None:
        return kept
    timeline = sharded_step.timeline()
    return replace(kept, predicted_step_time=timeline.step_time, bubble=timeline.bubble)


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
    times = {
        (name, size): atom_times(costs, atoms, name, arrangement.busy, size)
        for name in dict.fromkeys(names)
        for size in set(sizes)
    }
    stages = []
    contents = stage_contents(atoms, arrangement, conditions.optimizer, costs.training)
    tied = tied_seconds(costs, atoms, arrangement)
    stepping = optimizer_seconds(costs, atoms, arrangement, conditions.optimizer)
    split = arrangement.schedule == "zb-h1"
    for number, content in enumerate(contents):
        inside, recompute = list(arrangement.stages[number]), arrangement.recompute[number]
        mine = [times[names[number], size] for size in sizes]
        forward, backward, weight = zip(*(t.stage(inside, split=split) for t in mine), strict=True)
        stages.append(
            PredictedStage(
                forward,
                backward,
                weight,
                recompute,
                reduction_seconds(costs, content.gradients, arrangement.groups[number])
                + tied[number]
                + content.once
                + float(mine[0].once[inside].sum()),
                optimizer=stepping[number],
                sends_gradient=content.received_gradient > 0,
                memory=content.memory(atoms.of(names[number]), inside, recompute, shares),
            )
        )
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
    )


def as_plan(
    costs: CostGraph,
    atoms: Atoms,
    arrangement: Arrangement,
    step: PredictedStep,
    timeline: Timeline,
    optimizer: str = "none",
) -> Plan:
    """The arrangement as a plan, with what its step predicts. `optimizer`: as in the conditions of the step."""
    return Plan(
        stages=tuple(_plan_stages(costs, atoms, arrangement, step, timeline)),
        n_microbatches=arrangement.n_microbatches,
        schedule=arrangement.schedule,
        batch_size=costs.batch_size,
        devices=tuple(device.name for device in costs.devices),
        device_kinds=tuple(device.kind for device in costs.devices),
        training=costs.training,
        predicted_step_time=timeline.step_time,
        single_device_time=_single_device_time(costs, atoms, optimizer),
        bubble=timeline.bubble,
        transfers=tuple(_plan_transfers(costs, atoms, arrangement)),
    )


def _plan_stages(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, step: PredictedStep, timeline: Timeline
) -> list[Stage]:
    """Times of a stage are those of a micro-batch of the mean size, without Python's overhead."""
    peaks = timeline.peak_memory or ()
    stages = []
    for number, (name, predicted) in enumerate(zip(arrangement.cost_names, step.stages, strict=True)):
        inside, memory = list(arrangement.stages[number]), predicted.memory
        assert memory is not None, "a step that was predicted from costs knows its memory"
        each = atom_times(costs, atoms, name, arrangement.busy, costs.batch_size / arrangement.n_microbatches)
        mean = each.stage(inside, split=arrangement.schedule == "zb-h1")
        nodes = sorted((n for atom in inside for n in atoms.nodes[atom]), key=lambda n: costs.operators[n].position)
        configuration = costs.configuration.get(name)
        stages.append(
            Stage(
                devices=tuple(device for group in arrangement.groups[number] for device in group.devices),
                sharding=None if configuration is None else configuration.sharding(nodes),
                operators=tuple(costs.operators[n].key for n in nodes),
                recompute=predicted.recompute,
                forward_time=mean.forward,
                backward_time=mean.backward,
                weight_time=mean.weight,
                parameter_bytes=memory.parameters,
                activation_bytes=memory.activation[0],
                peak_memory=max((peaks[slot] for slot in timeline.schedule.slots_of(number)), default=0),
                sync_time=predicted.once,
                optimizer_time=predicted.optimizer or None,
            )
        )
    return stages


def _plan_transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[StageTransfer]:
    """Seconds are those over the link between the first replicas, both directions together."""
    m = arrangement.n_microbatches
    found = []
    for (source, target), (forward, backward) in stage_traffic(atoms, arrangement).items():
        ends = (arrangement.groups[source][0].first, arrangement.groups[target][0].first)
        seconds = 0.0  # within a device
        if ends[0] != ends[1]:
            link = costs.links[ends]
            seconds = sum(link.seconds(nbytes / m) for nbytes in (forward, backward) if nbytes)
        found.append(StageTransfer(source, target, int(forward / m), int(backward / m), seconds))
    return found


def _transfers(costs: CostGraph, atoms: Atoms, arrangement: Arrangement) -> list[Transfer]:
    """Seconds are those over the slowest link between any two replicas."""
    m = arrangement.n_microbatches
    devices = [[group.first for group in groups] for groups in arrangement.groups]
    found = []
    for (source, target), (forward, backward) in stage_traffic(atoms, arrangement).items():
        links = {costs.links[a, b] for a in devices[source] for b in devices[target] if a != b}
        slowest = [max((link.seconds(n / m) for link in links if n), default=0.0) for n in (forward, backward)]
        found.append(Transfer(source, target, (slowest[0],) * m, (slowest[1],) * m))
    return found


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
