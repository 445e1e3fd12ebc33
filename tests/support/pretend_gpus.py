"""GPUs that are not there: tensors in the memory of the CPU that say `cuda:0`, and streams that only write down.

The code under test is the real one. Instead of torch.cuda's streams and events it gets those of pretend_streams.py,
and every operator on a tensor that says it is on a GPU is a kernel on the calling thread's current stream. Operators
compute at once, so results are right whatever the order; the oracle (happens_before.py) tells whether a GPU would have
been allowed to run them in another order. `waits` lists what makes a thread wait for a GPU, and where.

Where a tensor is, its storage knows: views and detached tensors are where the storage is. Under a capture, fake tensors
pass through unseen.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from happens_before import Clock, HappensBefore, Memory
from pretend_streams import ClockedQueue, Event, Stream
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import PipelinedModule, Plan
from autopar.capture.thread_state import CallerState
from autopar.capture.torch_private import is_fake
from autopar.runtime.step import execution, mailbox, transfers, workers
from autopar.runtime.step.execution import Execution
from cost_models import Device, parse_devices

_DEVICE = torch.Tensor.device
_TO = torch.Tensor.to
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero")
_CPU = torch.device("cpu")


def devices_of(plan: Plan) -> list[Device]:
    """The devices that a plan names, as `parse_devices` would make them."""
    (cpu,) = parse_devices(["cpu"])

    def device(name: str) -> Device:
        place = torch.device(name.partition("#")[0])
        return cpu if place.type == "cpu" else Device(name, place, "pretended GPU", 80 << 30, threads=1)

    return [device(name) for name in dict.fromkeys(name for stage in plan.stages for name in stage.devices)]


def pipelined(model: nn.Module, plan: Plan, **settings: Any) -> PipelinedModule:
    """The model on the devices that the plan names."""

    def no_search(example: object) -> Plan:
        raise AssertionError("the plan is given")

    return PipelinedModule(model, devices_of(plan), no_search, plan=plan, **settings)


def _init_stream(stream: Stream, gpus: PretendGpus, device: Any = None, **kwargs: Any) -> None:
    Stream.__init__(stream, gpus, device)


def _init_event(event: Event, gpus: PretendGpus, *args: Any, **kwargs: Any) -> None:
    Event.__init__(event, gpus)


class _Local(threading.local):
    def __init__(self) -> None:
        self.streams: dict[torch.device, Stream] = {}
        self.recording = False


class PretendGpus:
    """The recording stand-in. Patches live as long as `monkeypatch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int = 4) -> None:
        self.order = HappensBefore()
        self.waits: list[str] = []
        self.threads: dict[str, set[str]] = {}  # for each stream, the threads that queued kernels on it
        self.copies: list[tuple[Memory, Clock]] = []  # for each copy between devices: what it reads, what came before
        self.n_streams = self.n_recorded = 0  # streams, and calls of Tensor.record_stream
        self._local = _Local()
        self._alive = True
        self._default = {torch.device("cuda", i): Stream(self, f"cuda:{i}", "default") for i in range(n)}
        self._patch(monkeypatch)

    # -- for tests --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, this thread's operators are recorded."""
        if self._local.recording:
            yield
            return
        self._local.recording = True
        try:
            with _Recording(self):
                yield
        finally:
            self._local.recording = False

    def on(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """A copy of `tensor` on a pretended GPU, made by a kernel on the current stream that nobody has waited for."""
        return tensor.detach().to(device).clone().requires_grad_(tensor.requires_grad)

    def in_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Call the function on a thread of its own, whose current streams are the default ones."""
        before, raised = self.order.clock(self.thread), []

        def run() -> None:
            self.order.follow(self.thread, before)
            try:
                function(*args)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        self.order.follow(self.thread, self.order.clock(self.thread_of(thread)))
        if raised:
            raise raised[0]

    def close(self) -> None:
        """The test is over: tensors that outlive it are freed unseen."""
        self._alive = False
        transfers._copy_stream.cache_clear()
        transfers._has_peer_access.cache_clear()

    def check(self) -> None:
        """Fail if an operator could have run too early."""
        assert not self.order.faults, f"{len(self.order.faults)} faults\n" + "\n".join(self.order.faults[:5])

    @property
    def thread(self) -> str:
        return self.thread_of(threading.current_thread())

    @staticmethod
    def thread_of(thread: threading.Thread) -> str:
        """The thread as an actor."""
        return f"thread {thread.name} {thread.ident}"

    # -- for the stand-ins ------------------------------------------------------------------------------------------

    def queue(self, stream: Stream) -> None:
        self.order.queue(self.thread, stream.name)

    def wait(self, what: str) -> None:
        """The thread waits for a GPU."""
        self.waits.append(f"{what} in {threading.current_thread().name}: {_place_in_autopar()}")

    def current(self, device: Any = None) -> Stream:
        place = torch.device(device) if device is not None else torch.device("cuda", 0)
        return self._local.streams.get(place, self._default[place])

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = dict(self._local.streams)
        self._local.streams[stream.device] = stream
        try:
            yield
        finally:
            self._local.streams = before

    def actor(self, place: torch.device) -> str:
        """Who runs an operator on tensors of `place`: it is queued."""
        name = self.current(place).name if place.type == "cuda" else self.thread
        self.order.queue(self.thread, name)
        if place.type == "cuda":
            self.threads.setdefault(name, set()).add(threading.current_thread().name)
        return name

    def memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        found = getattr(storage, "pretended", None)
        return found if found is not None else self._remember(storage, place_of(tensor), "tensor from before", None)

    def made(self, tensor: torch.Tensor, place: torch.device, what: str, actor: str) -> None:
        """An operator has made `tensor`."""
        storage = tensor.untyped_storage()
        storage.place = place  # type: ignore[attr-defined]
        memory = self._remember(storage, place, f"the result of {what}", actor if place.type == "cuda" else None)
        self.order.write(memory, actor, what)

    def _remember(self, storage: Any, place: torch.device, name: str, owner: str | None) -> Memory:
        memory = Memory(name, owner)
        storage.place, storage.pretended = place, memory
        if owner is not None:
            weakref.finalize(storage, self._free, memory).atexit = False
        return memory

    def _free(self, memory: Memory) -> None:
        if self._alive:
            self.order.free(memory)

    def copy(self, source: torch.Tensor, target: torch.Tensor, place: torch.device, non_blocking: bool) -> None:
        """Write down a copy between devices as torch queues it: on the current stream of the source if both are GPUs
        (after the target's, which then waits for it), else on that of the GPU."""
        here = place_of(source)
        if here.type == place.type == "cuda":
            sender, receiver = self.current(here), self.current(place)
            sender.wait_stream(receiver)
            self._copy(source, target, place, self.actor(here), receiver.name)
            receiver.wait_stream(sender)
            return
        stream = self.current(place if place.type == "cuda" else here)
        host = target if place.type == "cpu" else source
        self._copy(source, target, place, self.actor(stream.device), stream.name)
        if not non_blocking or not is_pinned(host):
            self.wait(f"copy from {here} to {place}")
            self.order.follow(self.thread, self.order.clock(stream.name))

    def _copy(self, source: torch.Tensor, target: torch.Tensor, place: torch.device, actor: str, owner: str) -> None:
        self.copies.append((self.memory(source), self.order.clock(actor)))
        self.order.read(self.memory(source), actor, "copy")
        if getattr(target.untyped_storage(), "pretended", None) is None:
            self._remember(target.untyped_storage(), place, "a copy", owner if place.type == "cuda" else None)
        self.order.write(self.memory(target), actor, "copy")

    def moved(self, source: torch.Tensor, place: torch.device, dtype: Any, non_blocking: bool) -> torch.Tensor:
        """A copy of `source` on another device."""
        with _unrecorded():
            target = source.detach().clone() if dtype is None else source.detach().clone().to(dtype)
        if place.type == "cpu" and non_blocking:
            target.untyped_storage().pinned = True  # type: ignore[attr-defined]
        self.copy(source, target, place, non_blocking)
        return target

    # -- patches ----------------------------------------------------------------------------------------------------

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        patch = monkeypatch.setattr
        patch(torch.cuda, "_lazy_init", lambda: None)
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "device_count", lambda: len(self._default))
        # Classes, as code that is imported meanwhile may name them in annotations.
        patch(
            torch.cuda, "Stream", type("Stream", (Stream,), {"__init__": functools.partialmethod(_init_stream, self)})
        )
        patch(torch.cuda, "Event", type("Event", (Event,), {"__init__": functools.partialmethod(_init_event, self)}))
        patch(torch.cuda, "current_stream", self.current)
        patch(torch.cuda, "default_stream", lambda device: self._default[torch.device(device)])
        patch(torch.cuda, "stream", self.use)
        patch(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch(torch.cuda, "set_device", lambda device: None)
        patch(torch.cuda, "synchronize", lambda device=None: self.wait("torch.cuda.synchronize"))
        patch(torch.cuda, "can_device_access_peer", lambda a, b: True)
        patch(torch.Tensor, "device", property(place_of))
        patch(torch.Tensor, "to", self._to)
        patch(torch.Tensor, "cpu", lambda tensor: tensor.to("cpu"))
        patch(torch.Tensor, "record_stream", self._record_stream)
        clocked = types.SimpleNamespace(SimpleQueue=functools.partial(ClockedQueue, self), Empty=queue.Empty)
        for module in (mailbox, workers, execution):
            patch(module, "queue", clocked)
        self._patch_threads(monkeypatch)
        transfers._copy_stream.cache_clear()
        transfers._has_peer_access.cache_clear()

    def _patch_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record in workers, too. A caller that has seen all workers finish goes on after all they did."""
        applied, run, work = CallerState.applied, Execution.run, Execution._work

        @contextlib.contextmanager
        def recorded(state: CallerState, device: torch.device) -> Iterator[None]:
            with applied(state, device), self.recording():
                yield

        def ran(one: Execution, *args: Any) -> None:
            try:
                run(one, *args)
            finally:
                for name in getattr(one, "ran_on", ()):
                    self.order.follow(self.thread, self.order.clock(name))

        def working(one: Any, *args: Any) -> None:
            one.__dict__.setdefault("ran_on", []).append(self.thread)
            work(one, *args)

        monkeypatch.setattr(CallerState, "applied", recorded)
        monkeypatch.setattr(Execution, "run", ran)
        monkeypatch.setattr(Execution, "_work", working)

    @property
    def _record_stream(self) -> Callable[[torch.Tensor, Stream], None]:
        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            self.n_recorded += 1
            self.memory(tensor).recorded.add(stream.name)

        return record_stream

    @property
    def _to(self) -> Callable[..., torch.Tensor]:
        def to(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
            if is_fake(tensor) or tensor.is_meta:
                return _TO(tensor, *args, copy=copy, **kwargs)
            if args and isinstance(args[0], torch.Tensor):
                args = (place_of(args[0]), args[0].dtype, *args[1:])
            place, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            here = place_of(tensor)
            if place is None or place == here or place.type == "meta":
                rest = {"dtype": dtype} if dtype is not None else {}
                return _TO(tensor, *([place] if place is not None and place.type == "meta" else []), copy=copy, **rest)
            if tensor.requires_grad and torch.is_grad_enabled():
                found: torch.Tensor = _Moved.apply(self, tensor, place, dtype, non_blocking)
                return found
            return self.moved(tensor, place, dtype, non_blocking)

        return to


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gpus: PretendGpus, tensor: torch.Tensor, place: torch.device, dtype: Any, now: bool) -> Any:
        ctx.gpus, ctx.back = gpus, (place_of(tensor), tensor.dtype)
        return gpus.moved(tensor, place, dtype, now)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, ctx.gpus.moved(gradient, *ctx.back, False), None, None, None


class _Recording(TorchDispatchMode):
    """Every operator of one thread is recorded."""

    def __init__(self, gpus: PretendGpus) -> None:
        super().__init__()
        self._gpus = gpus

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(is_fake(x) or x.is_meta or isinstance(x, DTensor) for x in tensors) or _is_meta(kwargs.get("device")):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return is_pinned(args[0])
        if name == "_to_copy" and kwargs.get("device") not in (None, place_of(args[0])):
            return self._gpus.moved(args[0], kwargs["device"], kwargs.get("dtype"), kwargs.get("non_blocking", False))
        if name == "copy_" and place_of(args[0]) != place_of(args[1]):
            result = func(*args, **kwargs)
            self._gpus.copy(args[1], args[0], place_of(args[0]), bool((*args, kwargs.get("non_blocking"))[2]))
            return result
        return self._operator(func, name, args, kwargs, tensors)

    def _operator(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        order = self._gpus.order
        if name.startswith("new_") or name.endswith("_like"):
            if place_of(tensors[0]).type == "cuda" and kwargs.get("device") == _CPU and not kwargs.get("pin_memory"):
                kwargs["device"] = place_of(tensors[0])  # autograd's own code asks for the device that it sees
            place, tensors = self._place(name, kwargs, tensors), []  # it takes their sizes only
        else:
            place = self._place(name, kwargs, tensors)
        known = {id(x.untyped_storage()) for x in tensors}
        pinned = bool(kwargs.pop("pin_memory", False)) or name == "_pin_memory"
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        written = [x for x in _written(func, args, kwargs) if isinstance(x, torch.Tensor)]
        result = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        fresh = [x for x in made if id(x.untyped_storage()) not in known]
        if made and not fresh and not written:
            return result  # a view
        actor = self._gpus.actor(place)
        for x in tensors:
            order.read(self._gpus.memory(x), actor, name)
        for x in written:
            order.write(self._gpus.memory(x), actor, name)
        for x in fresh:
            x.untyped_storage().pinned = pinned  # type: ignore[attr-defined]
            self._gpus.made(x, place, name, actor)
        if place.type == "cuda" and (name in _WAITING or _reads_mask(name, args)):
            self._gpus.wait(name)
            order.follow(self._gpus.thread, order.clock(actor))
        return result

    def _place(self, name: str, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.device:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        places = {place_of(x) for x in tensors if x.dim()} or {place_of(x) for x in tensors}
        places |= {place_of(x) for x in tensors if place_of(x).type == "cuda"}  # numbers of the CPU go along
        if len(places) > 1:
            self._gpus.order.faults.append(f"{name} mixes {sorted(map(str, places))}: {_place_in_autopar()}")
        return next(iter(places), _CPU)


def place_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor says it is."""
    here: torch.device = _DEVICE.__get__(tensor)
    if here.type != "cpu" or tensor.layout is not torch.strided or is_fake(tensor):
        return here
    try:
        return getattr(tensor.untyped_storage(), "place", here)
    except (NotImplementedError, RuntimeError):  # a wrapper without memory
        return here


def is_pinned(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor.untyped_storage(), "pinned", False))


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))


def _reads_mask(name: str, args: Any) -> bool:
    """Whether an index is a mask, whose number of entries the host must know."""
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield


def _place_in_autopar() -> str:
    frames = [f for f in traceback.extract_stack() if "/autopar/" in f.filename]
    return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames[:-4:-1]) or "the caller"
