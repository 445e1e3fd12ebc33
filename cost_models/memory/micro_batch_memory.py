r"""What the passes of one micro-batch add to the memory of a device, without running them.

A graph runs on the meta device as a worker of a pipeline runs its stage: its forward keeps the inputs and outputs, its
backward starts from gradients of the outputs that another device has sent, and leaves gradients of the inputs and of
the parameters. `Allocations` records when each storage lives. Every pass is described by two numbers relative to the
bytes before it, so that the passes of many micro-batches add up in any order:

```
    bytes |          __ highest
          |    /\  /    \___ left
          |___/  \/          (below 0 where a backward frees more than it leaves)
          +---------------- time of one pass
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from cost_models.graphs import Loss, private_copy, run_nodes, tensors_in
from cost_models.kernels.autocast_casts import AutocastCasts
from cost_models.kernels.device_kernels import DeviceKernels
from cost_models.memory.allocations import Allocations, Convolutions
from cost_models.memory.convolution_copies import kernels
from cost_models.memory.saved_tensors import hooked
from cost_models.memory.step_memory import BLOCK

META = torch.device("meta")

SplitBackward = Callable[[list[tuple[torch.Tensor, torch.Tensor]], list[torch.Tensor]], tuple[Any, Any]]
"""A backward in two parts: (roots with their gradients, inputs) -> gradients of the inputs, the rest with `run()`."""

Reruns = Callable[[fx.GraphModule, Callable[[], AbstractContextManager[Any]]], fx.GraphModule]
"""The same code with groups of operators that run again in the backward, each time in a context."""

Shared = tuple[fx.GraphModule, Sequence[int]]
"""A graph and the sizes that it takes: it computes tensors that all micro-batches of these sizes share."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """Such a tensor on the meta device, a leaf with a storage of its own."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)
        return made.requires_grad_(self.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True)
class MemoryChange:
    """Bytes during a pass, relative to those before it."""

    highest: int = 0  # at the most; never below 0
    left: int = 0  # after it; below 0 where it frees more than it leaves


@dataclass(frozen=True)
class MicroBatchMemory:
    """The passes of a micro-batch. Its backward comes whole, or as an input part and a weight part."""

    forward: MemoryChange
    first_backward: tuple[MemoryChange, ...]  # by part; creates gradients of parameters
    backward: tuple[MemoryChange, ...]  # by part; adds to them
    outputs: tuple[Any, ...]  # of the graph: a TensorSpec for each tensor
    input_gradients: int  # bytes that the backward leaves for the devices that sent the inputs
    keeps_gradients: bool = False  # the weight part needs gradients that the input part has received
    keeps_sent: int = 0  # bytes of `input_gradients` that the weight part needs, too
    casts: int = 0  # bytes of parameters cast by autocast, from the first forward to the end of all passes
    shared: int = 0  # bytes of inputs that all micro-batches of this size share, in all steps


@dataclass(frozen=True)
class PassConditions:
    """How a graph runs.

    `inputs`: a TensorSpec for each tensor; other values as they are. `held`: which of them are there in any case,
    because they are views of the caller's batch, which is not counted here. `start`: where a backward starts: at
    gradients of the outputs that come from another device; at the caller's, which are not counted: of losses alone, or
    of all outputs if a tail follows; or at the loss.
    Every output that requires a gradient is taken to receive one: what later stages merely pass on to the caller, such
    as keys and values for generation, counts too much.
    """

    inputs: tuple[Any, ...]
    held: frozenset[int] = frozenset()
    start: Literal["received", "caller", "tail", "loss"] = "received"
    loss: Loss | None = None  # of the graph's outputs, on tensors that are not counted
    known: tuple[torch.Tensor, ...] = ()  # those tensors
    recompute: bool = False
    training: bool = True
    device_type: str = "cpu"
    threads: int = 2  # of operators on a CPU
    autocast: torch.dtype | None = None  # that the passes run under; None: off
    autocast_cache: bool = True  # casts of parameters are kept for all micro-batches of a step


_BY_CALLER = ("caller", "tail")  # starts of a backward whose gradients are not counted


