"""What a plan costs, before it runs: stage times, transfers and memory from the cost graph.

The cost of an operator goes forward once:

    cost table --atom_times--> atoms --predicted_step--> stages --PredictedStep.timeline--> step --as_plan--> Plan

Plans of the search and plans of users go the same way: a stage is some of the atoms. A user's plan may put operators
anywhere; then each of its stages is one atom.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.python_overhead import NOT_MEASURED
from autopar.costs.shared_hardware import SHARED_GPU, shared_gpu_notes
from autopar.errors import PlanError
from autopar.plan.assignment import unknown_operators
from autopar.plan.plan import DROPPED, Plan, with_notes, with_unproven_split, with_whole_batch
from autopar.plan.recompute import Recompute
from autopar.plan.scaling import notes_without_scale
from autopar.plan.stage import Stage, StageTransfer
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.atom_times import atom_times
from autopar.planner.inter_op.atoms import Atoms, gather_all
from autopar.planner.inter_op.optimizer_seconds import optimizer_rates, stepped, sum_of
from autopar.planner.predicted_step import ONE_WORKER, PredictedStep, pass_fields, step_of_plan
from autopar.planner.priced_step import predicted_step, traffic_of
from autopar.planner.rehearsed_memory import BY_FORMULA, Peaks, rehearsed
from autopar.schedule.builders import SPLIT_BACKWARD
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
    atoms, arrangement = arranged(costs, plan, stage_of, configurations)
    step = predicted_step(costs, atoms, arrangement, conditions)
    peaks = rehearsed(costs, atoms, arrangement, conditions)
    priced = as_plan(costs, atoms, arrangement, step, step.one_copy().timeline(), conditions.optimizer, peaks)
    shared = shared_gpu_notes([device.name for device in costs.devices], used=plan.used_devices)
    priced = replace(
        priced, split=plan.split, notes=(*_notes_of(plan), *peaks.notes, *shared, *step.notes), model=plan.model
    )
    if configurations or not any(stage.sharding for stage in plan.stages):
        return priced
    kept = _with_sharded(priced, plan)
    sharded_step = step_of_plan(kept) if len(kept.transfers) == len(priced.transfers) else None
    if sharded_step is None:
        return kept
    timeline = sharded_step.one_copy().timeline()
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
    """`plan` on the devices of `costs`, with all operators of the example's call, and notes about operators that the
    call does not run and about a split that is not proven.

    Raises PlanError, also for more micro-batches than the batch makes.
    """
    plan = plan.on([device.name for device in costs.devices], [device.kind for device in costs.devices])
    batch, least = costs.batch_size, example.batching.least_rows
    plan = with_whole_batch(plan, example.batching.obstacle)
    if plan.n_microbatches > (most := len(split_sizes(batch, plan.n_microbatches, least))):
        needs = f", and the model needs at least {least} in a micro-batch" if least > 1 else ""
        raise PlanError(
            f"the plan has {plan.n_microbatches} micro-batches, but the batch has {batch} samples{needs}; give "
            f"n_microbatches={most} or fewer"
        )
    if example.program.training == plan.training:
        plan = with_notes(plan, unknown_operators([stage.operators for stage in plan.stages], example.program))
        shardings = [stage.sharding for stage in plan.stages]
        unknown_operators([[key for key, _ in one.strategies] if one else [] for one in shardings], example.program)
    return with_unproven_split(plan.listing(example.program, example.batching.storages), example.batching.unproven)


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
        barrier=costs.training and step.barrier is not None,
        whole_batch_time=step.barrier or None,
        action_time=step.overhead if costs.python != NOT_MEASURED else None,
        message_time=step.handling or None,
        transfers=tuple(_plan_transfers(costs, atoms, arrangement, step)),
    )


def _plan_stages(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, step: PredictedStep, timeline: Timeline
) -> list[Stage]:
    """Times of a stage are without Python's overhead for an action."""
    sizes = split_sizes(costs.batch_size, arrangement.n_microbatches)
    peaks = timeline.peak_memory or ()
    stages = []
    for number, (name, predicted) in enumerate(zip(arrangement.cost_names, step.stages, strict=True)):
        inside, memory = list(arrangement.stages[number]), predicted.memory
        assert memory is not None, "a step that was predicted from costs knows its memory"
        rows = costs.batch_size / arrangement.n_microbatches
        each = atom_times(costs, atoms, name, arrangement.busy, rows).under(arrangement.schedule)
        each, split = each.running(predicted.recompute), arrangement.schedule in SPLIT_BACKWARD
        nodes = sorted((n for atom in inside for n in atoms.nodes[atom]), key=lambda n: costs.operators[n].position)
        configuration = costs.configuration.get(name)
        run_again = {n for n in nodes if costs.operators[n].runs_again(predicted.recompute)}
        stages.append(
            Stage(
                devices=tuple(device for group in arrangement.groups[number] for device in group.devices),
                sharding=None if configuration is None else configuration.sharding(nodes, run_again),
                operators=tuple(costs.operators[n].key for n in nodes),
                recompute=predicted.recompute == Recompute.STAGE,
                layerwise=predicted.recompute.by_layer,
                keeps_products=predicted.recompute == Recompute.OPERATORS,
                selective=predicted.recompute == Recompute.SELECTIVE,
                **pass_fields(predicted, sizes),
                parameter_bytes=memory.parameters,
                activation_bytes=memory.activation[0],
                peak_memory=max((peaks[slot] for slot in timeline.schedule.slots_of(number)), default=0),
                sync_time=predicted.once,
                optimizer_time=predicted.optimizer or None,
                accumulation_time=predicted.accumulation or None,
                hidden_time=each.hidden(inside, split=split, recompute=predicted.recompute) or None,
                gradient_bytes=memory.gradients,
                optimizer_bytes=memory.optimizer,
                transient_bytes=memory.transient,
                step_bytes=memory.step or None,
                usable_memory=int(min(group.memory for group in arrangement.groups[number])),
            )
        )
    return stages


def _plan_transfers(
    costs: CostGraph, atoms: Atoms, arrangement: Arrangement, step: PredictedStep
) -> list[StageTransfer]:
    """The transfers of the step, of one micro-batch."""
    m, traffic = arrangement.n_microbatches, traffic_of(costs, atoms, arrangement)
    found = []
    for transfer in step.transfers:
        forward, backward = traffic[transfer.source, transfer.target].nbytes
        there, back = transfer.forward[0], transfer.backward[0]
        usual = back == (there if backward else 0.0)
        nbytes, seconds = (int(forward / m), int(backward / m)), (there + back, None if usual else back)
        ends = transfer.source, transfer.target
        found.append(StageTransfer(*ends, *nbytes, *seconds, blocking=not transfer.overlap))
    return found


def _single_device_time(costs: CostGraph, atoms: Atoms, optimizer: str) -> float:
    """Seconds of the plain model on the first device, the whole batch at once, with what the step of a plan has."""
    times = atom_times(costs, atoms, costs.devices[0].kind, 1, costs.batch_size)
    whole = times.stage(range(len(atoms.nodes)))
    rates = optimizer_rates(costs, costs.devices[0].kind, optimizer)
    shares = [one.share for one in stepped(costs, atoms, optimizer)]
    passes = whole.forward + whole.backward - times.not_accumulated(range(len(atoms.nodes)), whole, split=False)
    once = costs.whole_batch.get(costs.devices[0].kind)
    passes += 0.0 if once is None else once.seconds
    return passes + (0.0 if rates is None else rates.seconds(sum_of(shares)))


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
