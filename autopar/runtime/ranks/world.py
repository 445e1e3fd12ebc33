"""The processes that run one plan: torchrun's, over torch.distributed. Rank i is the plan's device i."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import InputError
from autopar.lower import process_groups
from autopar.runtime.ranks import places
from autopar.runtime.ranks.faults import leaving
from autopar.runtime.ranks.faults.attempts import start_group
from autopar.runtime.ranks.faults.failure import names
from autopar.runtime.ranks.faults.watcher import Watcher, watch
from autopar.runtime.ranks.messages.channels import Channel, ExchangeChannel, HostChannel, TaggedChannel
from autopar.runtime.ranks.messages.exchange_wire import ExchangeWire
from autopar.runtime.ranks.messages.execution_messages import ExecutionMessages
from autopar.runtime.ranks.messages.wire import Routes, Trained, ValuesOf, Wire
from autopar.runtime.ranks.one_message import on_all_ranks, shown_once
from autopar.runtime.ranks.places import Place
from autopar.runtime.ranks.rank_device import (
    BOTH,
    backend_for,
    check_devices,
    gpu_names,
    own_device,
    sends_over_nccl,
)
from autopar.runtime.ranks.slurm import rank_variables
from cost_models.hardware.devices import Device, parse_devices

_CPU = torch.device("cpu")
_ROW = 32  # numbers that a rank announces a call with
_worlds: dict[Any, World] = {}  # by torch's default process group


@dataclass
class World:
    """All ranks, and the process groups that autopar uses beside the user's own."""

    rank: int
    size: int
    control: Any  # process group of all ranks, over gloo: plans, checks, facts about losses and outputs
    wire: Any  # of all ranks, over gloo: messages between stages, or their headers
    watcher: Watcher
    device: torch.device = _CPU  # of this rank
    over_nccl: bool = False  # how tensors of that device travel (rank_device.py)
    places: tuple[Place, ...] = ()  # by rank
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _exchanges: Any = None  # process group of all ranks, over NCCL: tensors of messages between stages
    _pairs: set[tuple[int, int]] = field(default_factory=set)  # (sender, receiver) that are connected there
    _meshes: dict[Any, DeviceMesh] = field(default_factory=dict)

    @property
    def carrier(self) -> torch.device:
        """Where tensors of this rank's device must be to travel."""
        return self.device if self.over_nccl else _CPU

    def groups(self, wanted: Sequence[tuple[int, ...]]) -> Mapping[tuple[int, ...], Any]:
        """Process groups of several ranks each, this rank's own ones. Collective: all ranks ask for the same.

        With NCCL, numbers of the hosts travel in them over gloo.
        """
        for ranks in sorted(set(wanted) - self._groups.keys()):
            if len(ranks) > 1:
                group = dist.new_group(list(ranks), backend=BOTH if self.over_nccl else "gloo")
                self._groups[ranks] = group
                if self.rank in ranks:
                    self.connect(group)
        return {ranks: self._groups[ranks] for ranks in set(wanted) if len(ranks) > 1 and self.rank in ranks}

    def mesh(self, ranks: np.ndarray[Any, Any], names: tuple[str, ...]) -> DeviceMesh:
        """The mesh of some ranks, with an axis for each name. Collective: all ranks ask for the same.

        Stages of several models share it, because torch keeps the process groups of every mesh.
        """
        key = (ranks.shape, tuple(ranks.flat), names)
        found = self._meshes.get(key)
        if found is None:
            found = self._meshes[key] = DeviceMesh(self.device.type, torch.from_numpy(ranks), mesh_dim_names=names)
            if self.rank in key[1]:
                for dim in range(len(names)):
                    self.connect(found.get_group(dim))
        return found

    def connect(self, group: Any) -> None:
        """Have a new process group, which this rank is in, ready to carry tensors. Collective in the group.

        NCCL connects at a group's first collective, for which the host waits. In the middle of a step, the rank that it
        waits for could be waiting for this one's messages.
        """
        leaving.remember_added(group)
        process_groups.carry_on_host(group.group_name, self.carrier != self.device)
        if self.over_nccl:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def leave(self) -> None:
        """The script ends: destroy the process groups that autopar has started (leaving.py)."""
        leaving.destroy(self.watcher, together=self.device.type == "cuda" and dist.is_nccl_available())

    def connect_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Have ranks ready to send each other tensors. Collective. `pairs`: (sender, receiver), the same on all ranks.

        NCCL connects two ranks at their first message, for which the hosts wait. All ranks connect pairs in one order:
        the first pair that is not connected yet is the next one on both of its ranks, so that none waits for ever.
        """
        if not self.over_nccl:
            return
        if self._exchanges is None:
            self._exchanges = dist.new_group(backend="nccl")
            self.connect(self._exchanges)
        channel, new = ExchangeChannel(self._exchanges), sorted(set(pairs) - self._pairs)
        for a, b in new:
            if self.rank in (a, b):
                token = torch.zeros(1, device=self.device)
                (channel.send(token, b, 0) if self.rank == a else channel.receive(token, a, 0)).wait()
        self._pairs.update(new)

    def channel(self) -> Channel:
        """For tensors of this rank's device."""
        if self.over_nccl:
            return ExchangeChannel(self._exchanges)
        return self.host_channel() if self.device == _CPU else HostChannel(self.host_channel())

    def new_wire(
        self, slot: int, routes: Routes, messages: ExecutionMessages, values: ValuesOf, trained: Trained
    ) -> Wire:
        """For the messages of one execution (wire.py)."""
        kind = ExchangeWire if self.over_nccl else Wire
        channels = self.channel(), self.host_channel()
        return kind(self.rank, slot, routes, messages, *channels, values, trained, device=self.device)

    def host_channel(self) -> Channel:
        """For tensors of the CPU, and for the rows of messages."""
        return TaggedChannel(self.wire)

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def outcome(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns. Where it raises on any rank, every rank raises: none of them waits for another.

        `what`: for the message of ranks where it did not fail. Collective.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        reasons = self.gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
        if not failed:
            return result
        if failure is None:
            ranks = ", ".join(map(str, failed))
            raise on_all_ranks(
                InputError(
                    f"{what} failed on rank {ranks} alone: {reasons[failed[0]]}; run the same script with the same "
                    "model, options and data on every rank"
                )
            )
        raise on_all_ranks(failure) if len(set(reasons)) == 1 else failure

    def broadcast_objects(self, values: list[Any], source: int) -> list[Any]:
        """The list of rank `source`, of the same length everywhere."""
        dist.broadcast_object_list(values, src=source, group=self.control)
        return values

    def broadcast_number(self, number: int, source: int) -> int:
        """That of rank `source`, of at most 64 bits."""
        carried = torch.tensor(number, dtype=torch.int64)
        dist.broadcast(carried, source, group=self.control)
        return int(carried.item())

    def gathered_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers of at most 64 bits, by rank; as many on all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.control)
        return [theirs.tolist() for theirs in found]

    def announced(self, kind: str, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Every rank's numbers, by rank, as the first thing that ranks exchange in a call (of the watcher). Collective.

        Ranks that make other calls announce theirs in rows of the same size. So all learn of it, and raise InputError,
        unless all calls are of one `kind` and have as many numbers.
        """
        first, rest = numbers[: _ROW - 2], numbers[_ROW - 2 :]
        own = [zlib.crc32(kind.encode()), len(numbers), *first]
        rows = self.gathered_numbers([*own, *[0] * (_ROW - len(own))])
        if any(row[:2] != rows[0][:2] for row in rows):
            raise on_all_ranks(InputError(_different_calls(self.gathered(self.watcher.position.what or kind))))
        more = self.gathered_numbers(rest) if rest else [[] for _ in rows]
        return [[*row[2 : 2 + len(first)], *others] for row, others in zip(rows, more, strict=True)]

    def differ(self, number: torch.Tensor) -> bool:
        """Whether a 64-bit number differs between ranks."""
        found = [torch.empty_like(number) for _ in range(self.size)]
        dist.all_gather(found, number, group=self.control)
        return any(bool(theirs != number) for theirs in found)

    def all_reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, where `numbers` is. Over NCCL, the host does not wait for it."""
        group, carrier = self._carrying(numbers)
        carried = numbers.to(carrier)
        dist.all_reduce(carried, group=group)
        return carried.to(numbers.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` everywhere with that of rank `source`. Any dtype: its bytes travel. On all ranks it is on
        the CPU, or on all on their GPUs."""
        if tensor.numel():
            whole = tensor.contiguous()
            group, carrier = self._carrying(whole)
            flat = whole.reshape(-1).view(torch.uint8)
            carried = flat.to(carrier)
            dist.broadcast(carried, source, group=group)
            if carried is not flat:
                flat.copy_(carried)
            if whole is not tensor:
                tensor.copy_(whole)

    def _carrying(self, tensor: torch.Tensor) -> tuple[Any, torch.device]:
        """The process group of all ranks that carries a tensor, and where the tensor must be for that."""
        if tensor.device.type == "cpu" or not self.over_nccl:
            return self.control, _CPU
        everyone = tuple(range(self.size))
        return self.groups([everyone])[everyone], self.device

    def command(self, n: int) -> str:
        """How torchrun starts `n` ranks, on as many machines as now if these can have equally many."""
        machines = len({place.machine for place in self.places})
        nodes = f"--nnodes {machines} " if machines > 1 and n % machines == 0 else ""
        return f"torchrun {nodes}--nproc-per-node {n // machines if nodes else n} {Path(sys.argv[0]).name}"

    def devices(self, resident: Any) -> tuple[Device, ...]:
        """The device of every rank, each with a name of its own: of all ranks, their tensors are on this rank's here.
        Collective. `resident`: see parse_devices.

        CPU workers of a machine share its cores and memory, and those of a GPU its memory.
        """
        own = parse_devices([self.device], resident)[0]
        if self.device.type == "cpu":
            found = places.shares(list(zip(self.places, self.gathered(own.memory), strict=True)))
            names = [f"cpu:{rank}" for rank in range(self.size)]
        else:
            names, gpus = gpu_names(self.places), Counter((place.machine, place.gpu) for place in self.places)
            found = [
                places.Share(kind, memory // gpus[place.machine, place.gpu], own.threads)
                for place, (kind, memory) in zip(self.places, self.gathered((own.kind, own.memory)), strict=True)
            ]
        return tuple(
            Device(name, self.device, kind, memory, threads)
            for name, (kind, memory, threads) in zip(names, found, strict=True)
        )


def _different_calls(calls: Sequence[str]) -> str:
    """What is wrong where ranks make different calls at the same time. `calls`: by rank."""
    ranks = {what: [rank for rank, one in enumerate(calls) if one == what] for what in dict.fromkeys(calls)}
    what = ", ".join(f"{names(theirs)} called {call}" for call, theirs in ranks.items())
    models = "" if len(ranks) > 1 else " of different models"
    return f"ranks make different calls: {what}{models}; every rank must make the same calls in the same order"


@contextlib.contextmanager
def together(what: str, devices: Any) -> Iterator[World | None]:
    """Around what all ranks do beside the calls of modules: the world of this process, if it is a rank, and the user
    has given no `devices` of this process alone.

    Raises InputError where other ranks make another call, and AutoparError, with its rank, where one has ended.
    """
    world = joined() if devices is None else None
    if world is None:
        yield None
        return
    with world.watcher.naming_lost():
        world.announced(what)
        yield world


def joined() -> World | None:
    """The world of this process, whose process group starts here unless it has; None in a process by itself. Tasks of
    srun get torchrun's variables.

    Raises InputError where ranks cannot run a plan.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        os.environ.update(rank_variables(os.environ))
        size = _number("WORLD_SIZE", 1)
        if size < 2:
            return None
        rank = _number("RANK", 0)
        shown_once(rank)
        if rank >= size:
            raise InputError(
                f"RANK is {rank}, but WORLD_SIZE is {size}, so that ranks are 0 to {size - 1}: start the script with "
                "torchrun --nproc-per-node N or with srun, which set both"
            )
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise on_all_ranks(
                InputError(
                    f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set: start the script "
                    "with torchrun --nproc-per-node N or with srun, or unset WORLD_SIZE to run in one process"
                )
            )
        start_group(backend_for(own_device()))
        leaving.remember_started()
    if dist.get_world_size() < 2:
        return None
    default = dist.group.WORLD
    if default not in _worlds:
        _worlds.clear()  # of process groups that have ended
        _worlds[default] = _new_world(own_device())
    return _worlds[default]


def _number(name: str, otherwise: int) -> int:
    """A variable that a launcher sets. Raises InputError for what is no number."""
    text = os.environ.get(name, str(otherwise))
    if not text.isdecimal():
        raise InputError(
            f"{name} must be a whole number >= 0, got {text!r}: start the script with torchrun --nproc-per-node N or "
            "with srun, which set it, or unset it to run in one process"
        )
    return int(text)


def _new_world(device: torch.device) -> World:
    """Collective. Raises InputError on all ranks where their devices do not fit together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shown_once(rank)
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(device)
    control, wire = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    over_nccl = sends_over_nccl(device)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (places.here(device), over_nccl), group=control)
    try:
        check_devices([place for place, _ in everyone], over_nccl=any(nccl for _, nccl in everyone))
    except InputError as error:
        raise on_all_ranks(error) from None
    found = tuple(place for place, _ in everyone)
    leaving.at_exit(_leave)
    for group in (control, wire):
        leaving.remember_added(group)
    world = World(rank, size, control, wire, watch(rank, size), device, over_nccl, found)
    if over_nccl:
        world.groups([tuple(range(size))])
    return world


def _leave() -> None:
    world = current()
    if world is not None:
        world.leave()
    leaving.gloo_lets_go()


def current() -> World | None:
    """The world that `joined` has made for the process group in force; None in a process by itself."""
    return _worlds.get(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
