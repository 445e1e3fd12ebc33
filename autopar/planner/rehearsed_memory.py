"""The peak of every device of an arrangement, from the rehearsed passes of its stages.

A slot does its actions one after the other, so what it holds follows from the order of its table, whatever each takes:

    parameters, buffers, optimizer state, the batch (1)         all the time
    F i      its highest, then what the forward keeps
    batch    on the device of the outputs the highest of what runs on the whole batch, if anything does
    B i      its highest, then less: activations go, gradients of parameters stay
    step     gradients and what the optimizer needs besides

    (1) of the model's inputs those that lie where the slot computes; of the others, forwards get copies

Copies between GPUs hold what they read for some more actions (`schedule/transit.py`). What waits between stages comes
on top (`waiting_messages.py`): at least what waits in every run, at the most what may wait in one, as other workers are
faster or slower. A plan states the most.

This is what `Stage.peak_memory` states, whether the search found the plan or somebody wrote it, and what the search
checks before it returns a plan. Not rehearsed are stages on meshes, as that takes each of their shards, and steps with
operators that need values or with thousands of replicas: for those it states the bytes of the search's formula
(`stage_contents.py`). Where the whole step cannot be rehearsed, the plan's notes say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.costs.cost_graph import CostGraph
from autopar.costs.operator_cost import Weight
from autopar.costs.step_rehearsal import HeldTensor, NotRehearsed, RehearsedStage, StepRehearsal
from autopar.lower.stages import Lowered
from autopar.plan.recompute import Recompute
from autopar.planner.arrangement import Arrangement, Conditions
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.waiting_messages import WaitingMessage, waiting
from autopar.schedule.builders import SPLIT_BACKWARD, make_schedule
from autopar.schedule.clock import Action, Phase
from autopar.schedule.micro_batches import split_sizes
from autopar.schedule.precedence import Precedence
from autopar.schedule.table import Schedule, phased
from autopar.schedule.transit import InTransit, in_transit
from cost_models.graphs import backward_starts
from cost_models.hardware.devices import gpu_of
from cost_models.memory.micro_batch_memory import MemoryChange, MicroBatchMemory, TensorSpec
from cost_models.memory.optimizer_step import Implementation, optimizer_step_temporaries
from cost_models.memory.training_memory import Precision

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INPUT)
_MOST_PAIRS = 50_000_000  # of an action and a slot: their order takes 4 bytes each


@dataclass(frozen=True)
class StagePeak:
    """Bytes on the fullest device of a stage. The peak of a run lies between `certain` and `peak`."""

    peak: int
    certain: int
    activation: int  # that a forward of the largest micro-batch leaves


class Peaks(NamedTuple):
    """What the devices of an arrangement hold."""

    stages: tuple[StagePeak | None, ...]  # None: that of the formula
    by_formula: str = ""  # why all of them are, if the step cannot be rehearsed

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan has to say about its memory."""
        return (f"{BY_FORMULA} {self.by_formula}",) if self.by_formula else ()


BY_FORMULA = "memory is estimated by the search's formula, because the step cannot be rehearsed:"


def rehearsed(costs: CostGraph, atoms: Atoms, arrangement: Arrangement, conditions: Conditions) -> Peaks:
    """For each stage the rehearsed peak of its devices; None for stages on meshes, and for all where costs have no
    program or the step cannot be rehearsed."""
    none = Peaks((None,) * len(arrangement.stages))
    left_out = [len(groups[0].devices) > 1 for groups in arrangement.groups]
    if costs.rehearsal is None or all(left_out):
        return none
    try:
        peaks = _Step(costs, costs.rehearsal, atoms, arrangement, conditions).peaks()
    except NotRehearsed as error:
        return none._replace(by_formula=str(error))
    return Peaks(tuple(None if left else peak for peak, left in zip(peaks, left_out, strict=True)))


