"""NCCL that is not there: ranks over gloo whose tensors say that they are on a GPU of their own (pretend_gpus.py).

The runtime of ranks is the real one, with values. It takes the way of NCCL, and every collective or message of tensors
on a GPU is checked and recorded as NCCL would do it:

 - such tensors travel in process groups that have NCCL, and those of the CPU in groups that have gloo;
 - every group has a stream of its own. What it does starts after the current stream's kernels so far, and a wait makes
   the current stream wait, not the host;
 - torch holds the tensors of a collective until then; those of a message must be held by whoever posts it.

gloo carries the values, in the same order, between pairs without tags.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pretend_gpus import PretendGpus, _unrecorded, place_of
from pretend_streams import Event, Stream

from autopar.lower import process_groups
from autopar.runtime.ranks import rank_device
from autopar.runtime.ranks.signatures import RankSignatures
from autopar.runtime.ranks.world import World

_FUNCTIONAL = ("all_reduce", "all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_PLAIN = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_object", "broadcast_object_list")


class _End(NamedTuple):
    """In the place of dist.P2POp."""

    op: Any
    tensor: torch.Tensor
    peer: int
    group: Any


class PretendNccl:
    """For one rank of a gloo process group."""

    def __init__(self, patch: pytest.MonkeyPatch, *, shared: bool = False) -> None:
        """`shared`: all ranks on one GPU, over gloo."""
        self.gpus = PretendGpus(patch, dist.get_world_size())
        self.faults: list[str] = []
        self.forgets = ""  # a seeded fault: no stream waits for "messages", or for "collectives"
        self.carried: set[str] = set()  # what carried tensors of GPUs: kinds of collectives, "isend", "irecv"
        self._over_nccl: set[str] = set()  # names of process groups
        self._streams: dict[str, Stream] = {}
        self._pending: dict[int, tuple[Event, Any]] = {}  # by address of the result: when it is there, what torch holds
        self._shared = shared
        rank = dist.get_rank()
        patch.setitem(os.environ, "LOCAL_RANK", str(0 if shared else rank))
        place = torch.device("cuda", 0 if shared else rank)
        for name, value in {
            "init": lambda: None,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "pretended GPU",
            "get_device_properties": lambda device: types.SimpleNamespace(uuid=f"{device}", name="pretended GPU"),
            "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
        }.items():
            patch.setattr(torch.cuda, name, value)
        self.place = place
        if not shared:
            patch.setattr(dist, "get_backend_config", lambda group=None: rank_device.BOTH)
        patch.setattr(dist, "new_group", partial(self._new_group, dist.new_group))
        self._recorded(patch)
        for name in _PLAIN:
            patch.setattr(dist, name, partial(self._plain, name, getattr(dist, name)))
        self._one_by_one = {name: getattr(dist, name) for name in ("isend", "irecv")}
        for name, call in self._one_by_one.items():
            patch.setattr(dist, name, partial(self._message, name, call))
        patch.setattr(dist, "P2POp", _End)
        patch.setattr(dist, "batch_isend_irecv", self._exchange)
        patch.setattr(process_groups, "_ops", lambda: self._functional_ops)

    def recording(self) -> Any:
        return self.gpus.recording()

    def check(self) -> None:
        """Fail for anything that NCCL, or a GPU, would not have done right."""
        assert not self.faults, self.faults[:5]
        self.gpus.check()
        assert not self._pending, "nobody waited for a collective"

    # -- groups -------------------------------------------------------------------------------------------------------

    def _new_group(
        self, new: Callable[..., Any], ranks: Any = None, *args: Any, backend: Any = None, **more: Any
    ) -> Any:
        assert self._shared <= (backend == "gloo"), f"{backend} without NCCL"
        group = new(ranks, *args, backend="gloo", **more)
        if backend in ("nccl", rank_device.BOTH) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._over_nccl.add(group.group_name)
        return group

    def _recorded(self, patch: pytest.MonkeyPatch) -> None:
        """What allocates on the GPU outside of calls is recorded, too. The world connects the groups of meshes, which
        have the backends of the default group."""
        connect = World.connect

        def connected(world: World, group: Any) -> None:
            if world.over_nccl:
                self._over_nccl.add(group.group_name)
            with self.recording():
                connect(world, group)

        patch.setattr(World, "connect", connected)
        for place, name in ((World, "connect_pairs"), (RankSignatures, "_place_on_ranks")):
            patch.setattr(place, name, self._inside_recording(getattr(place, name)))

    def _inside_recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self.recording():
                return call(*args, **kwargs)

        return recorded

    def _check(self, kind: str, tensors: list[torch.Tensor], group: Any) -> bool:
        """Whether NCCL does it."""
        whole: Any = dist.group.WORLD if group is None else group
        name = group if isinstance(group, str) else whole.group_name
        places = {place_of(x) for x in tensors}
        on_gpu = any(place.type == "cuda" for place in places)
        if len(places) > 1:
            self.faults.append(f"{kind} mixes {places}")
        if on_gpu and places != {self.place}:
            self.faults.append(f"{kind} of tensors on {places} by the rank of {self.place}")
        if on_gpu != (name in self._over_nccl) and (on_gpu or kind in ("isend", "irecv")):
            self.faults.append(f"{kind} of tensors on {places} in a group {'with' if not on_gpu else 'without'} NCCL")
        if on_gpu:
            self.carried.add(kind)
        return on_gpu

    def _started(self, name: str, tensors: list[torch.Tensor]) -> Stream:
        """The group's stream, after what the current one has queued; it reads the tensors."""
        stream = self._streams.setdefault(name, Stream(self.gpus, self.place, f"NCCL {name}"))
        stream.wait_stream(self.gpus.current(self.place))
        self.gpus.queue(stream)
        for x in tensors:
            self.gpus.order.read(self.gpus.memory(x), stream.name, name)
        return stream

    # -- collectives and messages -------------------------------------------------------------------------------------

    def _plain(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """They are waited for where they are called."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        group: Any = kwargs.get("group", args[0] if kind == "barrier" and args else None)
        if self._check(kind, tensors, group):
            stream = self._started(group.group_name, tensors)
            for x in tensors:
                self.gpus.order.write(self.gpus.memory(x), stream.name, kind)
            self.gpus.current(self.place).wait_stream(stream)
        with _unrecorded():
            return call(*args, **kwargs)

    def _message(self, kind: str, call: Callable[..., Any], x: torch.Tensor, other: int, group: Any, **kw: Any) -> Any:
        if not self._check(kind, [x], group):
            with _unrecorded():
                return call(x, other, group=group, **kw)
        stream = self._started(group.group_name, [x])
        if kind == "irecv":
            self.gpus.order.write(self.gpus.memory(x), stream.name, kind)
        event = stream.record_event()
        with _unrecorded():
            # gloo would hold what it sends, as whoever posts must do for NCCL.
            work = call(x.clone() if kind == "isend" else x, other, group=group, **kw)

        def wait() -> None:
            work.wait()
            if self.forgets != "messages":
                self.gpus.current(self.place).wait_event(event)

        return types.SimpleNamespace(wait=wait)

    def _exchange(self, ends: Sequence[_End]) -> list[Any]:
        """One operation, on one stream."""
        kinds = [end.op.args[0] for end in ends]
        for kind, end in zip(kinds, ends, strict=True):
            self._check(kind, [end.tensor], end.group)
        stream = self._started(ends[0].group.group_name, [end.tensor for end in ends])
        for kind, end in zip(kinds, ends, strict=True):
            if kind == "irecv":
                self.gpus.order.write(self.gpus.memory(end.tensor), stream.name, kind)
        event, works = stream.record_event(), []
        with _unrecorded():
            for kind, end in zip(kinds, ends, strict=True):
                carried = end.tensor.clone() if kind == "isend" else end.tensor  # as above
                works.append(self._one_by_one[kind](carried, end.peer, group=end.group))

        def wait() -> None:
            for work in works:
                work.wait()
            if self.forgets != "messages":
                self.gpus.current(self.place).wait_event(event)

        return [types.SimpleNamespace(wait=wait)]

    @property
    def _functional_ops(self) -> Any:
        named = {name: partial(self._functional, name) for name in _FUNCTIONAL}
        return types.SimpleNamespace(**named, wait_tensor=self._wait)

    def _functional(self, name: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        group = rest[-1]
        on_gpu = self._check(name, [x], group)
        with _unrecorded():
            found: torch.Tensor = getattr(torch.ops._c10d_functional, name)(x, *rest)
        if on_gpu:
            stream = self._started(group, [x])
            if name != "all_reduce_":
                owner = self.gpus.current(self.place).name
                self.gpus._remember(found.untyped_storage(), self.place, f"the result of {name}", owner)
            self.gpus.order.write(self.gpus.memory(found), stream.name, name)
            self._pending[found.data_ptr()] = stream.record_event(), x
        return found

    def _wait(self, x: torch.Tensor) -> torch.Tensor:
        with _unrecorded():
            found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
        event, _ = self._pending.pop(x.data_ptr(), (None, None))
        if event is not None and self.forgets != "collectives":
            self.gpus.current(self.place).wait_event(event)
        return found


@contextmanager
def pretended(**settings: Any) -> Iterator[PretendNccl]:
    """Inside, this rank has a pretended GPU."""
    with pytest.MonkeyPatch.context() as patch:
        nccl = PretendNccl(patch, **settings)
        try:
            yield nccl
        finally:
            nccl.gpus.close()
