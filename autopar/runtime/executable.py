"""A lowered plan bound to devices: every part (a stage on one of its devices) with its own view of the parameters.

A device is a slot of the schedule and has a worker; with an interleaved schedule it holds a part of several stages:

    stage      0       1       2       3          ranks 2, chunks 2
    device   cpu:0   cpu:1   cpu:0   cpu:1        slot 0 has the parts of stages 0 and 2, slot 1 those of 1 and 3

Each part computes on leaf tensors of its own, so that gradients of concurrent micro-batches never meet in one
`.grad`. On the parameter's own device a part's leaf shares the parameter's storage; elsewhere it is a copy that is
refreshed when the parameter has changed. Buffers that a stage writes (running statistics) belong to the stage's
first part; its other parts start every call from copies of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar import _torch
from autopar.capture import Program
from autopar.lower import Lowered, StageProgram, replica
from autopar.lower.random import keep_from_compiler
from autopar.operators import captured_device, compute_nodes, get_attribute
from autopar.runtime.threads import Worker
from autopar.schedule import Action, Schedule, chain, execute, make_schedule

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
    leaves: dict[int, nn.Parameter]  # id of the model's parameter -> this part's leaf
    buffers: dict[str, torch.Tensor]
    recompute: bool
    predicted_bytes: int | None  # the most that its device holds, by the plan
    versions: dict[int, int] = field(default_factory=dict)  # of parameters that live elsewhere, when last copied

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
        recompute: Sequence[bool] = (),
        predicted_bytes: Sequence[int | None] = (),
        compiled: bool | str = False,
        watch_nan: bool = False,
    ) -> None:
        """`workers[s]`: those that serve stage s. `lookup(name)`: the model's tensor of that name, as it is now.

        `chunks`: stages of each device; stages s and s + len(workers) / chunks have the same workers. `recompute`: for
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
        self._parts = [
            [
                self._part(stage, number, worker, captured, again[stage.index], held[stage.index])
                for number, worker in enumerate(mine)
            ]
            for stage, mine in zip(lowered.stages, workers, strict=True)
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
        captured: torch.device,
        recompute: bool,
        predicted_bytes: int | None,
    ) -> Part:
        device = worker.device.torch_device
        leaves: dict[int, nn.Parameter] = {}
        buffers: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        versions: dict[int, int] = {}
        for name in stage.parameters:
            tensor = self.tensor(name)
            if isinstance(tensor, nn.Parameter):
                if id(tensor) not in leaves:
                    leaves[id(tensor)] = nn.Parameter(tensor.detach().to(device), requires_grad=tensor.requires_grad)
                    versions[id(tensor)] = tensor._version
                tensors[name] = leaves[id(tensor)]
            else:
                own = number > 0 and name in stage.written_buffers
                buffers[name] = tensors[name] = tensor.detach().to(device, copy=own)
        module = replica(stage, tensors, device, captured)
        slot = self.workers.index(worker)
        compute: Callable[..., Any] = module.forward
        if self.compiled and not stage.hooked:  # hooks are to run, not to be traced
            keep_from_compiler(module)
            backend = "inductor" if self.compiled is True else self.compiled
            compute = _torch.compile_for_threads(module.forward, backend)
        return Part(slot, stage, number, worker, module, compute, leaves, buffers, recompute, predicted_bytes, versions)

    def refresh(self) -> None:
        """Bring every part up to date with the model's tensors (changed, moved or frozen since the last call)."""
        by_id = {id(p): p for p in self.parameters}
        for part in self.parts:
            for key, leaf in part.leaves.items():
                parameter = by_id[key]
                if leaf.requires_grad != parameter.requires_grad:
                    leaf.requires_grad_(parameter.requires_grad)
                if parameter.device == part.device:
                    if leaf.data_ptr() != parameter.data_ptr():
                        leaf.data = parameter.detach()
                elif part.versions[key] != parameter._version:
                    leaf.data.copy_(parameter.detach())
                    part.versions[key] = parameter._version
            for name, buffer in part.buffers.items():
                current = self.tensor(name)
                own = part.replica > 0 and name in part.stage.written_buffers
                if own or current.device != part.device:
                    buffer.copy_(current)
                elif buffer.data_ptr() != current.data_ptr():
                    buffer.data = current.detach()

    def collect_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients by id of the model's parameter, summed over the parts in their fixed order; parts are reset."""
        total: dict[int, torch.Tensor] = {}
        for part in self.parts:
            for key, leaf in part.leaves.items():
                gradient, leaf.grad = leaf.grad, None
                if gradient is None:
                    continue
                if key not in total:
                    total[key] = gradient
                elif gradient.is_sparse or total[key].is_sparse:
                    total[key] = total[key] + gradient.to(total[key].device)
                else:
                    total[key].add_(gradient.to(total[key].device))
        self.dirty = False
        return total

    def drop_gradients(self) -> None:
        for part in self.parts:
            for leaf in part.leaves.values():
                leaf.grad = None
