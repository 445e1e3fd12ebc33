"""Collectives measured among the processes of torch.distributed, with any backend."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from cost_models.collectives.formulas import COLLECTIVES, Collective
from cost_models.hardware.devices import synchronize

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of the tensors that collectives are measured with."""

# Their names from torch 2.13 on, and before.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ROUNDS, FEW_ROUNDS = 7, 2
WARM_UP_ROUNDS = 2  # the first calls open connections


@dataclass(frozen=True)
class MeasuredCollectives:
    """Seconds of collectives by size, of all groups of one shape.

    Raises:
        ValueError: sizes do not ascend, or a collective has not one positive time for each.
    """

    nodes: int
    per_node: int  # devices in each node; where the numbers differ, in the node with the fewest
    sizes: tuple[int, ...]  # ascending bytes
    times: Mapping[Collective, tuple[float, ...]] = field(hash=False)  # s at each of the sizes
    uneven: tuple[int, ...] = ()  # devices in every node, ascending, where the numbers differ
    in_turn: bool = False  # groups that run the same collective at once take turns: one thread does all of them

    def __post_init__(self) -> None:
        if (
            not self.sizes
            or self.sizes[0] <= 0
            or any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        ):
            raise ValueError(f"sizes must be ascending numbers of bytes > 0, got {self.sizes}")
        for collective, times in self.times.items():
            if len(times) != len(self.sizes) or any(not t > 0 for t in times):
                raise ValueError(f"{collective} needs {len(self.sizes)} times > 0, got {times}")

    def seconds(self, collective: Collective, nbytes: float) -> float:
        """Seconds at `nbytes`: linear between the sizes, as the smallest below them, proportional to bytes above.

        Times that shrink as bytes grow are noise: their running maximum counts, so that more bytes never cost less.
        """
        times = np.maximum.accumulate(self.times[collective])
        if nbytes > self.sizes[-1]:
            return float(times[-1]) * nbytes / self.sizes[-1]
        return float(np.interp(nbytes, self.sizes, times))


def measure_collectives(
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    sizes: Sequence[int] = SIZES,
    *,
    which: Sequence[Collective] = COLLECTIVES,
    hosts: Sequence[object] | None = None,
    longest: float = math.inf,
) -> MeasuredCollectives:
    """The median seconds of collectives in `group`; all its processes call this together and get the same.

    A size is rounded up to a multiple of 4 bytes a process. The time is that of the slowest process. `send_recv` is
    from the first process of the group to the last, which lies in another node where there are several. `hosts`: of
    the group's processes in order; default: their host names. `longest`: no larger size follows one that takes longer
    than these seconds.

    Raises:
        RuntimeError: torch.distributed is not initialised, or the group has one process alone.
    """
    if not dist.is_initialized():
        raise RuntimeError("collectives are measured among processes; call torch.distributed.init_process_group first")
    n = dist.get_world_size(group)
    if n == 1:
        raise RuntimeError("collectives are measured among two processes or more; the group has one")
    if hosts is None:
        names: list[object] = [""] * n
        dist.all_gather_object(names, socket.gethostname(), group=group)
        hosts = names
    device = torch.device(device)
    rounded = tuple(dict.fromkeys(-(-size // (4 * n)) * 4 * n for size in sorted(sizes)))
    used: list[int] = []
    found: dict[Collective, list[float]] = {collective: [] for collective in which}
    for size in rounded:
        if any(times and times[-1] > longest for times in found.values()):
            break
        used.append(size)
        for collective, times in found.items():
            few = bool(times) and times[-1] > longest / 10
            times.append(_measure(_call(collective, size, group, device), group, device, few=few))
    counts = sorted(Counter(hosts).values())
    uneven = tuple(counts) if counts[0] < counts[-1] else ()
    times_of = {collective: tuple(times) for collective, times in found.items()}
    return MeasuredCollectives(len(counts), counts[0], tuple(used), times_of, uneven)


def _call(
    collective: Collective, nbytes: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """One call of a collective on float32 tensors of `nbytes` bytes."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(nbytes // 4, device=device)
    part = torch.zeros(nbytes // 4 // n, device=device)
    first, last = (rank_of if group is None else dist.get_global_rank(group, rank_of) for rank_of in (0, n - 1))

    def send_recv() -> None:
        if rank == 0:
            dist.send(whole, last, group=group)
        elif rank == n - 1:
            dist.recv(whole, first, group=group)

    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: _ALL_GATHER(whole, part, group=group),
        "reduce_scatter": lambda: _REDUCE_SCATTER(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "send_recv": send_recv,
    }
    return calls[collective]


def _measure(
    call: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device, *, few: bool = False
) -> float:
    """Median seconds of `call` in the slowest process, each round from a common start. `few`: of FEW_ROUNDS."""
    samples = []
    for turn in range(WARM_UP_ROUNDS + (FEW_ROUNDS if few else ROUNDS)):
        dist.barrier(group)
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if turn >= WARM_UP_ROUNDS:
            samples.append(time.perf_counter() - start)
    slowest = torch.tensor([statistics.median(samples)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)
