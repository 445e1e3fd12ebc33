"""The processes that run one plan: torchrun's, over torch.distributed. Rank i is the plan's device i."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.ranks import places
from autopar.runtime.ranks.attempts import start_group
from autopar.runtime.ranks.channels import Channel, TaggedChannel
from autopar.runtime.ranks.one_message import on_all_ranks, shown_once
from autopar.runtime.ranks.places import Place
from autopar.runtime.ranks.slurm import rank_variables
from autopar.runtime.ranks.watcher import Watcher, watch
from cost_models.hardware.devices import Device, parse_devices

_worlds: dict[Any, World] = {}  # by torch's default process group


@dataclass
class World:
    """All ranks, and the process groups that autopar uses beside the user's own."""

    rank: int
    size: int
    control: Any  # process group of all ranks: plans, checks, losses, outputs
    wire: Any  # of all ranks: messages between stages
    watcher: Watcher
    places: tuple[Place, ...] = ()  # by rank, once `devices` has gathered them
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def groups(self, wanted: Sequence[tuple[int, ...]]) -> Mapping[tuple[int, ...], Any]:
        """Process groups of several ranks each, this rank's own ones. Collective: all ranks ask for the same."""
        for ranks in sorted(set(wanted) - self._groups.keys()):
            if len(ranks) > 1:
                self._groups[ranks] = dist.new_group(list(ranks), backend="gloo")
        return {ranks: self._groups[ranks] for ranks in set(wanted) if len(ranks) > 1 and self.rank in ranks}

    def channel(self) -> Channel:
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

    def gathered_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers of at most 64 bits, by rank; as many on all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.control)
        return [theirs.tolist() for theirs in found]

    def gathered_floats(self, number: float) -> list[float]:
        """Every rank's number, by rank."""
        own = torch.tensor(number, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.control)
        return [theirs.item() for theirs in found]

    def differ(self, number: torch.Tensor) -> bool:
        """Whether a 64-bit number differs between ranks."""
        found = [torch.empty_like(number) for _ in range(self.size)]
        dist.all_gather(found, number, group=self.control)
        return any(bool(theirs != number) for theirs in found)

    def all_reduced(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        dist.all_reduce(numbers, group=self.control)
        return numbers

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite `tensor` everywhere with that of rank `source`. Any dtype: its bytes travel."""
        if tensor.numel():
            whole = tensor.contiguous()
            dist.broadcast(whole.reshape(-1).view(torch.uint8), source, group=self.control)
            if whole is not tensor:
                tensor.copy_(whole)

    def devices(self, resident: Any) -> tuple[Device, ...]:
        """One CPU worker a rank; the ranks of a machine share its cores and memory. Collective. `resident`: see
        parse_devices."""
        own = parse_devices(["cpu"], resident)[0]
        everyone = self.gathered((places.here(), own.memory))
        self.places = tuple(place for place, _ in everyone)
        return tuple(
            replace(parse_devices(["cpu"])[0], name=f"cpu:{rank}", kind=kind, memory=memory, threads=threads)
            for rank, (kind, memory, threads) in enumerate(places.shares(everyone))
        )


def joined() -> World | None:
    """The world of this process, whose process group starts here unless it has; None in a process by itself. Tasks of
    srun get torchrun's variables.

    Raises InputError where ranks cannot run a plan.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        os.environ.update(rank_variables(os.environ))
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return None
        shown_once(int(os.environ.get("RANK", "0")))
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise on_all_ranks(
                InputError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: start the script "
                    "with torchrun --nproc-per-node N or with srun, or unset WORLD_SIZE to run in one process"
                )
            )
        _refuse_gpus()
        start_group()
    if dist.get_world_size() < 2:
        return None
    _refuse_gpus()
    default = dist.group.WORLD
    if default not in _worlds:
        _worlds.clear()  # of process groups that have ended
        rank, size = dist.get_rank(), dist.get_world_size()
        shown_once(rank)
        control, wire = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        _worlds[default] = World(rank, size, control, wire, watch(rank, size))
    return _worlds[default]


def current() -> World | None:
    """The world that `joined` has made for the process group in force; None in a process by itself."""
    return _worlds.get(dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None


def _refuse_gpus() -> None:
    if torch.cuda.is_available():
        raise InputError(
            "one process a device runs on CPUs over gloo so far, and this machine has GPUs: give devices= to use the "
            "GPUs from one process, or set CUDA_VISIBLE_DEVICES= to leave them out"
        )