def micro_batch_memory(
    module: fx.GraphModule,
    passes: PassConditions,
    *,
    several: bool = True,
    split: SplitBackward | None = None,
    reruns: Reruns | None = None,
    shared: Shared | None = None,
    workspaces: Convolutions | None = None,
) -> MicroBatchMemory:
    """The memory of a micro-batch's passes through a flat graph. About half a millisecond an operator and pass.

    `several`: micro-batches come one after the other; else only the first is rehearsed. `split`: the backward comes in
    two parts. `reruns`: what of the graph runs again for its backward. `shared`: makes what the graph takes before its
    inputs. `workspaces`: of convolutions on a GPU; None: they are not counted. Buffers and parameters are not counted,
    gradients of parameters are.

    Raises:
        ValueError: an unknown device type.
        RuntimeError, NotImplementedError: an operator that needs the values of tensors.
    """
    if passes.device_type not in BLOCK:
        raise ValueError(f"unknown device type {passes.device_type!r}; known are {', '.join(BLOCK)}")
    caller_keeps = passes.start in _BY_CALLER and not several
    rehearsal = _Rehearsal(module, passes, split, reruns, shared, caller_keeps, workspaces)
    forward = rehearsal.forward()
    if not passes.training:
        return MicroBatchMemory(forward, (), (), rehearsal.outputs, 0, casts=rehearsal.casts, shared=rehearsal.shared)
    first = later = rehearsal.backward()
    if several:
        rehearsal.forward()
        later = rehearsal.backward()
    sent, keeps = rehearsal.input_gradients, rehearsal.keeps_gradients
    known = rehearsal.keeps_sent, rehearsal.casts, rehearsal.shared
    return MicroBatchMemory(forward, first, later, rehearsal.outputs, sent, keeps, *known)


