"""A stage recorded as CUDA graphs: the host launches a forward or a backward as one, instead of kernel by kernel.

A graph reads and writes the same memory at every replay, activations included. So every micro-batch that is in flight
has a recording of its own, here a slot:

```
                     first call               later calls                         backward
    stage's inputs ─> slot's inputs ─> record ─> slot's inputs ─> replay           gradients of outputs ─> slot's
                      │                                           │                replay the recorded backward:
                      outputs                                     outputs ─> clone   gradients of inputs ─> clone
                                                                                     sums of gradients += ...
```
A slot is free again once the backward's autograd node is gone. Values that leave a slot are clones: the next replay
overwrites the slot while their readers may still need them.

Recordings hold the addresses of parameters and buffers. Optimizers update these in place; where a tensor lies elsewhere
than at the recording, everything is recorded anew. Gradients of parameters are added up in memory of their own, in the
recorded backwards, and become `.grad` of the stage's leaves once per step.

The pattern, with warm-up on a side stream, is that of torch.cuda.make_graphed_callables, which has one slot only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.lower.random_operators import drawing_from, generator_lock, running_seed, seeded
from autopar.runtime.stages.stage_code import kind_of

log = logging.getLogger(__name__)

_WARM_UP = 3  # runs before a recording, in which libraries choose their algorithms; as many as torch's own helper
_MOST_KINDS = 4  # kinds of inputs whose slots are kept; a batch of another size is another kind

# A recording must not meet another one in the same process.
_one_records = threading.Lock()


class GraphedStage:
    """The code of a stage over its tensors, replayed. One worker calls it."""

    def __init__(
        self,
        function: Callable[..., tuple[Any, ...]],
        leaves: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        name: str,
    ) -> None:
        """`leaves`, `buffers`: all tensors that `function` reads beside its inputs. `name`: of the stage."""
        self.function = function
        self.leaves = tuple(leaves)
        self.buffers = tuple(buffers)
        self.device = device
        self.name = name
        self.generator = torch.Generator(device)
        self.sums: dict[int, torch.Tensor] = {}  # of gradients, by place in `leaves`
        self.seconds = 0.0  # spent on recording
        self._reached: set[int] = set()  # leaves that have a gradient in this step
        self._zeroed = False  # whether `sums` belong to this step
        self._free: dict[Any, list[_Slot]] = {}  # by kind of inputs, the one used last at the end
        self._addresses = self._current_addresses()
        self._anchor = torch.empty(0, device=device, requires_grad=True)  # so that all outputs have a backward

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        kind = kind_of(inputs)
        free = self._free[kind] = self._free.pop(kind, [])
        if len(self._free) > _MOST_KINDS:
            del self._free[next(iter(self._free))]
        slot = free.pop() if free else _Slot(self, inputs)
        lease = _Lease(slot, free)
        if torch.is_grad_enabled() and slot.differentiable:
            outputs: tuple[Any, ...] = _Replay.apply(lease, self._anchor, *inputs)
            return outputs
        return slot.forward(inputs)

    def follow(self) -> None:
        """Record anew where a tensor has moved, or another one is trained."""
        addresses = self._current_addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._free.clear()
            self.drop_gradients()
            self.sums.clear()

    def start_sums(self) -> None:
        """Before the first gradients of a step."""
        if not self._zeroed and self.sums:
            torch._foreach_zero_(list(self.sums.values()))
        self._zeroed = True

    def reach(self, places: Sequence[int]) -> None:
        """The leaves at `places` have got gradients."""
        self._reached.update(places)

    def give_gradients(self) -> None:
        """Add the gradients of this step to `.grad` of the leaves."""
        for place in sorted(self._reached):
            leaf, gradient = self.leaves[place], self.sums[place]
            leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad.add_(gradient)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._reached.clear()
        self._zeroed = False

    def sum_of(self, place: int) -> torch.Tensor:
        """Where the gradients of a leaf are added up."""
        if place not in self.sums:
            self.sums[place] = torch.zeros_like(self.leaves[place], requires_grad=False)
        return self.sums[place]

    def _current_addresses(self) -> tuple[tuple[int, bool], ...]:
        return tuple((t.data_ptr(), t.requires_grad) for t in (*self.leaves, *self.buffers))


class _Lease:
    """The use of a slot by one micro-batch. The slot is free once this is gone."""

    def __init__(self, slot: _Slot, free: list[_Slot]) -> None:
        self.slot = slot
        self._free = free

    def __del__(self) -> None:
        if self.slot.reusable:
            self._free.append(self.slot)


class _Replay(torch.autograd.Function):
    """A micro-batch's forward and backward by the recordings of its slot."""

    @staticmethod
    def forward(ctx: Any, lease: _Lease, anchor: torch.Tensor, *inputs: Any) -> tuple[Any, ...]:
        outputs = lease.slot.forward(inputs)
        ctx.lease = lease
        ctx.set_materialize_grads(False)
        constant = [x for i, x in enumerate(outputs) if i not in lease.slot.differentiable]
        ctx.mark_non_differentiable(*[x for x in constant if isinstance(x, torch.Tensor)])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *ctx.lease.slot.backward(gradients)


