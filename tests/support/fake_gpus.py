"""GPUs that are not there: the runtime itself trains on fake tensors that say cuda:0, cuda:1, ...

Nothing is computed, but every operator of the forward and of the backward is seen with the devices of its tensors. An
operator that mixes devices is an AssertionError that names it, its stage and the devices.

A build of torch without CUDA needs two things for that:
 - autograd asks for a device guard when it records an operator on cuda: the guard of the CPU, which does nothing, is
   registered for cuda as well;
 - autograd's engine asks for the GPU's stream when it runs an operator's backward: `_Engine` walks the same graph of
   autograd nodes in Python, with the engine's own checks of devices.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import PipelinedModule, Plan
from autopar.analysis.example import Example
from autopar.capture.torch_private import tree_leaves, tree_map
from autopar.runtime.signatures import known as signatures
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.stages.executable import Executable
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.passes import Passes
from cost_models.hardware.devices import Device

_CPU, _CUDA = 0, 1  # c10::DeviceType
_N_DEVICE_TYPES = 22
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"

# They copy from one device to another, which is their purpose.
_TRANSFERS = {"copy_", "_to_copy", "set_", "record_stream", "_pin_memory", "is_pinned", "detach", "set_data"}
_TRANSFERS |= {"_has_compatible_shallow_copy_type"}  # a question
# They take indices on the CPU for a tensor on a GPU.
_TAKE_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _fused_gru_cell(gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *_: Any) -> Any:
    """Gates [B, 3 H], hidden [B, H] -> the next hidden [B, H], and five values per entry kept for the backward."""
    return torch.empty_like(hidden), hidden.new_empty(len(hidden), 5 * hidden.shape[1])


def _fused_gru_cell_backward(gradient: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the hidden state, and of both biases."""
    rows, width = gradient.shape
    gates = [gradient.new_empty(rows, 3 * width) for _ in range(2)]
    return *gates, torch.empty_like(gradient), *([gradient.new_empty(3 * width)] * 2 if has_bias else [None] * 2)


# Kernels that torch has no fake implementation of.
_IN_PLACE_OF: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._thnn_fused_gru_cell.default: _fused_gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _fused_gru_cell_backward,
}


def device(name: str) -> Device:
    """A worker called "cuda:0", "cuda:0#1", "cpu:0" ..."""
    place = torch.device("cpu") if name.startswith("cpu") else torch.device(name.partition("#")[0])
    return Device(name, place, "made up", 1 << 30, 1)


@contextlib.contextmanager
def fake_gpus() -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake, and some may be on cuda devices."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_device_guard_of_cuda())
        for patch in (*_streams(), *_engine(), *_one_thread()):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(FakeTensor, "data", property(_get_data, _set_data), create=True))
        stack.enter_context(mode)
        stack.enter_context(_watcher)
        yield mode


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model without values."""
    with FakeCopyMode(mode):
        return copy.deepcopy(model)


def on(tree: Any, place: str | torch.device) -> Any:
    """Fake copies on a device."""
    return tree_map(
        lambda x: (
            torch.empty_like(x, device=place).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        ),
        tree,
    )


def pipelined(example: Example, model: nn.Module, plan: Plan, **settings: Any) -> PipelinedModule:
    """`model`, a fake copy of the example's, by `plan` on its made-up devices. The example comes from outside of
    `fake_gpus`: the study of a batch computes with values."""
    used = [device(name) for name in plan.used_devices]
    pm = PipelinedModule(model, used, _undecided, plan=plan, settings=RunSettings(**settings))
    pm.adopt(example)
    return pm


def _undecided(_: Any) -> Plan:
    raise AssertionError("the test gives the plan")


# -- operators -------------------------------------------------------------------------------------------------------


class _Watcher(TorchDispatchMode):
    """Refuses operators that mix devices and, inside a stage, operators on devices that are not the stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = "outside of stages"
        self.devices: frozenset[torch.device] = frozenset()  # of the running stage
        self._strict = False  # its operators run, and not the transfers around them

    @contextlib.contextmanager
    def named(self, stage: str, devices: frozenset[torch.device]) -> Iterator[None]:
        before = self.stage, self.devices
        self.stage, self.devices = stage, devices
        try:
            yield
        finally:
            self.stage, self.devices = before

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        before, self._strict = self._strict, bool(self.devices)
        try:
            yield
        finally:
            self._strict = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":  # a fake tensor has no value
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if name not in _TRANSFERS:
            given = args[:1] if name in _TAKE_HOST_INDICES else (args, kwargs)
            places = {x.device for x in _tensors(given) if x.dim() or x.device.type != "cpu"}
            self._check(len(places) < 2, func, "mixes", (args, kwargs))
        result = _IN_PLACE_OF.get(func, func)(*args, **kwargs)
        if self._strict and name not in _TRANSFERS:
            made = [x for x in _tensors(result) if x.dim() or x.device.type != "cpu"]
            self._check({x.device for x in made} <= self.devices, func, "runs elsewhere than its stage, on", made)
        return result

    def _check(self, fine: bool, func: Any, what: str, tensors: Any) -> None:
        if not fine:
            shown = ", ".join(f"{x.device} {list(x.shape)}" for x in _tensors(tensors))
            raise AssertionError(f"{self.stage}: {func} {what} {shown}")


