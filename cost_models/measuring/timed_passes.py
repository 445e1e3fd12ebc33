"""One forward and backward pass over a torch.fx graph, with the seconds of every operator where it runs.

    forward     marks of the clock before and after every node
    backward    a mark before every autograd node, which belongs to the node whose output it is reached from, walking
                from there to the outputs of the node's inputs; those that add a parameter's gradient to that of earlier
                passes are timed apart

The clock is that of the device (`device_clock.py`). Time in which the thread waited for a core does not count.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from cost_models.graphs import Loss, backward_starts, private_copy, run_nodes, tensors_in
from cost_models.measuring.autocast import Autocast
from cost_models.measuring.core_waiting import waited_for_core
from cost_models.measuring.device_clock import DeviceClock, device_clock
from cost_models.measuring.gradients import give_gradients


@dataclass(frozen=True)
class TimedPass:
    """Seconds of one pass."""

    forward: dict[str, float]  # by node
    backward: dict[str, float]  # by node
    loss: tuple[float, float]  # forward, backward
    totals: tuple[float, float]  # of forward and of backward, loss included, waiting for a core left out
    # By node, of `backward`: adding gradients of parameters to those of earlier passes.
    accumulation: dict[str, float] = field(default_factory=dict)


class _Stamp(NamedTuple):
    """The start of an autograd node."""

    mark: Any
    node: str  # that it belongs to; "": the loss, or the end
    accumulates: bool = False


def _accumulates(function: Any) -> bool:
    """Whether an autograd node adds to the gradient of a parameter."""
    return type(function).__name__ == "AccumulateGrad" and isinstance(function.variable, nn.Parameter)


class GraphRunner:
    """One worker's private copy of a graph: the same storages, its own gradients and its own mutable buffers."""

    def __init__(
        self,
        module: fx.GraphModule,
        device: torch.device,
        training: bool,
        n_outputs: int | None,
        clock: DeviceClock | None = None,
        autocast: Autocast | None = None,
        all_outputs: bool = False,
    ) -> None:
        """`n_outputs`: the outputs from this index on are loose ends; the backward starts from them, too. `clock`: by
        default that of `device`. `autocast`: that passes run under; None: off. `all_outputs`: what follows the graph
        has gradients of all outputs, and scalars are no losses."""
        self.module = private_copy(module, device, gradients=False)
        if training:
            give_gradients(self.module.parameters())
        self.device = device
        self.clock = device_clock(device) if clock is None else clock
        self.autocast = autocast or Autocast(device.type)
        self.training = training
        self.n_outputs, self.all_outputs = n_outputs, all_outputs
        self.inputs: list[Any] = []

    def plain_pass(self, loss: Loss | None) -> tuple[float, float]:
        """Seconds of forward and backward of one pass without clock reads inside (loss included)."""
        with self._conditions():
            start = self._start()
            outputs = self.module(*self.inputs)
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
            forward = self._since(start)
            return forward, self._backward(outputs, value)

    def timed_pass(self, loss: Loss | None) -> TimedPass:
        """One pass with the seconds of every node."""
        mark, between = self.clock.mark, self.clock.between
        spans: dict[str, tuple[Any, Any]] = {}  # node -> marks before and after its forward
        stamps: list[_Stamp] = []
        seen: set[Any] = set()

        def timed_call(node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            start = mark()
            value = function(*args, **kwargs)
            spans[node.name] = start, mark()
            if self.training:
                self._watch(value, node.name, seen, stamps)
            return value

        with self._conditions():
            begin = self._start()
            outputs = run_nodes(self.module, self.inputs, call=timed_call)
            loss_start = mark()
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
            loss_end = mark()
            if value is not None and self.training:
                self._watch(value, "", seen, stamps)
            total_forward = self._since(begin)
            total_backward = self._backward(outputs, value, stamps)
        forward = {name: between(*span) for name, span in spans.items()}
        backward, accumulation = (dict.fromkeys(forward, 0.0) for _ in range(2))
        loss_backward = 0.0
        for one, following in itertools.pairwise(stamps):
            seconds = between(one.mark, following.mark)
            if one.node:
                backward[one.node] += seconds
                accumulation[one.node] += seconds if one.accumulates else 0.0
            else:
                loss_backward += seconds
        loss_seconds = between(loss_start, loss_end) if loss is not None else 0.0
        totals = total_forward, total_backward
        return TimedPass(forward, backward, (loss_seconds, loss_backward), totals, accumulation)

    @contextmanager
    def _conditions(self) -> Iterator[None]:
        """Those of a whole pass, as workers run it: autocast is on in the backward, too, and casts every parameter
        once a pass."""
        with torch.set_grad_enabled(self.training), self.autocast.applied():
            yield

    def _backward(
        self, outputs: tuple[Any, ...], loss: torch.Tensor | None, stamps: list[_Stamp] | None = None
    ) -> float:
        """Seconds of the backward pass. `stamps` get a last mark when all of it is queued."""
        if not self.training:
            return 0.0
        roots, gradients = self._roots(outputs, loss)
        start = self._start()
        if roots:
            torch.autograd.backward(roots, gradients)
        if stamps is not None:
            stamps.append(_Stamp(self.clock.mark(), ""))
        return self._since(start)

    def _watch(self, value: Any, name: str, seen: set[Any], stamps: list[_Stamp]) -> None:
        """Mark the start of every autograd node that computes `value`, except those `seen` for earlier nodes."""
        stack = [t.grad_fn for t in tensors_in(value) if t.grad_fn is not None]

        def stamp(*_: Any) -> None:
            stamps.append(_Stamp(self.clock.mark(), name))

        def stamp_accumulation(*_: Any) -> None:
            stamps.append(_Stamp(self.clock.mark(), name, accumulates=True))

        while stack:
            function = stack.pop()
            if function in seen:
                continue
            seen.add(function)
            function.register_prehook(stamp_accumulation if _accumulates(function) else stamp)
            stack += [following for following, _ in function.next_functions if following is not None]

    def _start(self) -> tuple[float, float]:
        """The time now, and how long the thread has waited for a core until now."""
        self.clock.wait()
        return time.perf_counter(), waited_for_core()

    def _since(self, start: tuple[float, float]) -> float:
        """Seconds since `start` in which the thread did not wait for a core.

        The two clocks are read one after the other, and the thread may wait in between. At the end they are read in the
        opposite order, so that only waiting within the measured time is subtracted:

            start: time, waited  ................  end: waited, time
        """
        self.clock.wait()
        waited = waited_for_core()
        return time.perf_counter() - start[0] - (waited - start[1])

    def _roots(
        self, outputs: tuple[Any, ...], loss: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where the backward starts: at the loss, else at the scalar outputs (losses), else at all outputs; and at the
        loose ends. Gradients that an earlier pass left on the inputs are dropped."""
        for tensor in self.inputs:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        roots = [t for t in tensors_in(outputs[: self.n_outputs]) if t.requires_grad]
        roots = [loss] if loss is not None else backward_starts(roots, all_outputs=self.all_outputs)
        if self.n_outputs is not None:
            roots += [t for t in tensors_in(outputs[self.n_outputs :]) if t.requires_grad]
        return roots, [torch.ones_like(root) for root in roots]