class _Step:
    """One step of an arrangement."""

    def __init__(
        self,
        costs: CostGraph,
        rehearsal: StepRehearsal,
        atoms: Atoms,
        arrangement: Arrangement,
        conditions: Conditions,
    ) -> None:
        self._costs, self._rehearsal = costs, rehearsal
        self._arrangement, self._conditions = arrangement, conditions
        self._stage_of = {
            name: stage for stage, mine in enumerate(arrangement.stages) for atom in mine for name in atoms.nodes[atom]
        }
        self._sizes = split_sizes(costs.batch_size, arrangement.n_microbatches)
        self._kinds = [groups[0].kind for groups in arrangement.groups]
        self._weights = {key: one for cost in costs.operators.values() for key, one in cost.parameters.items()}

    def peaks(self) -> tuple[StagePeak, ...]:
        self._prepare()
        peaks = [self._slot_peak(slot) for slot in range(self._schedule.n_slots)]
        return tuple(
            StagePeak(
                max(peaks[slot][1] for slot in self._schedule.slots_of(stage)),
                max(peaks[slot][0] for slot in self._schedule.slots_of(stage)),
                self._memory(stage, 0).forward.left,
            )
            for stage in range(len(self._stages))
        )

    def _prepare(self) -> None:
        costs, arrangement, rehearsal = self._costs, self._arrangement, self._rehearsal
        lowered = rehearsal.lowered(self._stage_of, arrangement.recompute)
        n_stages = len(arrangement.stages)
        if len(lowered.stages) != n_stages:
            raise NotRehearsed(f"{n_stages} stages, but operators fill only {len(lowered.stages)}")
        self._lowered: Lowered = lowered
        self._stages: list[RehearsedStage] = [rehearsal.stage(lowered, index) for index in range(n_stages)]
        replicas = tuple(map(len, arrangement.ranks))
        m = arrangement.n_microbatches
        schedule = make_schedule(arrangement.schedule, m, replicas, chunks=arrangement.chunks, training=costs.training)
        self._barrier = costs.training and not self._conditions.loss_inside
        self._schedule: Schedule = phased(schedule) if self._barrier else schedule
        if sum(map(len, self._schedule.actions)) * self._schedule.n_slots > _MOST_PAIRS:
            raise NotRehearsed(f"{self._schedule.n_slots} slots are too many to tell which messages wait")
        groups = [group for rank in arrangement.ranks for group in rank]
        self._there = [rehearsal.there(group.first, group.kind) for group in groups]  # by slot
        self._passes: dict[tuple[int, int, frozenset[int]], MicroBatchMemory] = {
            (index, rows, there): rehearsal.passes(
                lowered,
                index,
                rows,
                self._kinds[index],
                there,
                recompute=arrangement.recompute[index] == Recompute.STAGE,
                several=arrangement.n_microbatches > 1,
                in_parts=arrangement.schedule in SPLIT_BACKWARD,
            )
            for index in range(n_stages)
            for rows in dict.fromkeys(self._sizes)
            for there in dict.fromkeys(self._there[slot] for slot in self._schedule.slots_of(index))
        }
        sources = [stage.sources for stage in lowered.stages]
        self._precedence = Precedence(self._schedule, sources, barrier=self._barrier)
        self._shared = rehearsal.device_types[self._kinds[0]] == "cpu"
        self._holders: dict[int, int] = {}  # storage -> the first stage that reads it
        for index, stage in enumerate(self._stages):
            for held in stage.held:
                self._holders.setdefault(held.storage, index)

    def _memory(self, stage: int, microbatch: int) -> MicroBatchMemory:
        """Of a micro-batch's passes, on the slot that runs them."""
        slot = self._schedule.slot_of(stage, microbatch)
        return self._passes[stage, self._sizes[microbatch], self._there[slot]]

    # -- one slot ---------------------------------------------------------------------------------------------------

    def _slot_peak(self, slot: int) -> tuple[int, int]:
        """(In every run at least, in any run at the most.)"""
        schedule = self._schedule
        stages = schedule.stages_of(slot)
        now = self._resident(slot, stages)
        certain = peak = now
        now += sum(self._memory(stage, 0).casts for stage in stages)  # to the end of all passes
        messages = waiting(slot, self._precedence, self._messages_of(slot), shared=self._shared)
        certain_transit, transit = self._in_transit(slot)
        last = len(self._stages) - 1
        started: set[tuple[int, Phase]] = set()  # what has run of the stages' backwards
        joined = backwards = False
        for number, action in enumerate(schedule.actions[slot]):
            if action.stage == last and not joined and action.phase is Phase.FORWARD:
                joined = True
                now += self._joined() if len(self._sizes) > 1 else 0  # one micro-batch's are the stage's own tensors
            if action.phase is not Phase.FORWARD and self._barrier and action.stage == last and not backwards:
                certain, peak = (max(highest, now + self._on_whole_batch()) for highest in (certain, peak))
                now += self._caller_gradients()
            backwards |= action.phase is not Phase.FORWARD and action.stage == last
            row = action.stage, action.phase
            change = self._change(action, first=row not in started)
            started.add(row)
            certain = max(certain, now + change.highest + messages.certain[number] + certain_transit[number])
            peak = max(peak, now + change.highest + messages.possible[number] + transit[number])
            now += change.left
        if not self._costs.training and last in stages:
            certain, peak = (max(highest, now + self._on_whole_batch()) for highest in (certain, peak))
        in_step = self._in_step(slot, stages)
        return max(certain, in_step), max(peak, in_step)

    def _change(self, action: Action, *, first: bool) -> MemoryChange:
        """`first`: no backward, or part of one, of the stage has run here."""
        memory = self._memory(action.stage, action.microbatch)
        if action.phase is Phase.FORWARD:
            return memory.forward
        parts = memory.first_backward if first else memory.backward
        if action.phase is not Phase.WEIGHT:
            return parts[0]
        return parts[1] if len(parts) > 1 else MemoryChange()  # code that runs uncaptured has whole backwards

    def _resident(self, slot: int, stages: Sequence[int]) -> int:
        """Parameters, buffers, the optimizer's state, and of the caller's batch what lies and is read here."""
        held = {one.storage: one for stage in stages for one in self._stages[stage].held}
        nbytes = sum(one.nbytes for one in held.values())
        if self._costs.training:
            nbytes += sum(self._wider(one) for one in held.values())
        nbytes += sum(int(self._weight(one).state(self._conditions.optimizer)) for one in self._updated(slot, stages))
        reads = {number: size for stage in stages for number, size in self._stages[stage].reads.items()}
        nbytes += sum(size for number, size in reads.items() if number in self._there[slot])
        of_each_size = {rows: microbatch for microbatch, rows in enumerate(self._sizes)}.values()
        nbytes += sum(self._memory(stage, microbatch).shared for stage in stages for microbatch in of_each_size)
        if len(self._stages) - 1 in stages and self._costs.training:
            nbytes += self._rehearsal.target_bytes
        return nbytes

    def _updated(self, slot: int, stages: Sequence[int]) -> list[HeldTensor]:
        """The parameters that an optimizer updates here: each on the first stage that reads it, on its first replica.
        The ranks of a cluster are processes, each with an optimizer of its own."""
        if not self._costs.training:
            return []
        found = {one.storage: (stage, one) for stage in reversed(stages) for one in self._stages[stage].held}
        return [
            one
            for storage, (stage, one) in found.items()
            if one.trained
            and (
                self._costs.cluster is not None
                or (self._holders[storage] in stages and slot == self._schedule.slots_of(stage)[0])
            )
        ]

    def _weight(self, one: HeldTensor) -> Weight:
        return self._weights.get(str(one.storage)) or Weight(one.nbytes, one.trained, one.shape)

    def _wider(self, one: HeldTensor) -> int:
        """Bytes of a gradient in a precision of its own beyond those of the gradient that a backward creates."""
        return max(0, int(self._weight(one).gradient) - one.nbytes) if one.trained else 0

    def _in_step(self, slot: int, stages: Sequence[int]) -> int:
        """Bytes at the optimizer's step, which finds the gradients of this slot, summed, and no activations."""
        if not self._costs.training or self._conditions.optimizer == "none":
            return 0
        updated = self._updated(slot, stages)
        gradients = sum(one.nbytes for one in updated)
        outputs = self._joined() if len(self._stages) - 1 in stages else 0
        return self._resident(slot, stages) + gradients + outputs + self._temporaries(updated)

    def _temporaries(self, updated: Sequence[HeldTensor]) -> int:
        costs, optimizer = self._costs, self._conditions.optimizer
        implementation: Implementation = "for-loop" if self._shared else "foreach"
        if costs.recipe is not None and costs.cluster is not None:
            implementation = costs.recipe.implementation(costs.cluster)
        if optimizer == "adafactor":  # torch's is not foreach by default: it saves memory
            implementation = "for-loop"
        groups: dict[Precision, list[tuple[int, ...]]] = defaultdict(list)
        for one in updated:
            own = one.itemsize
            groups[self._weight(one).precision or Precision(own, own, 0, own)].append(one.shape)
        needed = [
            optimizer_step_temporaries(optimizer, shapes, precision=precision, implementation=implementation)
            for precision, shapes in groups.items()
        ]
        return max(needed, default=0) if implementation == "for-loop" else sum(needed)

    # -- the whole batch --------------------------------------------------------------------------------------------

    def _joined(self) -> int:
        """Bytes of the model's outputs, joined from micro-batches, that the caller holds to the step's end."""
        if self._costs.training and self._rehearsal.loss_inside:
            return 0
        last = len(self._stages) - 1
        found = self._rehearsal.whole_outputs(self._lowered, self._sizes[0], self._kinds[last])
        return sum(spec.nbytes for spec in found)

    def _on_whole_batch(self) -> int:
        """Bytes of the end of the model, or of the loss, on the whole batch at the highest moment."""
        found = self._costs.whole_batch.get(self._kinds[-1])
        return 0 if found is None else found.nbytes

    def _caller_gradients(self) -> int:
        """Bytes of the gradients of the model's outputs, which the caller's loss or a tail has made."""
        last = len(self._stages) - 1
        found = self._rehearsal.whole_outputs(self._lowered, self._sizes[0], self._kinds[last])
        wanted = [spec for spec in found if spec.requires_grad]
        return sum(spec.nbytes for spec in backward_starts(wanted, all_outputs=self._rehearsal.has_tail))

    # -- copies -----------------------------------------------------------------------------------------------------

    def _in_transit(self, slot: int) -> tuple[list[int], list[int]]:
        """Bytes that copies under way hold during each action: those that other stages send and get; and with the
        copies of the call's inputs and targets, which may be there already. None on CPUs, and none on planned
        clusters, where this runtime does not run."""
        actions = self._schedule.actions[slot]
        if self._shared or self._costs.cluster is not None:
            return [0] * len(actions), [0] * len(actions)
        sent = list(self._sent_by(slot))
        inputs = [InTransit(self._input_bytes(action), action) for action in actions if action.phase is Phase.FORWARD]
        return in_transit(actions, sent), in_transit(actions, [*sent, *inputs])

    def _input_bytes(self, forward: Action) -> int:
        """Of the model's inputs, and the target, that an action gets as copies."""
        there = self._there[self._schedule.slot_of(forward.stage, forward.microbatch)]
        nbytes = sum(size for number, size in self._stages[forward.stage].reads.items() if number not in there)
        if forward.stage == len(self._stages) - 1 and self._rehearsal.loss_inside:
            nbytes += self._rehearsal.target_bytes
        return nbytes * self._sizes[forward.microbatch] // sum(self._sizes)

    def _sent_by(self, slot: int) -> Iterator[InTransit]:
        """What a slot sends to others, and takes over from them."""
        place = self._precedence.place
        gpus = [gpu_of(group.first) for rank in self._arrangement.ranks for group in rank]
        recompute = self._arrangement.recompute
        for message in self._messages_of(slot):
            forward, *backwards = (Action(phase, message.source, message.microbatch) for phase in _PHASES)
            source_back = next((action for action in backwards if action in place), None)
            target_back = next(
                (a for a in (Action(p, message.target, message.microbatch) for p in _PHASES[1:]) if a in place), None
            )
            arrives = Action(Phase.FORWARD, message.target, message.microbatch)
            if gpus[place[forward][0]] == gpus[place[arrives][0]]:
                continue  # passed on
            if message.sends:
                keeps = source_back is not None and recompute[message.source] != Recompute.STAGE
                yield InTransit(
                    message.nbytes, forward, self._last(message.source, message.microbatch) if keeps else forward
                )
                if source_back is not None:
                    yield InTransit(message.gradient, source_back)
            else:
                yield InTransit(message.nbytes, arrives)
                if target_back is not None:
                    yield InTransit(message.gradient, target_back, target_back)

    def _last(self, stage: int, microbatch: int) -> Action:
        """The action that frees what the forward of a stage has kept."""
        weights = Action(Phase.WEIGHT, stage, microbatch)
        whole = (Action(phase, stage, microbatch) for phase in (Phase.BACKWARD, Phase.INPUT))
        found = next(action for action in whole if action in self._precedence.place)
        in_one = len(self._memory(stage, microbatch).backward) == 1
        return weights if weights in self._precedence.place and not in_one else found

    # -- messages ---------------------------------------------------------------------------------------------------

    def _messages_of(self, slot: int) -> Iterator[WaitingMessage]:
        """What this slot and another exchange."""
        schedule = self._schedule
        for source, stage in enumerate(self._stages):
            for target, positions in stage.sends.items():
                for microbatch in range(len(self._sizes)):
                    sends = schedule.slot_of(source, microbatch) == slot
                    if sends == (schedule.slot_of(target, microbatch) == slot):
                        continue
                    memory = self._memory(source, microbatch)
                    sent = [memory.outputs[position] for position in positions]
                    tensors = [spec for spec in sent if isinstance(spec, TensorSpec)]
                    gradient = sum(spec.nbytes for spec in tensors if spec.requires_grad)
                    of_target = self._memory(target, microbatch)
                    yield WaitingMessage(
                        source,
                        target,
                        microbatch,
                        sends,
                        sum(spec.nbytes for spec in tensors),
                        gradient,
                        recomputed=self._arrangement.recompute[source] == Recompute.STAGE,
                        keeps_gradients=memory.keeps_gradients,
                        keeps_sent=min(gradient, of_target.keeps_sent),
                        in_one=(len(memory.backward) == 1, len(of_target.backward) == 1),
                    )
