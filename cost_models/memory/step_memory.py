"""What a training step has in memory, moment by moment, without running it.

The step runs on the meta device, where tensors have sizes and no memory: the forward operator by operator, the backward
by autograd itself, the step by the optimizer itself. `Allocations` records when each storage lives, and this module
counts the storages by their role:

```
    parameters   |############################|
    optimizer    |############################|   in the very first step, only from its end on
    gradients    |          ..################|   each from its creation on
    activations  |..##############..          |   kept for the backward, or by the caller
    transient    |.   .  .   . ..  .  . .   . |   results and gradients that only the next operators read
                  forward   | backward  | step
```

Not counted: what libraries allocate for their kernels (workspaces of cuBLAS, cuDNN and oneDNN). The copies that
convolutions make on a CPU are counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from cost_models.graphs import Loss, backward_starts, on_meta, private_copy, run_nodes, tensors_in
from cost_models.kernels.device_kernels import DeviceKernels
from cost_models.memory.allocations import Allocations
from cost_models.memory.convolution_copies import kernels
from cost_models.memory.optimizer_state import OPTIMIZER_KINDS, optimizer_state_elements
from cost_models.memory.recomputation import recomputing
from cost_models.memory.training_memory import FRAGMENTATION, Precision, TrainingMemory

BLOCK = {"cpu": 1, "cuda": 512}
"""By device type, what sizes are multiples of (kMinBlockSize in c10/cuda/CUDACachingAllocator.h)."""

_MOMENTS = ("forward", "backward", "step")

# Columns of tables, in the order of the fields of TrainingMemory.
_ROLES = 6
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _BUFFERS, _ACTIVATIONS, _TRANSIENT = range(_ROLES)


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device at the peak of each moment of a step."""

    forward: TrainingMemory  # the loss included
    backward: TrainingMemory
    step: TrainingMemory  # of the optimizer

    @property
    def moment(self) -> str:
        """The moment with the highest peak: "forward", "backward" or "step"."""
        return max(_MOMENTS, key=lambda moment: getattr(self, moment).total)

    @property
    def peak(self) -> TrainingMemory:
        """The bytes at the highest peak of the step."""
        highest: TrainingMemory = getattr(self, self.moment)
        return highest

    def __str__(self) -> str:
        names = [*(field.name for field in fields(TrainingMemory)), "total"]
        columns = [(*astuple(m), m.total) for m in (self.forward, self.backward, self.step)]
        lines = ["MB".ljust(12) + "".join(name.rjust(12) for name in _MOMENTS)]
        for name, *values in zip(names, *columns, strict=True):
            lines.append(name.ljust(12) + "".join(f"{value / 1e6:12.1f}" for value in values))
        return "\n".join(lines)


def step_memory(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    loss: Loss | None = None,
    all_outputs: bool = False,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    zero: int = 0,
    replicas: int = 1,
    recompute: Iterable[Collection[str]] = (),
    first: bool = False,
    accumulate: bool = False,
    device_type: str = "cpu",
) -> StepMemory:
    """Bytes in use in a training step of a flat graph, on each of `replicas` devices.

    `inputs`: the flat inputs, of whose tensors sizes, strides and dtypes matter; they count as activations. The step:

        outputs = module(*inputs); loss(outputs).backward(); optimizer.step()

    starts without gradients and holds `outputs` until it ends. `loss` is called with meta tensors; without it, the
    backward starts from all scalar outputs, or from all outputs if none is a scalar or with `all_outputs`.
    `optimizer`: "none", or a name of `OPTIMIZER_KINDS`, with torch's defaults: it updates the parameters one by one on
    a CPU, and all at once on CUDA.
    `precision`: of parameters, gradients and states; None: as in the graph. Activations have the graph's dtypes.
    `zero`: the stage of ZeRO, see `training_memory`.
    `recompute`: groups of operators (names of nodes, see `nodes_inside`) that keep only their inputs and run again
    for their backward, each group at once.
    `first`: the very first step, which creates the optimizer's states. `accumulate`: the gradients exist before.

    Takes O(operators), about a millisecond each.

    Raises:
        ValueError: an unknown optimizer, stage or device type, no replicas, groups to recompute that are unknown or
            cannot run at once, or nothing to train.
    """
    if zero not in range(4) or replicas < 1:
        raise ValueError(f"ZeRO has stages 0 to 3 over one or more replicas, not stage {zero} over {replicas}")
    if device_type not in BLOCK:
        raise ValueError(f"unknown device type {device_type!r}; known are {', '.join(BLOCK)}")
    optimizer_state_elements(optimizer, ())  # raises for one that is unknown
    rehearsal = _Rehearsal(module, inputs, recompute, accumulate, device_type)
    rehearsal.forward_and_backward(loss, all_outputs)
    rehearsal.step(optimizer)
    course = rehearsal.course(precision)
    in_use = course.in_use(first)
    peaks = []
    for moment, start, end in zip(_MOMENTS, course.ends[:-1], course.ends[1:], strict=True):
        parts = _per_replica(in_use[start - 1 : end], moment, course, zero, replicas)
        peak = [math.ceil(nbytes) for nbytes in parts[parts.sum(axis=1).argmax()]]
        reserve = math.ceil(sum(peak) * FRAGMENTATION[device_type])
        parameters, gradients, optimizer_states, held_buffers, activations, transient = peak
        peaks.append(
            TrainingMemory(parameters, gradients, optimizer_states, held_buffers, activations, transient, reserve)
        )
    return StepMemory(*peaks)


