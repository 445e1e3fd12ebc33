"""A lowered plan bound to devices: every part (a stage on one of its devices) with its own view of the parameters.

A device is a slot of the schedule and has a worker; with an interleaved schedule it holds a part of several stages:

    stage      0       1       2       3          ranks 2, chunks 2
    device   cpu:0   cpu:1   cpu:0   cpu:1        slot 0 has the parts of stages 0 and 2, slot 1 those of 1 and 3

Each part computes on leaf tensors of its own, so that gradients of concurrent micro-batches never meet in one
`.grad`. On the parameter's own device a part's leaf shares the parameter's storage; elsewhere it is a copy that is
refreshed when the parameter has changed. Buffers that a stage writes (running statistics) belong to the stage's
first part; its other parts start every call from copies of them. A sharded stage has a group of devices for every
replica, which one worker drives: that of the group's first device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.operators import captured_device, compute_nodes
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.lower.random_operators import keep_from_compiler
from autopar.lower.stages import Lowered, StageProgram, replica
from autopar.runtime.device_tensors import Buffer, Leaf, summed
from autopar.runtime.workers import Worker
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Action, chain, execute
from autopar.schedule.table import Schedule
from cost_models.graphs import get_attribute

# Seconds that Python and torch's dispatch take of an action and of each operator in it, whatever the operator computes
# (measured on one core of a server). Where actions take no more than twice that, threads wait for each other.
_PER_ACTION, _PER_OPERATOR, _TINY = 40e-6, 10e-6, 2.0


@dataclass
class Part:
    """A stage on one of its devices."""

    slot: int
    stage: StageProgram
    replica: int
    worker: Worker
    module: fx.GraphModule
    compute: Callable[..., tuple[Any, ...]]  # the module's code, without the overhead of hooks that it has not
    leaves: list[Leaf]
    buffers: list[Buffer]
    recompute: bool
    predicted_bytes: int | None  # the most that its device holds, by the plan

    @property
    def device(self) -> torch.device:
        return self.worker.device.torch_device

    @cached_property
    def in_context(self) -> bool:
        """Whether the stage is to know which micro-batch it computes."""
        return self.stage.random or self.stage.hooked or bool(self.stage.deferred)

    @cached_property
    def n_operators(self) -> int:
        return len(compute_nodes(self.stage.module.graph))


class Executable:
    """A program, split and placed, ready to run at any batch size."""

    def __init__(
        self,
        program: Program,
        lowered: Lowered,
        workers: Sequence[Sequence[Worker]],
        schedule: str,
        lookup: Callable[[str], torch.Tensor],
        *,
        chunks: int = 1,
        groups: Sequence[Sequence[Sequence[torch.device]]] = (),
        recompute: Sequence[bool] = (),
        predicted_bytes: Sequence[int | None] = (),
        compiled: bool | str = False,
        watch_nan: bool = False,
    ) -> None:
        """`workers[s]`: those that serve stage s. `lookup(name)`: the model's tensor of that name, as it is now.

        `chunks`: stages of each device; stages s and s + len(workers) / chunks have the same workers. `groups[s][r]`:
        the devices that worker r of stage s drives (default: its own). `recompute`: for
        each stage whether it runs its forward again for the backward (default: none does). `predicted_bytes`: for each
        stage the most that its devices hold. `compiled`: stages without hooks go through torch.compile, with the
        backend named or its default. `watch_nan`: every value that leaves a stage is looked at.
        """
        self.program = program
        self.lowered = lowered
        self.schedule = schedule
        self.n_stages = len(workers)
        self.watch_nan = watch_nan
        self.abandoned = False  # a worker may still be in an operator of a call that was interrupted
        self.dirty = False  # parts may have gradients that nobody has collected
        self.tiny = False  # operators take less time than what Python needs to call them
        self.compiled = compiled
        self._chunks = chunks
        self._ranks = [tuple(w) for w in workers[: len(workers) // chunks]]
        self.workers = [worker for rank in self._ranks for worker in rank]  # of each slot
        self._lookup = lookup
        again = recompute or [False] * len(workers)
        held = predicted_bytes or [None] * len(workers)
        names = {name for stage in lowered.stages for name in stage.parameters}
        self._constants: dict[str, Any] = {name: get_attribute(program.graph_module, name) for name in names}
        captured = captured_device(program)
        self.parameters = self._place(lowered, workers)
        alone = [[[worker.device.torch_device] for worker in mine] for mine in workers]
        self._parts = [
            [
                self._part(stage, number, worker, devices, captured, again[stage.index], held[stage.index])
                for number, (worker, devices) in enumerate(zip(mine, driven, strict=True))
            ]
            for stage, mine, driven in zip(lowered.stages, workers, groups or alone, strict=True)
        ]
        self.consumers = [
            tuple(t.index for t in lowered.stages if stage.index in t.sources) for stage in lowered.stages
        ]
        self.reads = {  # which outputs of the first stage the second reads
            (source, stage.index): tuple(place for s, place in stage.received if s == source)
            for stage in lowered.stages
            for source in stage.sources
        }
        self._tables: dict[tuple[int, bool], Schedule] = {}
        self._orders: dict[tuple[int, bool], list[tuple[int, Action]]] = {}
        self._shares: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def parts(self) -> list[Part]:
        """All of them, by stage and replica."""
        return [part for stage in self._parts for part in stage]

    def part(self, stage: int, microbatch: int) -> Part:
        """The one that runs a micro-batch."""
        replicas = self._parts[stage]
        return replicas[microbatch % len(replicas)]

    def table(self, n_microbatches: int, training: bool) -> Schedule:
        """The schedule's table of actions, one list a slot."""
        key = (n_microbatches, training)
        if key not in self._tables:
            replicas = [len(rank) for rank in self._ranks]
            self._tables[key] = make_schedule(
                self.schedule, n_microbatches, replicas, chunks=self._chunks, training=training
            )
        return self._tables[key]

    def order(self, n_microbatches: int, training: bool) -> list[tuple[int, Action]]:
        """The actions of all slots, each with its slot, in an order in which one worker can do them."""
        key = (n_microbatches, training)
        if key not in self._orders:
            tables = self.table(n_microbatches, training).actions
            events = execute(tables, lambda action: 1.0, chain(self.n_stages, n_microbatches)).events
            self._orders[key] = [(e.slot, e.action) for e in sorted(events, key=lambda e: e.start)]
        return self._orders[key]

    def note(self, seconds: float, n_microbatches: int, n_forwards: int, n_backwards: int) -> None:
        """CPU seconds that the workers took for a call: whether its actions are so small that one worker is enough.

        `n_forwards`, `n_backwards`: 1 or 0, whether every stage ran them for each micro-batch.
        """
        ways = n_forwards + n_backwards
        operators = sum(parts[0].n_operators for parts in self._parts) * (n_forwards + 2 * n_backwards)
        least = n_microbatches * (ways * self.n_stages * _PER_ACTION + operators * _PER_OPERATOR)
        self.tiny = seconds < _TINY * least and all(w.device.torch_device.type == "cpu" for w in self.workers)

    def share(self, samples: int, total: int, loss: torch.Tensor) -> torch.Tensor:
        """What a micro-batch's loss counts in the mean of the batch, where the loss is and of its dtype."""
        key = (samples, total, loss.dtype, loss.device)
        if key not in self._shares:
            self._shares[key] = torch.full_like(loss, samples / total)
        return self._shares[key]

    def tensor(self, name: str) -> torch.Tensor:
        """The model's tensor `name`, or a constant that the capture found in its code."""
        try:
            return self._lookup(name)
        except AttributeError:
            constant: torch.Tensor = self._constants[name]
            return constant

    def _place(self, lowered: Lowered, workers: Sequence[Sequence[Worker]]) -> list[nn.Parameter]:
        """Move every tensor to the first device of the first stage that reads it; all trained parameters, once."""
        found: dict[int, nn.Parameter] = {}
        for stage, mine in zip(lowered.stages, workers, strict=True):
            for name in stage.parameters:
                tensor = self.tensor(name)
                if id(tensor) in found:
                    continue
                device = mine[0].device.torch_device
                if tensor.device != device:
                    tensor.data = tensor.data.to(device)
                if isinstance(tensor, nn.Parameter):
                    found[id(tensor)] = tensor
        return list(found.values())

    def _part(
        self,
        stage: StageProgram,
        number: int,
        worker: Worker,
        devices: Sequence[torch.device],
        captured: torch.device,
        recompute: bool,
        predicted_bytes: int | None,
    ) -> Part:
        leaves: dict[tuple[int, int], Leaf] = {}  # by parameter and device: one that has two names has one leaf
        buffers: list[Buffer] = []
        tensors: dict[str, torch.Tensor] = {}
        for piece in stage.pieces:
            tensor, device = self.tensor(piece.name), devices[piece.device]
            if isinstance(tensor, nn.Parameter):
                leaf = leaves.setdefault((id(tensor), piece.device), Leaf.of(tensor, piece, device))
                tensors[piece.attribute] = leaf.tensor
            else:
                written = piece.name in stage.written_buffers
                buffers.append(Buffer.of(tensor, piece, device, written=written, first=number == 0))
                tensors[piece.attribute] = buffers[-1].tensor
        module = replica(stage, tensors, devices, captured)
        slot = self.workers.index(worker)
        compute: Callable[..., Any] = module.forward
        if self.compiled and not stage.hooked and stage.shards == 1:  # hooks are to run, not to be traced
            keep_from_compiler(module)
            backend = "inductor" if self.compiled is True else self.compiled
            compute = torch_private.compile_for_threads(module.forward, backend)
        return Part(
            slot, stage, number, worker, module, compute, list(leaves.values()), buffers, recompute, predicted_bytes
        )

    def refresh(self) -> None:
        """Bring every part up to date with the model's tensors (changed, moved or frozen since the last call)."""
        by_id = {id(p): p for p in self.parameters}
        for part in self.parts:
            for leaf in part.leaves:
                leaf.refresh(by_id[leaf.key])
            for buffer in part.buffers:
                buffer.refresh(self.tensor(buffer.piece.name))

    def write_back(self) -> None:
        """Bring the model's buffers up to date with what parts have written elsewhere."""
        for part in self.parts:
            for buffer in part.buffers:
                buffer.write_back(self.tensor(buffer.piece.name))

    def collect_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients by id of the model's parameter, summed over the parts in their fixed order; parts are reset."""
        by_id = {id(p): p for p in self.parameters}
        total = summed((leaf, by_id[leaf.key]) for part in self.parts for leaf in part.leaves)
        self.dirty = False  # not before: an interrupt may come in between
        return total

    def drop_gradients(self) -> None:
        for part in self.parts:
            for leaf in part.leaves:
                leaf.take_gradient()
