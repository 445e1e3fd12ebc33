"""A lowered plan bound to devices: every replica of every stage, with its own leaves of the parameters.

A device is a slot of the schedule and has a worker. Under an interleaved schedule it runs several stages:

    stage      0       1       2       3          ranks 2, chunks 2
    device   cpu:0   cpu:1   cpu:0   cpu:1        slot 0 runs stages 0 and 2, slot 1 runs stages 1 and 3

Every replica computes on leaf tensors of its own, so that gradients of concurrent micro-batches never meet in one
`.grad` (device_tensors.py). Where a stage writes buffers (running statistics), its first replica writes those of the
model; the others start every call from copies. A sharded stage has one group of devices per replica; the worker of the
group's first device drives them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.direct_calls import with_direct_calls
from autopar.capture.program import Program
from autopar.costs.python_overhead import one_worker_suffices
from autopar.lower.rerun_groups import rerunning
from autopar.lower.stages import Constant, Lowered, StageProgram, replica
from autopar.runtime.stages.device_tensors import DeviceBuffer, ParameterLeaf, ParameterLeaves, accumulate, move
from autopar.runtime.stages.graphed_stage import GraphedStage
from autopar.runtime.stages.stage_code import (
    GRAPHS,
    CompiledStage,
    code_text,
    left_alone_because,
)
from autopar.runtime.stages.stage_replica import ReplicaAction, StagePlacement, StageReplica, Work, captured_code
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Action, Phase, chain, execute
from autopar.schedule.table import Schedule
from cost_models.graphs import get_attribute

SlotAction = tuple[int, Action]  # (slot, action)
WorkKey = tuple[int, bool, bool, bool]  # n_microbatches, training, only backwards, all of it by one worker

_MOST_LOSS_WEIGHTS = 256  # kept as tensors; losses that count targets have new ones in every step


class Executable:
    """A program, split and placed, ready to run at any batch size."""

    own_hooks: tuple[type, ...] = ()  # classes of hooks on parameters' gradients that are the runtime's, not the user's

    def __init__(
        self,
        program: Program,
        lowered: Lowered,
        placements: Sequence[StagePlacement],
        schedule: str,
        lookup: Callable[[str], torch.Tensor],
        *,
        chunks: int = 1,
        compiled: bool | str = False,
        watch_nan: bool = False,
    ) -> None:
        """`placements`: one per stage. `lookup(name)`: the model's current tensor of that name; AttributeError if it
        has none.

        `chunks`: stages per device; stages s and s + len(placements) / chunks have the same workers. `compiled`: how
        the code of stages runs (stage_code.py). `watch_nan`: check every value that leaves a stage.
        """
        self.program = program
        self.lowered = lowered
        self.n_stages = len(placements)
        self.watch_nan = watch_nan
        self.compiled = compiled
        self.left_alone: dict[int, str] = {}  # stage -> why it is neither compiled nor recorded
        self.compile_seconds = 0.0  # so far
        self._schedule = schedule
        self._chunks = chunks
        self._ranks = [placement.workers for placement in placements[: len(placements) // chunks]]
        self.workers = [worker for rank in self._ranks for worker in rank]  # one per slot
        self._lookup = lookup
        names = {name for stage in lowered.stages for name in stage.parameters}
        self._constants: dict[str, Any] = {}
        for name in names:
            with suppress(AttributeError):  # of the model's own module, whose tensor another rank has
                self._constants[name] = get_attribute(program.graph_module, name)
        captured = program.device
        self.parameters = self._move_tensors(placements)
        self._by_id = {id(p): p for p in self.parameters}
        self._replicas = [
            [self._replica(stage, placement, number, captured) for number in range(len(placement.workers))]
            for stage, placement in zip(lowered.stages, placements, strict=True)
        ]
        self.replicas = tuple(one for stage in self._replicas for one in stage)  # all of them, by stage and number
        self._leaves = ParameterLeaves((leaf for one in self.replicas for leaf in one.leaves), self._by_id)
        self.consumers = _consumers(lowered)
        self.reads = _reads(lowered)
        self._output = _single_output(program, lowered)  # of the last stage, where that is all that the model returns
        self._written_elsewhere: list[DeviceBuffer] = []  # since `refresh`: buffers that a stage writes in a copy
        self._in_use = False  # workers may be in the middle of an execution
        self._holds_gradients = False  # leaves may have gradients that were not collected
        places = {worker.device.torch_device for worker in self.workers}
        self._shares_one_gpu = len(places) == 1 and places.pop().type == "cuda"
        self._one_worker_suffices = False  # operators take less time than Python needs to call them
        self._tables: dict[tuple[int, bool], Schedule] = {}
        self._orders: dict[tuple[int, bool], list[SlotAction]] = {}
        self._work: dict[WorkKey, Work] = {}
        self._on_cpu = all(w.device.torch_device.type == "cpu" for w in self.workers)
        self._n_operators = sum(replicas[0].n_operators for replicas in self._replicas)
        self._loss_weights: dict[tuple[float, torch.dtype, torch.device], torch.Tensor] = {}

    def replica(self, stage: int, microbatch: int) -> StageReplica:
        """The replica of a stage that runs a micro-batch."""
        replicas = self._replicas[stage]
        return replicas[microbatch % len(replicas)] if len(replicas) > 1 else replicas[0]

    @property
    def output_device(self) -> torch.device:
        """Where outputs and losses are: on the device of the last stage, of its first replica if it has several."""
        return self._replicas[-1][0].device

    # -- actions ----------------------------------------------------------------------------------------------------

    def table(self, n_microbatches: int, training: bool) -> Schedule:
        """The schedule: a list of actions per slot."""
        key = (n_microbatches, training)
        if key not in self._tables:
            replicas = [len(rank) for rank in self._ranks]
            self._tables[key] = make_schedule(
                self._schedule, n_microbatches, replicas, chunks=self._chunks, training=training
            )
        return self._tables[key]

    def order(self, n_microbatches: int, training: bool) -> list[SlotAction]:
        """The actions of all slots in an order in which one worker can do them."""
        key = (n_microbatches, training)
        if key not in self._orders:
            tables = self.table(n_microbatches, training).actions
            events = execute(tables, lambda action: 1.0, chain(self.n_stages, n_microbatches)).events
            self._orders[key] = [(e.slot, e.action) for e in sorted(events, key=lambda e: e.start)]
        return self._orders[key]

    def work(self, n_microbatches: int, *, training: bool, only_backward: bool, every_worker: bool) -> Work:
        """The actions of one execution, by the worker that does them.

        Python runs one thread at a time: where all operators are tiny, threads only wait for each other. Then one
        worker does the actions of all slots, unless `every_worker` must do its own. So it does where all slots are on
        one GPU: their kernels run one after another on one stream, and threads would only compete for it.
        `only_backward`: without forwards.
        """
        tiny = self._on_cpu and (self._one_worker_suffices or len(self.workers) == 1) and not every_worker
        key = (n_microbatches, training, only_backward, self._shares_one_gpu or tiny)
        if key not in self._work:
            self._work[key] = self._new_work(*key)
        return self._work[key]

    def _new_work(self, n_microbatches: int, training: bool, only_backward: bool, by_one: bool) -> Work:
        if by_one:
            lists = [(self.workers[0], [action for _, action in self.order(n_microbatches, training)])]
        else:
            tables = self.table(n_microbatches, training).actions
            lists = [(worker, list(tables[slot])) for slot, worker in enumerate(self.workers)]
        return Work(
            tuple(
                (
                    worker,
                    tuple(
                        ReplicaAction(self.replica(action.stage, action.microbatch), action.phase, action.microbatch)
                        for action in actions
                        if not (only_backward and action.phase is Phase.FORWARD)
                    ),
                )
                for worker, actions in lists
            ),
            by_one and self._on_cpu,
        )

    @property
    def code_text(self) -> str:
        """How the code of stages runs; "" where nothing is compiled."""
        seconds = self.compile_seconds + sum(one.graphs.seconds for one in self.replicas if one.graphs is not None)
        return code_text(self.compiled, seconds, self.left_alone)

    # -- executions -------------------------------------------------------------------------------------------------

    @property
    def is_abandoned(self) -> bool:
        """Whether a worker may still be in an operator of an execution that was interrupted."""
        return self._in_use

    def start_execution(self, training: bool) -> None:
        """Workers are about to start. Until `end_execution`, an interrupt at any line leaves this abandoned."""
        if self._holds_gradients:
            self.drop_gradients()
        self._holds_gradients = training
        self._in_use = True

    def end_execution(self, all_workers_finished: bool) -> None:
        self._in_use = not all_workers_finished

    def compare_with_overhead(self, seconds: float, n_microbatches: int, forwards: bool, backwards: bool) -> None:
        """Decide whether actions are so small that one worker suffices for later executions.

        `seconds`: CPU time of all workers, for the forwards and/or backwards of all stages and micro-batches.
        """
        operators = self._n_operators * (forwards + 2 * backwards)
        actions = (forwards + backwards) * self.n_stages
        self._one_worker_suffices = self._on_cpu and one_worker_suffices(
            seconds, actions * n_microbatches, operators * n_microbatches
        )

    # -- tensors ----------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor:
        """The model's tensor `name`, or a constant that the capture found in its code."""
        try:
            return self._lookup(name)
        except AttributeError:
            constant: torch.Tensor = self._constants[name]
            return constant

    def model_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """The model's flat outputs, from the outputs of the last stage."""
        return [result.value if isinstance(result, Constant) else outputs[result] for result in self.lowered.results]

    def returned(self, outputs: Sequence[Any]) -> Any:
        """What the model returns, from the outputs of the last stage."""
        if self._output is not None:
            return outputs[self._output]
        flat = self.model_outputs(outputs)[: self.program.n_outputs]
        return torch_private.tree_unflatten(flat, self.program.out_spec)

    def loss_weight(self, weight: float, loss: torch.Tensor) -> torch.Tensor:
        """The weight of a micro-batch's loss in the loss of the batch, like `loss` in device and dtype."""
        if len(self._loss_weights) > _MOST_LOSS_WEIGHTS:
            self._loss_weights.clear()
        key = (weight, loss.dtype, loss.device)
        known = self._loss_weights.get(key)
        if known is None:
            self._loss_weights[key] = known = torch.full_like(loss, weight)
        return known

    def refresh(self) -> None:
        """Bring every replica up to date with the model's tensors (changed, moved or frozen since the last call)."""
        self._refresh_buffers()
        self._leaves.refresh()
        self._follow_moved_tensors()

    def _refresh_buffers(self) -> None:
        buffers = (buffer for one in self.replicas for buffer in one.buffers)
        self._written_elsewhere = [buffer for buffer in buffers if buffer.refresh(self.tensor(buffer.piece.name))]

    def _follow_moved_tensors(self) -> None:
        for one in self.replicas:
            if one.graphs is not None:
                one.graphs.follow()

    def write_back(self) -> None:
        """Bring the model's buffers up to date with what replicas have written elsewhere."""
        for buffer in self._written_elsewhere:
            buffer.write_back(self.tensor(buffer.piece.name))

    def collect_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients by id of the model's parameter, summed over the replicas in a fixed order; leaves lose theirs."""
        for one in self.replicas:
            if one.graphs is not None:
                one.graphs.give_gradients()
        total = self._leaves.take_gradients()
        self._holds_gradients = False  # not before the sum: an interrupt may leave some leaves with their gradients
        return total

    def accumulate_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """`collect_gradients`, added to the `.grad` of these of the model's parameters. No hooks run."""
        accumulate(parameters, self.collect_gradients())

    def drop_gradients(self) -> None:
        for one in self.replicas:
            if one.graphs is not None:
                one.graphs.drop_gradients()
        self._leaves.drop_gradients()

    # -- building ---------------------------------------------------------------------------------------------------

    def _move_tensors(self, placements: Sequence[StagePlacement]) -> list[nn.Parameter]:
        """Move every tensor to the first device of the first stage that reads it. Returns the parameters, each once."""
        parameters: dict[int, nn.Parameter] = {}
        for stage, placement in zip(self.lowered.stages, placements, strict=True):
            for name in stage.parameters:
                tensor = self.tensor(name)
                if id(tensor) in parameters:
                    continue
                move(tensor, placement.workers[0].device.torch_device)
                if isinstance(tensor, nn.Parameter):
                    parameters[id(tensor)] = tensor
        return list(parameters.values())

    def _replica(
        self, stage: StageProgram, placement: StagePlacement, number: int, captured: torch.device
    ) -> StageReplica:
        """Replica `number` of a stage. `captured`: the device of the program's constants."""
        worker, devices = placement.workers[number], placement.devices[number]
        leaves: dict[tuple[int, int], ParameterLeaf] = {}  # by parameter and device: tied names share one leaf
        buffers: list[DeviceBuffer] = []
        tensors: dict[str, torch.Tensor] = {}
        for piece in stage.pieces:
            tensor, device = self.tensor(piece.name), devices[piece.device]
            if isinstance(tensor, nn.Parameter):
                leaf = leaves.setdefault((id(tensor), piece.device), ParameterLeaf.of(tensor, piece, device))
                tensors[piece.attribute] = leaf.tensor
            else:
                written = piece.name in stage.written_buffers
                buffers.append(DeviceBuffer.of(tensor, piece, device, written=written, first_replica=number == 0))
                tensors[piece.attribute] = buffers[-1].tensor
        module = replica(stage, tensors, devices, captured)
        if stage.reruns:
            module = rerunning(module, {p.attribute for p in stage.pieces if p.name in stage.written_buffers})
        one = StageReplica(
            slot=self.workers.index(worker),
            stage=stage,
            worker=worker,
            module=module,
            compute=module.forward,
            leaves=list(leaves.values()),
            buffers=buffers,
            recompute=placement.recompute,
            predicted_bytes=placement.predicted_bytes,
            is_last=stage.index == len(self.lowered.stages) - 1,
        )
        self._code_of(one)
        return one

    def _code_of(self, one: StageReplica) -> None:
        """Have a replica compiled or recorded where that was requested and can be done."""
        why, name = left_alone_because(one.stage, self.compiled, recompute=one.recompute), f"stage {one.stage.index}"
        if why:
            self.left_alone[one.stage.index] = why
        if not self.compiled or why:
            one.compute = captured_code(one)
        elif self.compiled == GRAPHS:
            leaves, buffers = [leaf.tensor for leaf in one.leaves], [buffer.tensor for buffer in one.buffers]
            one.code = with_direct_calls(one.module)
            one.graphs = GraphedStage(one.code.forward, leaves, buffers, one.device, name)
            one.compute = one.graphs
        else:
            one.compute = CompiledStage(one.module, self.compiled, name)


def _consumers(lowered: Lowered) -> list[tuple[int, ...]]:
    """For each stage, the stages that read its outputs."""
    return [tuple(later.index for later in lowered.stages if s.index in later.sources) for s in lowered.stages]


def _single_output(program: Program, lowered: Lowered) -> int | None:
    """The output of the last stage that the model returns by itself; None if it returns something else."""
    first = lowered.results[0] if lowered.results else None
    return first if program.n_outputs == 1 and program.out_spec.is_leaf() and isinstance(first, int) else None


def _reads(lowered: Lowered) -> dict[tuple[int, int], tuple[int, ...]]:
    """(stage, a later stage) -> which outputs of the first the second reads."""
    return {
        (source, stage.index): tuple(position for s, position in stage.received if s == source)
        for stage in lowered.stages
        for source in stage.sources
    }
