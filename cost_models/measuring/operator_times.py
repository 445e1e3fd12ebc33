"""Operator times measured in place: within whole forward and backward passes of a torch.fx graph.

Repeating an operator alone keeps caches warm and skips allocation, and so underestimates a model by 14-20 %. Here
every operator is timed where it runs: the forward around each node, the backward around each autograd node (found by
walking from the node's output to those of its inputs). The clock reads cost something themselves, so the sums are
calibrated against passes without them. Time that the thread waited for a core that another program had is taken off
(Linux tells it): a plan made on a busy machine should be the one for the machine itself. Several workers of one
machine share memory bandwidth, caches and Python's interpreter lock: with `workers=n` the same passes run on n threads
at once and the times are those under that load.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import fx

from cost_models.graphs import Loss, private_copy, run_nodes, tensors_in
from cost_models.hardware.devices import Device, synchronize

# Seconds of a pass from which on the clock reads around its operators (about a microsecond each) do not matter.
_LONG_PASS = 0.3


@dataclass(frozen=True)
class GraphTimes:
    """Seconds of one pass over a graph at one micro-batch size, on one of `workers` busy devices."""

    rows: int  # samples in the micro-batch
    workers: int  # devices of the machine that were busy at the same time
    forward: dict[str, float]  # node -> s
    backward: dict[str, float]  # node -> s; gradient accumulation counts to the node that reads the parameter
    loss_forward: float = 0.0  # s
    loss_backward: float = 0.0  # s

    @property
    def total(self) -> float:
        """Seconds of the whole pass."""
        return sum(self.forward.values()) + sum(self.backward.values()) + self.loss_forward + self.loss_backward

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, nodes: Collection[str]) -> Self:
        """The times of `nodes` that `to_json` wrote.

        Raises:
            TypeError: `value` has other fields or types.
            ValueError: it has times of other nodes, or times that are not finite seconds >= 0.
        """
        times = cls(**value)
        if {*times.forward} != {*nodes} or {*times.backward} != {*nodes}:
            raise ValueError("the cached times are of other operators")
        seconds = (*times.forward.values(), *times.backward.values(), times.loss_forward, times.loss_backward)
        if not all(0 <= s < math.inf for s in seconds):
            raise ValueError("cached times must be finite seconds >= 0")
        return times


@dataclass(frozen=True)
class TimedPass:
    """Seconds of one pass."""

    forward: dict[str, float]  # by node
    backward: dict[str, float]  # by node
    loss: tuple[float, float]  # forward, backward
    totals: tuple[float, float]  # of forward and of backward, loss included, waiting for a core left out


class GraphRunner:
    """One worker's private copy of a graph: the same storages, its own gradients and its own mutable buffers."""

    def __init__(self, module: fx.GraphModule, device: torch.device, training: bool, n_outputs: int | None) -> None:
        """`n_outputs`: outputs beyond so many are loose ends, where backward starts, too."""
        self.module = private_copy(module, device)
        self.device = device
        self.training = training
        self.n_outputs = n_outputs
        self.inputs: list[Any] = []

    def plain_pass(self, loss: Loss | None) -> tuple[float, float]:
        """Seconds of forward and backward of one pass as it runs in production (loss included)."""
        start = self._now()
        with torch.set_grad_enabled(self.training):
            outputs = self.module(*self.inputs)
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
        forward = self._now() - start
        return forward, self._backward(outputs, value)

    def timed_pass(self, loss: Loss | None) -> TimedPass:
        """The same, with seconds by node."""
        forward: dict[str, float] = {}
        stamps: list[tuple[float, str]] = []
        seen: set[Any] = set()

        def timed_call(node: fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            start = time.perf_counter()
            value = function(*args, **kwargs)
            synchronize(self.device)
            forward[node.name] = time.perf_counter() - start
            if self.training:
                _watch(value, node.name, seen, stamps)
            return value

        begin = self._now()
        with torch.set_grad_enabled(self.training):
            outputs = run_nodes(self.module, self.inputs, call=timed_call)
            start = time.perf_counter()
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
            synchronize(self.device)
            loss_seconds = time.perf_counter() - start if loss is not None else 0.0
            if value is not None and self.training:
                _watch(value, "", seen, stamps)
        total_forward = self._now() - begin
        total_backward = self._backward(outputs, value)
        stamps.append((time.perf_counter(), ""))
        backward = dict.fromkeys(forward, 0.0)
        loss_backward = 0.0
        for (since, name), (until, _) in itertools.pairwise(stamps):
            if name:
                backward[name] += until - since
            else:
                loss_backward += until - since
        return TimedPass(forward, backward, (loss_seconds, loss_backward), (total_forward, total_backward))

    def _backward(self, outputs: tuple[Any, ...], loss: torch.Tensor | None) -> float:
        """Seconds of the backward pass."""
        if not self.training:
            return 0.0
        roots, gradients = self._roots(outputs, loss)
        start = self._now()
        if roots:
            torch.autograd.backward(roots, gradients)
        return self._now() - start

    def _now(self) -> float:
        """A clock that stands still while the thread waits for a core."""
        synchronize(self.device)
        return time.perf_counter() - _waited_for_core()

    def _roots(
        self, outputs: tuple[Any, ...], loss: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where backward starts: the loss, or else the scalar outputs (losses) if there are any, or all; and the
        loose ends. Gradients that an earlier pass left on stand-ins are dropped."""
        for tensor in self.inputs:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        roots = [t for t in tensors_in(outputs[: self.n_outputs]) if t.requires_grad]
        roots = [loss] if loss is not None else [t for t in roots if t.dim() == 0] or roots
        if self.n_outputs is not None:
            roots += [t for t in tensors_in(outputs[self.n_outputs :]) if t.requires_grad]
        return roots, [torch.ones_like(root) for root in roots]


def measure(
    module: fx.GraphModule,
    inputs_of: Callable[[int], list[Any]],
    loss_of: Callable[[int], Loss | None],
    rows: int,
    device: Device,
    *,
    workers: int = 1,
    training: bool = True,
    n_outputs: int | None = None,
    budget: float = 1.0,
) -> GraphTimes:
    """Median times of every node of `module` at `rows` samples, on `workers` threads at once.

    `inputs_of(rows)` gives the flat inputs, `loss_of(rows)` a loss of the flat outputs or None (backward then starts
    from ones at every output). `n_outputs`: outputs beyond so many are loose ends, where backward starts, too. After
    a warm-up, timed and plain passes take turns for about `budget` seconds; the plain ones are left out where a pass
    is so long that the clock reads do not matter.
    """
    runners = [GraphRunner(module, device.torch_device, training, n_outputs) for _ in range(workers)]
    plain: list[tuple[float, float]] = []
    timed: list[TimedPass] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(workers)
    lock = threading.Lock()

    def work(runner: GraphRunner) -> None:
        try:
            torch.set_num_threads(device.threads)
            runner.inputs = [_to(x, device.torch_device) for x in inputs_of(rows)]
            loss = loss_of(rows)
            barrier.wait()
            once = sum(runner.plain_pass(loss))  # warm-up: allocation, kernels, lazy initialisation
            # Every worker must make the same number of passes, or the last ones would run without load.
            with lock:
                durations.append(once)
            barrier.wait()
            slowest = max(durations)
            calibrate = slowest < _LONG_PASS
            fewest = 1 if slowest > budget else 2
            repeats = max(fewest, min(10, round(budget / (slowest * (1 + calibrate)))))
            for _ in range(repeats):
                barrier.wait()
                t = runner.timed_pass(loss)
                barrier.wait()
                p = runner.plain_pass(loss) if calibrate else t.totals
                with lock:
                    plain.append(p)
                    timed.append(t)
        except BaseException as error:  # handed to the caller; the others must not wait for this worker
            failures.append(error)
            barrier.abort()

    durations: list[float] = []
    before = torch.get_num_threads()
    threads = [threading.Thread(target=work, args=(r,), name=f"autopar-profile-{i}") for i, r in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)  # set_num_threads of a worker is also the default of threads to come
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])

    # Disturbances only ever add time: of an even number of passes, the lower of the middle two.
    typical = statistics.median_low
    forward = {n: typical([t.forward[n] for t in timed]) for n in timed[0].forward}
    backward = {n: typical([t.backward[n] for t in timed]) for n in timed[0].backward}
    loss_forward, loss_backward = (typical([t.loss[way] for t in timed]) for way in (0, 1))
    scale_f = _ratio(typical([p[0] for p in plain]), sum(forward.values()) + loss_forward)
    scale_b = _ratio(typical([p[1] for p in plain]), sum(backward.values()) + loss_backward)
    return GraphTimes(
        rows,
        workers,
        {n: s * scale_f for n, s in forward.items()},
        {n: s * scale_b for n, s in backward.items()},
        loss_forward * scale_f,
        loss_backward * scale_b,
    )


def measure_accumulate(device: torch.device, nbytes: int = 1 << 24) -> float:
    """Seconds per byte of adding one gradient to another in place."""
    total, part = torch.zeros(nbytes // 4, device=device), torch.ones(nbytes // 4, device=device)
    seconds = []
    for _ in range(7):
        synchronize(device)
        start = time.perf_counter()
        total.add_(part)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / nbytes


def _watch(value: Any, name: str, seen: set[Any], stamps: list[tuple[float, str]]) -> None:
    """Stamp the start of every autograd node between `value` and what earlier nodes made."""
    stack = [t.grad_fn for t in tensors_in(value) if t.grad_fn is not None]

    def stamp(*_: Any) -> None:
        stamps.append((time.perf_counter(), name))

    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        function.register_prehook(stamp)
        stack += [following for following, _ in function.next_functions if following is not None]


def _to(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _waited_for_core() -> float:
    """Seconds that this thread was ready to run but had no core, since it began; 0 where the system does not tell.

    The second field of Linux's schedstat: https://docs.kernel.org/scheduler/sched-stats.html
    """
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _ratio(whole: float, parts: float) -> float:
    return whole / parts if parts > 0 and whole > 0 else 1.0
