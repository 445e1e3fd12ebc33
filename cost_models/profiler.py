"""Operator times measured in place: within whole forward and backward passes of a torch.fx graph.

Repeating an operator alone keeps caches warm and skips allocation, and so underestimates a model by 14-20 %. Here
every operator is timed where it runs: the forward around each node, the backward around each autograd node (found by
walking from the node's output to those of its inputs). The clock reads cost something themselves, so the sums are
calibrated against passes without them. Several workers of one machine share memory bandwidth, caches and Python's
interpreter lock: with `workers=n` the same passes run on n threads at once and the times are those under that load.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from cost_models.device import Device

# Seconds of a pass from which on the clock reads around its operators (about a microsecond each) do not matter.
_LONG_PASS = 0.3

Loss = Callable[[tuple[Any, ...]], torch.Tensor]


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
        return sum(self.forward.values()) + sum(self.backward.values()) + self.loss_forward + self.loss_backward


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of one pass at one micro-batch size."""

    rows: int
    output: dict[str, int]  # node -> bytes of its output tensors
    fresh: dict[str, int]  # node -> bytes of storages that it allocated for them
    saved: dict[str, list[tuple[int, int]]]  # node -> (storage id, bytes) kept for backward, parameters left out


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
        _synchronize(self.device)
        start = time.perf_counter()
        with torch.set_grad_enabled(self.training):
            outputs = self.module(*self.inputs)
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
        _synchronize(self.device)
        middle = time.perf_counter()
        if self.training:
            roots, gradients = self._roots(outputs, value)
            middle_after = time.perf_counter()
            if roots:
                torch.autograd.backward(roots, gradients)
            _synchronize(self.device)
            return middle - start, time.perf_counter() - middle_after
        return middle - start, 0.0

    def timed_pass(self, loss: Loss | None) -> tuple[dict[str, float], dict[str, float], tuple[float, float]]:
        """Seconds by node: forward, backward, and (forward, backward) of the loss."""
        forward: dict[str, float] = {}
        stamps: list[tuple[float, str]] = []
        seen: set[Any] = set()

        def on_node(node: fx.Node, value: Any, seconds: float) -> None:
            forward[node.name] = seconds
            if self.training:
                _watch(value, node.name, seen, stamps)

        with torch.set_grad_enabled(self.training):
            outputs = run_nodes(self.module, self.inputs, on_node)
            start = time.perf_counter()
            value = loss(outputs[: self.n_outputs]) if loss is not None else None
            _synchronize(self.device)
            loss_seconds = time.perf_counter() - start if loss is not None else 0.0
            if value is not None and self.training:
                _watch(value, "", seen, stamps)
        backward = dict.fromkeys(forward, 0.0)
        loss_backward = 0.0
        if self.training:
            roots, gradients = self._roots(outputs, value)
            if roots:
                torch.autograd.backward(roots, gradients)
            _synchronize(self.device)
            stamps.append((time.perf_counter(), ""))
            for (begin, name), (end, _) in itertools.pairwise(stamps):
                if name:
                    backward[name] += end - begin
                else:
                    loss_backward += end - begin
        return forward, backward, (loss_seconds, loss_backward)

    def _roots(
        self, outputs: tuple[Any, ...], loss: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where backward starts: the loss, or else the scalar outputs (losses) if there are any, or all; and the
        loose ends. Gradients that an earlier pass left on stand-ins are dropped."""
        for tensor in self.inputs:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None
        roots = [t for t in _tensors(outputs[: self.n_outputs]) if t.requires_grad]
        roots = [loss] if loss is not None else [t for t in roots if t.dim() == 0] or roots
        if self.n_outputs is not None:
            roots += [t for t in _tensors(outputs[self.n_outputs :]) if t.requires_grad]
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
    timed: list[tuple[dict[str, float], dict[str, float], tuple[float, float]]] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(workers)
    lock = threading.Lock()

    def work(runner: GraphRunner) -> None:
        try:
            torch.set_num_threads(device.threads)
            runner.inputs = [_to(x, device.torch_device) for x in inputs_of(rows)]
            loss = loss_of(rows)
            barrier.wait()
            started = time.perf_counter()
            runner.plain_pass(loss)  # warm-up: allocation, kernels, lazy initialisation
            once = time.perf_counter() - started
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
                p = (
                    runner.plain_pass(loss)
                    if calibrate
                    else (sum(t[0].values()) + t[2][0], sum(t[1].values()) + t[2][1])
                )
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

    names = list(timed[0][0])
    # Disturbances only ever add time: of an even number of passes, the lower of the middle two.
    typical = statistics.median_low
    forward = {n: typical([t[0][n] for t in timed]) for n in names}
    backward = {n: typical([t[1][n] for t in timed]) for n in names}
    loss_forward = typical([t[2][0] for t in timed])
    loss_backward = typical([t[2][1] for t in timed])
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


def measure_bytes(module: fx.GraphModule, inputs: list[Any], rows: int, training: bool) -> GraphBytes:
    """One pass that counts bytes by real storages: what each node returns, allocates, and keeps for backward."""
    runner = GraphRunner(module, _device_of(inputs), training, None)
    resident = {t.untyped_storage().data_ptr() for t in [*runner.module.parameters(), *runner.module.buffers()]}
    output: dict[str, int] = {}
    fresh: dict[str, int] = {}
    saved: dict[str, list[tuple[int, int]]] = {}
    known: set[int] = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor)} | resident
    pending: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # while it lives its address is its identity
        if storage.data_ptr() not in resident:
            pending[storage.data_ptr()] = storage.nbytes()
        return tensor

    def on_node(node: fx.Node, value: Any, _: float) -> None:
        tensors = _tensors(value)
        output[node.name] = sum(t.numel() * t.element_size() for t in tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        fresh[node.name] = sum(n for pointer, n in storages.items() if pointer not in known)
        known.update(storages)
        alive.append(value)
        saved[node.name] = sorted(pending.items())
        pending.clear()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.set_grad_enabled(training), hooks:
        run_nodes(runner.module, inputs, on_node)
    return GraphBytes(rows, output, fresh, saved)


def measure_accumulate(device: torch.device, nbytes: int = 1 << 24) -> float:
    """Seconds per byte of adding one gradient to another in place."""
    total, part = torch.zeros(nbytes // 4, device=device), torch.ones(nbytes // 4, device=device)
    seconds = []
    for _ in range(7):
        _synchronize(device)
        start = time.perf_counter()
        total.add_(part)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / nbytes


def run_nodes(
    module: fx.GraphModule, inputs: Sequence[Any], on_node: Callable[[fx.Node, Any, float], None]
) -> tuple[Any, ...]:
    """Run a flat graph node by node, telling `on_node` each value and the seconds that its call took."""
    values: dict[fx.Node, Any] = {}
    remaining = {node: len(node.users) for node in module.graph.nodes}
    arguments = iter(inputs)
    device = _device_of(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(arguments)
            continue
        if node.op == "output":
            result = fx.map_arg(node.args[0], lambda n: values[n])
            return tuple(result)
        if node.op == "get_attr":
            values[node] = _attribute(module, node.target)
            continue
        args = fx.map_arg(node.args, lambda n: values[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
        if node.op == "call_module":
            function: Any = module.get_submodule(node.target)
        elif node.op == "call_method":
            function = getattr(type(args[0]), node.target)
        else:
            function = node.target
        start = time.perf_counter()
        value = function(*args, **kwargs)
        _synchronize(device)
        seconds = time.perf_counter() - start
        values[node] = value
        on_node(node, value, seconds)
        del args, kwargs, value
        for source in node.all_input_nodes:  # free what is not needed any more, as the real program does
            remaining[source] -= 1
            if not remaining[source]:
                values.pop(source, None)
    raise ValueError("the graph has no output node")


def private_copy(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The graph over leaf tensors of its own that share storage with `module`'s parameters where they already lie on
    `device`; gradients start as zeros so that every pass accumulates, like all micro-batches but the first."""
    replaced: dict[int, Any] = {}

    def private(value: Any) -> Any:
        if id(value) in replaced:
            return replaced[id(value)]
        if isinstance(value, nn.Parameter):
            new: Any = nn.Parameter(value.detach().to(device), requires_grad=value.requires_grad)
            if new.requires_grad:
                new.grad = torch.zeros_like(new)
        elif isinstance(value, torch.Tensor):
            new = value.detach().to(device, copy=True)
        else:
            new = value
        replaced[id(value)] = new
        return new

    root: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            root[node.target] = private(_attribute(module, node.target))
        elif node.op == "call_module":
            root[node.target] = private_module(module.get_submodule(node.target), private)
    return fx.GraphModule(root, module.graph, class_name="Private")


def private_module(module: nn.Module, private: Callable[[Any], Any]) -> nn.Module:
    """A copy of a module tree with `private(tensor)` for every parameter and buffer."""
    new = module.__new__(type(module))
    new.__dict__ = dict(module.__dict__)
    new._parameters = {k: None if v is None else private(v) for k, v in module._parameters.items()}
    new._buffers = {k: None if v is None else private(v) for k, v in module._buffers.items()}
    new._modules = {k: None if v is None else private_module(v, private) for k, v in module._modules.items()}
    return new


def _watch(value: Any, name: str, seen: set[Any], stamps: list[tuple[float, str]]) -> None:
    """Stamp the start of every autograd node between `value` and what earlier nodes made."""
    stack = [t.grad_fn for t in _tensors(value) if t.grad_fn is not None]

    def stamp(*_: Any) -> None:
        stamps.append((time.perf_counter(), name))

    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        function.register_prehook(stamp)
        stack += [following for following, _ in function.next_functions if following is not None]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors(item)]
    return []


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _to(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _device_of(values: Sequence[Any]) -> torch.device:
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ratio(whole: float, parts: float) -> float:
    return whole / parts if parts > 0 and whole > 0 else 1.0