class _Rehearsal:
    """The passes of one micro-batch after the other."""

    def __init__(
        self,
        module: fx.GraphModule,
        passes: PassConditions,
        split: SplitBackward | None,
        reruns: Reruns | None,
        shared: Shared | None,
        caller_keeps: bool,
        workspaces: Convolutions | None,
    ) -> None:
        """`caller_keeps`: the outputs, which are those of the model, to the step's end."""
        self._module = private_copy(module, META)
        self._module.zero_grad(set_to_none=True)
        self._code = self._module  # as it runs, over the same tensors
        if reruns is not None and passes.training:  # torch drops function modes in a backward
            self._code = reruns(self._module, self._as_on_device)
        self._casts = AutocastCasts(passes.device_type)
        self._passes, self._split = passes, split
        on_cpu = passes.device_type == "cpu"
        convolutions = partial(kernels, threads=passes.threads) if on_cpu else workspaces
        self._allocations = Allocations(BLOCK[passes.device_type], convolutions=convolutions)
        self._start = 0  # event at which the current pass starts
        held = {number: passes.inputs[number] for number in sorted(passes.held)}
        self._pieces = {number: x.empty() for number, x in held.items() if isinstance(x, TensorSpec)}
        there = [*self._module.parameters(), *self._module.buffers(), *self._pieces.values(), *passes.known]
        self._allocations.record(there)
        self._values: tuple[Any, ...] = ()  # that all micro-batches share
        if shared is not None:
            with torch.inference_mode(False), torch.no_grad(), self._as_on_device():
                self._values = run_nodes(private_copy(shared[0], META), shared[1])
        self.shared = sum(self._allocations.nbytes[place] for place in {*self._allocations.record(self._values)})
        self._leaves: list[Any] = []  # inputs of the graph
        self._kept: tuple[Any, ...] | None = None  # outputs with their history
        self._result: torch.Tensor | None = None  # the loss
        self._losses: list[torch.Tensor] = []  # of all micro-batches, to the step's end
        self._loss_inputs: tuple[Any, ...] = ()
        self._callers: list[torch.Tensor | None] = []  # gradients of the outputs that the caller holds
        self._caller_keeps = caller_keeps
        self._callers_outputs: list[torch.Tensor] = []
        self._received_places: list[int] = []  # of the gradients that the current backward has received
        self.outputs: tuple[Any, ...] = ()
        self.input_gradients = 0
        self.keeps_gradients = False
        self.keeps_sent = 0

    @contextmanager
    def _as_on_device(self) -> Iterator[None]:
        """Operators of meta tensors do what they do on the device, under the autocast of the passes."""
        passes = self._passes
        with DeviceKernels(passes.device_type):
            if passes.autocast is None:
                yield
                return
            autocast = torch.autocast(passes.device_type, passes.autocast, cache_enabled=passes.autocast_cache)
            with autocast, self._casts:
                yield

    @contextmanager
    def _recorded(self, *, grad: bool) -> Iterator[None]:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), self._as_on_device():
            self._start = len(self._allocations.events)
            with self._allocations:
                yield

    @property
    def casts(self) -> int:
        """Bytes of the casts of parameters that autocast keeps."""
        return sum(self._allocations.nbytes[place] for place in self._cast_places())

    def _cast_places(self) -> set[int]:
        return {*self._allocations.record(self._casts.kept)}

    def _change(self) -> MemoryChange:
        """Since the start of the pass, without casts of parameters that all passes share."""
        now = highest = 0
        events, shared = self._allocations.events[self._start :], self._cast_places()
        for event in events:
            if event in shared:
                continue
            now += self._allocations.nbytes[event] if event >= 0 else -self._allocations.nbytes[~event]
            highest = max(highest, now)
        return MemoryChange(highest, now)

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(self) -> MemoryChange:
        passes = self._passes
        with self._recorded(grad=passes.training):
            self._receive()
            outputs = self._compute(again=False)
            if passes.training and passes.recompute:
                outputs = tuple(_as_leaf(x) for x in outputs)
            if passes.training and passes.loss is not None:
                self._result = passes.loss(outputs)
                self._losses.append(self._result.detach())
                self._loss_inputs = outputs if passes.recompute else ()
            self.outputs = tuple(TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in outputs)
            self._kept = None if passes.recompute or not passes.training else outputs
            if self._caller_keeps:
                self._callers_outputs = [x.detach() for x in tensors_in(outputs)]
            del outputs
            if not passes.training:
                self._leaves = []
        change = self._change()
        if passes.start in _BY_CALLER and not self._callers:
            self._callers = self._gradients_of_outputs(only_losses=passes.start == "caller")
            self._allocations.record(g for g in self._callers if g is not None)  # after the pass: not counted
        return change

    def _gradients_of_outputs(self, *, only_losses: bool = False) -> list[torch.Tensor | None]:
        """`only_losses`: of scalars alone, if there are any, as the caller's backward starts at a loss."""
        wanted = [isinstance(x, TensorSpec) and x.requires_grad for x in self.outputs]
        scalars = [w and not x.shape for x, w in zip(self.outputs, wanted, strict=True)]
        wanted = scalars if only_losses and any(scalars) else wanted
        return [x.empty().detach() if w else None for x, w in zip(self.outputs, wanted, strict=True)]

    def _receive(self) -> None:
        self._leaves = [
            self._pieces[number].detach().requires_grad_(x.requires_grad)
            if number in self._pieces
            else x.empty()
            if isinstance(x, TensorSpec)
            else x
            for number, x in enumerate(self._passes.inputs)
        ]
        self._allocations.record(tensors_in(self._leaves))

    def _compute(self, *, again: bool) -> tuple[Any, ...]:
        keep_nothing = hooked(lambda _: None, _forgotten, forget=True)
        forgetting = self._passes.recompute and self._passes.training and not again
        with keep_nothing if forgetting else nullcontext():
            return run_nodes(self._code, [*self._values, *self._leaves])

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self) -> tuple[MemoryChange, ...]:
        """The change by each part."""
        return (self._whole_backward(),) if self._split is None else self._backward_in_parts(self._split)

    def _whole_backward(self) -> MemoryChange:
        with self._recorded(grad=True):
            roots = self._roots()
            if roots:
                self._propagate([t for t, _ in roots], [g for _, g in roots])
            del roots
            self._send()
        return self._change()

    def _backward_in_parts(self, split: SplitBackward) -> tuple[MemoryChange, MemoryChange]:
        with self._recorded(grad=True):
            wanted = [x for x in self._leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            roots = self._roots()
            self._allocations.in_backward = True
            gradients, rest = split(roots, wanted)
            self._allocations.in_backward = False
            self.input_gradients = _nbytes(gradients)
            sent = self._allocations.record(g for g in gradients if g is not None)
            del gradients, wanted, roots
            self._leaves, self._kept, self._result, self._loss_inputs = [], None, None, ()
            living = {*self._allocations.living()}
            self.keeps_gradients = not living.isdisjoint(self._received_places)
            self.keeps_sent = sum(self._allocations.nbytes[place] for place in living.intersection(sent))
        of_inputs = self._change()
        with self._recorded(grad=True):
            self._allocations.in_backward = True
            rest.run(False)
            self._allocations.in_backward = False
            del rest
        return of_inputs, self._change()

    def _roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        passes = self._passes
        if self._result is not None:
            if not self._result.requires_grad:
                return []
            if self._kept is not None:
                return [(self._result, torch.ones_like(self._result))]
            self._propagate([self._result], [torch.ones_like(self._result)])
            gradients = [_take_gradient(x) for x in self._loss_inputs]
        elif passes.start in _BY_CALLER:
            gradients = self._callers
        else:
            gradients = self._gradients_of_outputs()
            self._received_places = self._allocations.record(g for g in gradients if g is not None)
        if all(g is None for g in gradients):
            return []
        outputs = self._compute(again=True) if self._kept is None else self._kept
        return [
            (t, g)
            for t, g in zip(outputs, gradients, strict=True)
            if g is not None and isinstance(t, torch.Tensor) and t.requires_grad
        ]

    def _propagate(self, roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        self._allocations.in_backward = True
        torch.autograd.backward(roots, gradients)
        self._allocations.in_backward = False

    def _send(self) -> None:
        """The gradients of the inputs leave; what was kept of the micro-batch is freed."""
        sent = [_take_gradient(x) for x in self._leaves]
        self.input_gradients = _nbytes(sent)
        self._leaves, self._kept, self._result, self._loss_inputs = [], None, None, ()


def _as_leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _take_gradient(leaf: Any) -> torch.Tensor | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _nbytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a forward without saved tensors was differentiated")