_watcher = _Watcher()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


# -- devices and streams ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _device_guard_of_cuda() -> Iterator[None]:
    """Inside, cuda has a device guard: the CPU's, unless torch has one."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    registry = (ctypes.c_void_p * _N_DEVICE_TYPES).in_dll(library, _REGISTRY)
    before = registry[_CUDA]
    if not before:
        registry[_CUDA] = registry[_CPU]
    try:
        yield
    finally:
        registry[_CUDA] = before


def _get_data(tensor: FakeTensor) -> Any:
    return torch.Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _set_data(tensor: FakeTensor, new: torch.Tensor) -> None:
    """A fake tensor keeps its device apart from its data."""
    torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
    tensor.fake_device = new.device


class _HostGenerator(torch.Generator):
    """On the host, whatever device it is for."""

    def __new__(cls, device: Any = None) -> _HostGenerator:
        return super().__new__(cls)


def _streams() -> list[Any]:
    """Streams, events, guards and generators that do nothing. Their order is the subject of other tests."""

    def nothing(*_: Any, **__: Any) -> Any:
        return mock.MagicMock()

    names = ("Stream", "Event", "current_stream", "default_stream", "stream", "device", "set_device", "synchronize")
    random = ("get_rng_state", "set_rng_state", "manual_seed")
    return [
        *(mock.patch.object(torch.cuda, name, nothing) for name in (*names, *random)),
        mock.patch.object(torch, "Generator", _HostGenerator),
        mock.patch.object(torch.cuda, "default_generators", defaultdict(mock.MagicMock)),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=True),
        mock.patch.object(torch.Tensor, "record_stream", nothing),
        mock.patch.object(torch.Tensor, "is_pinned", return_value=True),
    ]


# -- workers ---------------------------------------------------------------------------------------------------------


class _Worker:
    """Does its work in the thread that submits it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        pass


class _Workers:
    def __init__(self, devices: Sequence[Device]) -> None:
        self._workers = {one.name: _Worker(one) for one in devices}

    def __getitem__(self, name: str) -> _Worker:
        return self._workers[name]

    def close(self) -> None:
        pass


def _one_thread() -> list[Any]:
    """The actions of all workers, in the order of the schedule, in this thread: the modes of torch are its own."""
    original_work, original_acts = Executable.work, Passes.acts

    def work(self: Executable, n_microbatches: int, *, training: bool, only_backward: bool, **_: Any) -> Any:
        with mock.patch.multiple(self, _one_worker_suffices=True, _on_cpu=True):
            return original_work(
                self, n_microbatches, training=training, only_backward=only_backward, every_worker=False
            )

    def acts(self: Passes) -> Any:
        return {phase: _watched(phase.name, act) for phase, act in original_acts(self).items()}

    return [
        mock.patch.object(signatures, "WorkerPool", _Workers),
        mock.patch.object(Executable, "work", work),
        mock.patch.object(Passes, "acts", acts),
    ]


def _watched(phase: str, act: Callable[..., None]) -> Callable[..., None]:
    def watched(replica: StageReplica, microbatch: int) -> None:
        held = [leaf.tensor.device for leaf in replica.leaves] + [buffer.tensor.device for buffer in replica.buffers]
        stage = f"{phase} of stage {replica.stage.index} on {replica.worker.device.name}"
        with _watcher.named(stage, frozenset([replica.device, *held])), _watched_compute(replica):
            act(replica, microbatch)

    return watched


