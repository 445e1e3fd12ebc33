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
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import Program
from autopar.lower import Lowered, StageProgram, replica
from autopar.operators import captured_device, get_attribute
from autopar.runtime.threads import Worker
from autopar.schedule import Schedule, make_schedule


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
    versions: dict[int, int] = field(default_factory=dict)  # of parameters that live elsewhere, when last copied

    @property
    def device(self) -> torch.device:
        return self.worker.device.torch_device


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
    ) -> None:
        """`workers[s]`: those that serve stage s. `lookup(name)`: the model's tensor of that name, as it is now.

        `chunks`: stages of each device; stages s and s + len(workers) / chunks have the same workers. `recompute`: for
        each stage whether it runs its forward again for the backward (default: none does).
        """
        self.program = program
        self.lowered = lowered
        self.schedule = schedule
        self.n_stages = len(workers)
        self._chunks = chunks
        self._ranks = [tuple(w) for w in workers[: len(workers) // chunks]]
        self.workers = [worker for rank in self._ranks for worker in rank]  # of each slot
        self._lookup = lookup
        again = recompute or [False] * len(workers)
        names = {name for stage in lowered.stages for name in stage.parameters}
        self._constants: dict[str, Any] = {name: get_attribute(program.graph_module, name) for name in names}
        captured = captured_device(program)
        self.parameters = self._place(lowered, workers)
        self._parts = [
            [self._part(stage, number, worker, captured, again[stage.index]) for number, worker in enumerate(mine)]
            for stage, mine in zip(lowered.stages, workers, strict=True)
        ]
        self.consumers = [
            tuple(t.index for t in lowered.stages if stage.index in t.sources) for stage in lowered.stages
        ]
        self._tables: dict[tuple[int, bool], Schedule] = {}

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

    def _part(self, stage: StageProgram, number: int, worker: Worker, captured: torch.device, recompute: bool) -> Part:
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
        return Part(slot, stage, number, worker, module, module.forward, leaves, buffers, recompute, versions)

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
        return total

    def drop_gradients(self) -> None:
        for part in self.parts:
            for leaf in part.leaves.values():
                leaf.grad = None