def _per_replica(in_use: np.ndarray, moment: str, course: _Course, zero: int, replicas: int) -> np.ndarray:
    """[events, roles] bytes on one replica, of those `in_use` without replicas during `moment`.

    A replica holds its share of what the stage of ZeRO cuts, and for a while the whole of one operator's parameters
    (stage 3) and of one gradient that is not yet summed over the replicas (stages 2 and 3).
    """
    shares = np.ones(_ROLES)
    for stage, role in ((1, _OPTIMIZER), (2, _GRADIENTS), (3, _PARAMETERS)):
        shares[role] = 1 / replicas if zero >= stage else 1
    whole = 0.0
    if moment == "step":
        shares[_TRANSIENT] = 1 / replicas if zero else 1  # each replica updates its share
    else:
        gradient = course.largest_gradient if moment == "backward" and zero >= 2 else 0
        whole = (gradient + (course.largest_read if zero == 3 else 0)) * (1 - 1 / replicas)
    parts = in_use * shares
    parts[:, _TRANSIENT] += whole
    return np.asarray(parts)


@dataclass(frozen=True)
class _Course:
    """What a step allocated. An event is `index` when the storage of that index appears, `~index` when it is freed."""

    sizes: np.ndarray  # [storages] bytes
    roles: np.ndarray  # [storages]
    events: np.ndarray  # [events]
    ends: Sequence[int]  # events before the forward, until its end, until the backward's end, until the step's end
    masters: int  # bytes of the copies of parameters that the optimizer updates
    largest_gradient: float  # bytes
    largest_read: float  # bytes of parameters that one operator reads

    def in_use(self, first: bool) -> np.ndarray:
        """[events, roles] bytes after every event; states exist from the start except in the `first` step."""
        places = np.where(self.events < 0, ~self.events, self.events)
        changes = np.zeros((len(places), _ROLES))
        changes[np.arange(len(places)), self.roles[places]] = self.sizes[places] * np.where(self.events < 0, -1, 1)
        in_use = changes.cumsum(axis=0)
        if not first:
            in_use[:, _OPTIMIZER] = self.sizes[self.roles == _OPTIMIZER].sum()
        in_use[:, _OPTIMIZER] += self.masters
        return in_use