class _RecordedBackward:
    """A backward from some of the outputs: the graph, and where its gradients are."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: list[torch.Tensor | None], reached: list[int]) -> None:
        self.graph = graph
        self.inputs = inputs  # gradients of the stage's inputs
        self.reached = reached  # places of the leaves whose sums it adds to


class _Slot:
    """One recording of a stage. `differentiable`: places of the outputs that have a backward."""

    def __init__(self, stage: GraphedStage, inputs: Sequence[Any]) -> None:
        self.reusable = True
        self._stage = stage
        self._inputs = tuple(_static(x) if isinstance(x, torch.Tensor) else x for x in inputs)
        self._grad = torch.is_grad_enabled()
        self._seed: int | None = None
        self._stream = torch.cuda.Stream(stage.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forward = torch.cuda.CUDAGraph()
        self._backwards: dict[tuple[int, ...], _RecordedBackward] = {}  # by places of outputs with gradients
        start = time.perf_counter()
        self._outputs = self._recorded_forward()
        self.differentiable = frozenset(
            i for i, x in enumerate(self._outputs) if isinstance(x, torch.Tensor) and x.requires_grad
        )
        self._gradients = {i: torch.zeros_like(self._outputs[i], requires_grad=False) for i in self.differentiable}
        self._versions = self._current_versions()
        self._count(start, "forward")

    def forward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The stage's outputs, detached."""
        for static, x in zip(self._inputs, inputs, strict=True):
            if isinstance(x, torch.Tensor):
                static.data.copy_(x.detach())  # `.data`: the recorded autograd graph must not see a new version
        self._seed = running_seed()
        if self._seed is not None:
            self._stage.generator.manual_seed(self._seed)
        self._forward.replay()
        return tuple(x.detach().clone() if isinstance(x, torch.Tensor) else x for x in self._outputs)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs; adds those of the leaves to the stage's sums."""
        known = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        places = tuple(i for i in known if i in self.differentiable)
        if not places:
            return [None] * len(self._inputs)
        for i in places:
            self._gradients[i].copy_(known[i])
        recorded = self._backwards.get(places)
        if recorded is None and self._versions != self._current_versions():
            return self._backward_again(places)
        if recorded is None:
            recorded = self._backwards[places] = self._recorded_backward(places)
        self._stage.start_sums()
        recorded.graph.replay()
        self._stage.reach(recorded.reached)
        return [None if gradient is None else gradient.clone() for gradient in recorded.inputs]

    # -- recording --------------------------------------------------------------------------------------------------

    def _recorded_forward(self) -> tuple[Any, ...]:
        with _kept(self._stage.buffers), self._prepared(), self._on_side_stream():
            for _ in range(_WARM_UP):
                outputs = self._run()
                places = [i for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
                if self._grad and places:
                    self._differentiated(outputs, places, [torch.zeros_like(outputs[i]) for i in places])
                del outputs
        with self._prepared(), self._recording(self._forward):
            return self._run()

    def _recorded_backward(self, places: Sequence[int]) -> _RecordedBackward:
        """Record the backward while the autograd graph of the recorded forward fits the tensors' versions."""
        start = time.perf_counter()
        stage, graph = self._stage, torch.cuda.CUDAGraph()
        for place, leaf in enumerate(stage.leaves):
            if leaf.requires_grad:
                stage.sum_of(place)  # outside of the recording's memory
        with self._prepared(), self._recording(graph):
            of_inputs, of_leaves = self._differentiated(self._outputs, places, [self._gradients[i] for i in places])
            for place, gradient in of_leaves.items():
                stage.sums[place].add_(gradient)
        self._count(start, "backward")
        return _RecordedBackward(graph, of_inputs, sorted(of_leaves))

    def _backward_again(self, places: Sequence[int]) -> list[torch.Tensor | None]:
        """A backward from other outputs than before, after the parameters have changed: run the stage once more,
        unrecorded, and never use this slot again."""
        self.reusable = False
        stage = self._stage
        again = seeded(self._seed) if self._seed is not None else contextlib.nullcontext()
        with torch.enable_grad(), again, _kept(stage.buffers), self._prepared():
            outputs = self._run()
            of_inputs, of_leaves = self._differentiated(outputs, places, [self._gradients[i] for i in places])
        stage.start_sums()
        for place, gradient in of_leaves.items():
            stage.sum_of(place).add_(gradient)
        stage.reach(list(of_leaves))
        return of_inputs

    def _run(self) -> tuple[Any, ...]:
        return self._stage.function(*self._inputs)

    def _differentiated(
        self, outputs: Sequence[Any], places: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor]]:
        """Gradients of the inputs, and of the leaves that have one, by place."""
        inputs = {i: x for i, x in enumerate(self._inputs) if isinstance(x, torch.Tensor) and x.requires_grad}
        leaves = {i: leaf for i, leaf in enumerate(self._stage.leaves) if leaf.requires_grad}
        found = torch.autograd.grad(
            [outputs[i] for i in places],
            [*inputs.values(), *leaves.values()],
            gradients,
            retain_graph=True,
            allow_unused=True,
        )
        of_inputs: list[torch.Tensor | None] = [None] * len(self._inputs)
        for i, gradient in zip(inputs, found, strict=False):
            of_inputs[i] = gradient
        of_leaves = dict(zip(leaves, found[len(inputs) :], strict=True))
        return of_inputs, {place: gradient for place, gradient in of_leaves.items() if gradient is not None}

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Random operators draw from the stage's generator from its beginning, and no cast of a parameter is taken from
        autocast's cache: a recording would read the cached one for ever."""
        cached = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        try:
            with drawing_from(self._stage.generator):
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    @contextlib.contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._stage.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Inside, kernels are recorded instead of launched. Other threads go on: the mode is "thread_local"."""
        graph.register_generator_state(self._stage.generator)
        options: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        try:
            with _one_records, contextlib.ExitStack() as recording:
                # A recording registers the default generator as it is now, which no other stage may have lent out.
                with generator_lock(self._stage.device):
                    recording.enter_context(torch.cuda.graph(graph, **options))
                yield
        except RuntimeError as error:
            raise InputError(
                f"{self._stage.name} cannot be recorded as CUDA graphs ({str(error).splitlines()[0]}): a recorded "
                "stage reads no value of a tensor on the host, and its shapes are fixed; give compile=True or "
                "compile=False"
            ) from error

    def _current_versions(self) -> list[int]:
        return [leaf._version for leaf in self._stage.leaves] if self._grad else []

    def _count(self, start: float, what: str) -> None:
        seconds = time.perf_counter() - start
        self._stage.seconds += seconds
        log.info("recorded the %s of %s in %.1f s", what, self._stage.name, seconds)


def _static(x: torch.Tensor) -> torch.Tensor:
    """Memory for an input: the same sizes, strides and values, a leaf."""
    static = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    static.copy_(x.detach())
    return static.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _kept(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards, `buffers` hold what they did before."""
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, old in zip(buffers, before, strict=True):
        buffer.data.copy_(old)