@contextlib.contextmanager
def _watched_compute(replica: StageReplica) -> Iterator[None]:
    compute = replica.compute

    def watched(*inputs: Any) -> Any:
        with _watcher.strict():
            return compute(*inputs)

    replica.compute = watched
    try:
        yield
    finally:
        replica.compute = compute


# -- autograd's engine -----------------------------------------------------------------------------------------------


def _engine() -> list[Any]:
    return [
        mock.patch.object(torch.autograd.Variable, "_execution_engine", SimpleNamespace(run_backward=run_backward)),
        mock.patch("autopar.capture.torch_private.backward_keeps_graph", return_value=False),
    ]


def run_backward(
    roots: Sequence[Any],
    gradients: Sequence[Any],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """What autograd's engine does, by its nodes: gradients of `inputs`; of all leaves where there are none."""
    assert not create_graph
    with torch.no_grad():
        return _Engine([_edge(x) for x in inputs]).run([(_edge(r), g) for r, g in zip(roots, gradients, strict=True)])


def _edge(x: Any) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(x) if isinstance(x, torch.Tensor) else x
    return edge.node, edge.output_nr


class _Engine:
    def __init__(self, wanted: Sequence[tuple[Any, int]]) -> None:
        self._wanted = list(wanted)
        self._captured: list[torch.Tensor | None] = [None] * len(wanted)
        self._arrived: defaultdict[Any, dict[int, torch.Tensor]] = defaultdict(dict)

    def run(self, roots: Sequence[tuple[tuple[Any, int], Any]]) -> tuple[torch.Tensor | None, ...]:
        for (node, place), gradient in roots:
            self._arrive(node, place, torch.ones(()) if gradient is None else gradient, "the root")
        for node in _parents_first([node for (node, _), _ in roots]):
            self._visit(node)
        return tuple(self._captured)

    def _visit(self, node: Any) -> None:
        arrived = self._arrived.pop(node, None)
        if arrived is None:
            return
        for number, (wanted, place) in enumerate(self._wanted):
            if wanted == node:
                self._captured[number] = arrived.get(place)
        if node.name() == "torch::autograd::AccumulateGrad":
            if not self._wanted:
                node(arrived[0])
            return
        given = [arrived.get(i) for i in range(len(node._input_metadata))]
        with _watcher.strict():
            sent = _sent(node, given)
        for (child, place), gradient in sent:
            if child is not None and gradient is not None:
                self._arrive(child, place, gradient, node.name())

    def _arrive(self, node: Any, place: int, gradient: torch.Tensor, maker: str) -> None:
        """A gradient for output `place` of a node, made by another: of the output's device, shape and type."""
        like = node._input_metadata[place]
        if gradient.device != like.device and gradient.dim():
            variable = getattr(node, "variable", None)
            what = node.name() if variable is None else f"a leaf of shape {list(variable.shape)}"
            raise AssertionError(
                f"{_watcher.stage}: the gradient of {what} on {like.device} arrives on {gradient.device}, from {maker}"
            )
        gradient = gradient.to(like.device)
        if gradient.shape != torch.Size(like.shape):
            gradient = gradient.sum_to_size(like.shape)
        gradient = gradient.to(like.dtype)
        before = self._arrived[node]
        before[place] = before[place] + gradient if place in before else gradient


def _sent(node: Any, gradients: Sequence[torch.Tensor | None]) -> list[tuple[tuple[Any, int], Any]]:
    """The gradients that a node sends, each with where it goes."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        found = node(*gradients)
        return list(zip(node.next_functions, found if isinstance(found, tuple) else (found,), strict=True))
    # One result for every argument of the user's forward; only those that are tensors have a place to go to.
    found = node.apply(*gradients)
    found = found if isinstance(found, tuple) else (found,)
    needed = [gradient for gradient, needs in zip(found, node.needs_input_grad, strict=True) if needs]
    return list(zip([edge for edge in node.next_functions if edge[0] is not None], needed, strict=True))


def _parents_first(roots: Sequence[Any]) -> list[Any]:
    """All nodes behind the roots, each before those that it sends gradients to."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order[::-1]