class _Rehearsal:
    """A step on the meta device."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        recompute: Iterable[Collection[str]],
        accumulate: bool,
        device_type: str,
    ) -> None:
        own = private_copy(module, torch.device("meta"))
        if not accumulate:
            own.zero_grad(set_to_none=True)
        self.device_type = device_type
        self.own, self.graph = own, recomputing(own, recompute, self._contexts)
        self.inputs = [on_meta(x) for x in inputs]
        self.parameters = list(own.parameters())
        self.buffers = list(own.buffers())
        self.states: list[torch.Tensor] = []
        self.kept: list[int] = []  # storages alive after the forward
        copies = partial(kernels, threads=torch.get_num_threads()) if device_type == "cpu" else None
        self.allocations = Allocations(BLOCK[device_type], convolutions=copies)
        for tensors in (self.parameters, self.buffers, tensors_in(self.inputs), self.gradients):
            self.allocations.record(tensors)
        self.ends = [len(self.allocations.events)]

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the first run and of the second run, in the backward, where torch drops function modes."""
        return nullcontext(), DeviceKernels(self.device_type)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.grad is not None]

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def forward_and_backward(self, loss: Loss | None, all_outputs: bool) -> None:
        with torch.enable_grad(), DeviceKernels(self.device_type), self.allocations:
            self.outputs = run_nodes(self.graph, self.inputs)  # the caller holds them
            roots = _roots(self.outputs, all_outputs) if loss is None else [loss(self.outputs)]
            self.kept = self.allocations.living()
            self.ends.append(len(self.allocations.events))
            self.allocations.in_backward = True
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            self.allocations.in_backward = False
        self.ends.append(len(self.allocations.events))

    def step(self, optimizer: str) -> None:
        if optimizer != "none":
            foreach = (
                self.device_type == "cuda" and optimizer != "adafactor"
            )  # torch's Adafactor is not foreach by default: it saves memory
            with self.allocations:
                kind = OPTIMIZER_KINDS[optimizer]
                steps = kind.maker(self.trained, lr=1e-3, foreach=foreach, **kind.settings)  # type: ignore[call-arg]
                steps.step()
            states = tensors_in([list(state.values()) for state in steps.state.values()])
            self.states = [state for state in states if state.is_meta]  # counters of steps are on the CPU
        self.ends.append(len(self.allocations.events))

    def course(self, precision: Precision | None) -> _Course:
        allocated = self.allocations
        sizes = np.array(allocated.nbytes, dtype=float)
        roles = np.full(len(sizes), _TRANSIENT)
        roles[[*self.kept, *allocated.recomputed]] = _ACTIVATIONS
        roles[allocated.record(tensors_in(self.inputs))] = _ACTIVATIONS
        roles[allocated.record(self.buffers)] = _BUFFERS
        masters, each = 0, {}
        if precision is not None:
            each = {_PARAMETERS: precision.parameter, _GRADIENTS: precision.gradient, _OPTIMIZER: precision.state}
            masters = precision.master * sum(p.numel() for p in self.trained)
            updated = (precision.master or precision.parameter) / max(p.element_size() for p in self.parameters)
            sizes[[place for place in allocated.events[self.ends[2] : self.ends[3]] if place >= 0]] *= updated
        for role, tensors in ((_PARAMETERS, self.parameters), (_GRADIENTS, self.gradients), (_OPTIMIZER, self.states)):
            for place, tensor in zip(allocated.record(tensors), tensors, strict=True):
                roles[place] = role
                if role in each:
                    sizes[place] = allocated.nbytes[place] // tensor.element_size() * each[role]
        return _Course(
            sizes,
            roles,
            np.array(allocated.events[: self.ends[-1]]),
            self.ends,
            masters,
            largest_gradient=max(sizes[roles == _GRADIENTS], default=0),
            largest_read=max((sizes[places].sum() for places in self._read()), default=0),
        )

    def _read(self) -> list[list[int]]:
        """For every operator, the storages (indices) of the parameters that it reads."""
        own = dict(self.own.named_parameters(remove_duplicate=False))
        read = []
        for node in self.own.graph.nodes:
            names = [str(x.target) for x in node.all_input_nodes if x.op == "get_attr"]
            if node.op == "call_module":
                names += [name for name in own if name.startswith(f"{node.target}.")]
            read.append(sorted(set(self.allocations.record(own[name] for name in names if name in own))))
        return read


def _roots(outputs: tuple[Any, ...], all_outputs: bool) -> list[torch.Tensor]:
    """Where a backward without a loss starts."""
    differentiable = [t for t in tensors_in(outputs) if t.requires_grad]
    if not differentiable:
        raise ValueError("no output of the graph requires a gradient: there is nothing to train")
    return backward_starts(differentiable, all_outputs=all_outputs)
