"""Gathered tensors: a stage keeps their shards for the backward, and gathers them there once more.

    forward     x_0 .. x_n-1 -- all_gather -- kept_as_shards -- x -- queries, keys, values, whose weights' gradients
    backward                                   all_gather again, once for all of them        need x

Autograd asks hooks what to keep of a tensor. Inside `keeping_shards`, they answer for a gathered tensor, or a view of
it, with its shards, and gather these again when the first of its readers needs it; the result stays until the last one
has had it. So gradients are exactly those of a stage that keeps the gathered tensors. Megatron-LM does the same for its
column-parallel products (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
section 4.2.2; `LinearWithGradAccumulationAndAsyncCommunication`).

Groups of operators that run again for their backward (`rerun_groups`) gather in that run and keep what they gather
until their backward is done: it lives no longer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from autopar.capture import torch_private
from autopar.lower.collectives import MOVES, Move, Parts
from cost_models.graphs import storage_key
from cost_models.memory.saved_tensors import hooked

_running = threading.local()  # .known: the gathered tensors of the forward that runs in this thread


def kept_as_shards(parts: Parts, result: Parts, *, moves: Sequence[Move], mesh: Sequence[int]) -> list[torch.Tensor]:
    """`result`, which `moves` made of `parts`. Inside `keeping_shards`, autograd keeps `parts` in its place."""
    if keeps_shards():
        keep(result, Shards(parts, moves, mesh))
    return list(result)


def keeps_shards() -> bool:
    """Whether this thread is inside `keeping_shards`, and records gradients."""
    return getattr(_running, "known", None) is not None and torch.is_grad_enabled()


def keep(result: Parts, shards: Shards) -> None:
    """Where `keeps_shards`: autograd keeps `shards` in the place of `result`, which is made of them."""
    known: _Known = _running.known
    known.add(result, shards)


def with_shards_kept(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The code of a stage, run inside `keeping_shards`."""

    def compute_keeping_shards(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*inputs)
        with keeping_shards():
            return compute(*inputs)

    return compute_keeping_shards


@contextmanager
def keeping_shards() -> Iterator[None]:
    """Inside, autograd keeps the shards of tensors that pass `kept_as_shards`, and all others as without this.

    Hooks for saved tensors that are set outside keep getting all other tensors, and the shards.
    """
    known = _Known()
    before = getattr(_running, "known", None)
    with hooked(known.pack, known.unpack):
        _running.known = known
        try:
            yield
        finally:
            _running.known = before
            known.forget()


class _Unchanged(NamedTuple):
    """A tensor as it is, with the count of writes into it."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Unchanged:
        return cls(tensor, -1 if tensor.is_inference() else tensor._version)

    def get(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError, as autograd does without hooks, where something was written into it."""
        if self.version >= 0 and self.tensor._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self.tensor.shape)} is at version {self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


class _View(NamedTuple):
    """A gathered tensor of one device, or a view of it."""

    shards: Shards
    device: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    entries: tuple[torch.dtype, bool, bool]  # how a view reads the entries: as which, conjugated, negated

    @classmethod
    def of(cls, tensor: torch.Tensor, shards: Shards, device: int) -> _View:
        entries = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return cls(shards, device, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), entries)

    def get(self) -> torch.Tensor:
        return self.shards.gathered(self.device).as_strided(self.size, self.stride, self.offset)


class Shards:
    """What is kept of a tensor that was gathered for all devices of a mesh."""

    def __init__(self, parts: Parts, moves: Sequence[Move], mesh: Sequence[int]) -> None:
        self._parts: Sequence[Any] = [part.detach() for part in parts]  # later: as they were packed
        self._moves, self._mesh = moves, mesh
        devices = dict.fromkeys(part.device for part in parts if part.device.type == "cuda")
        # The engine's thread for a GPU has that GPU's stream alone: on the others the shards are made on these.
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        self._lock = threading.Lock()  # the engine has a thread for each GPU
        self._gathered: list[torch.Tensor] | None = None
        self._readers = self._left = 0

    def add_reader(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        if self._unpack is None:
            self._parts, self._unpack = [pack(part) for part in self._parts], unpack
        self._readers += 1

    def gathered(self, device: int) -> torch.Tensor:
        """The gathered tensor of a device, for one of its readers."""
        with self._lock:
            if self._gathered is None:
                self._gathered, self._left = self._gather(), self._readers
            found = self._gathered[device]
            self._left -= 1
            if not self._left:
                self._gathered = None
            return found

    def _gather(self) -> list[torch.Tensor]:
        assert self._unpack is not None, "somebody keeps the tensor"
        found = [self._unpack(part) for part in self._parts]
        with ExitStack() as streams, torch.no_grad():
            for stream in self._streams:
                streams.enter_context(torch.cuda.stream(stream))
            for move in self._moves:
                found = self.moved(found, move)
        return found

    def moved(self, parts: list[torch.Tensor], move: Move) -> list[torch.Tensor]:
        """One step of gathering."""
        name, axis, dim = move
        return MOVES[name](parts, axis=axis, dim=dim, mesh=self._mesh)


class _Known:
    """The gathered tensors of one forward, and the hooks for what autograd keeps."""

    def __init__(self) -> None:
        self._outer = torch_private.saved_tensors_hooks()
        # By key of the storage. An entry goes with its storage, so that a later one with the same key is not taken for
        # it.
        self._gathered: dict[int, _View] = {}  # whole
        self._references: list[weakref.ref[Any]] = []

    def add(self, result: Parts, shards: Shards) -> None:
        for device, tensor in enumerate(result):
            key = storage_key(tensor)
            if key not in self._gathered:  # devices of one line may share a tensor
                self._gathered[key] = _View.of(tensor, shards, device)
                self._references.append(weakref.ref(tensor.untyped_storage(), partial(self._freed, key)))

    def _freed(self, key: int, _: Any) -> None:
        self._gathered.pop(key, None)

    def forget(self) -> None:
        self._gathered.clear()
        self._references.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        whole = self._gathered.get(storage_key(tensor)) if tensor.layout is torch.strided else None
        if whole is None or (view := _View.of(tensor, whole.shards, whole.device)).entries != whole.entries:
            return self._kept(tensor)
        view.shards.add_reader(self._kept, self.unpack)
        return view

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, (_View, _Unchanged)):
            return packed.get()
        assert self._outer is not None, "only hooks outside return other values"
        found: torch.Tensor = self._outer[1](packed)
        return found

    def _kept(self, tensor: torch.Tensor) -> Any:
        """Of a tensor that was not gathered."""
        return _Unchanged.of(tensor) if self._outer is None else self._outer[0](tensor)
