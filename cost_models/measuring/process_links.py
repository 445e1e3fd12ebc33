"""Links between the processes of torch.distributed, measured by size while all of them take part.

Ranks of one host share a link, and every ordered pair of hosts has its own, measured between their first ranks. Pairs
that share no host are measured at the same time, round by round, so that n hosts take n rounds:

    round 0    a pair of ranks within every host
    round 1    hosts 0-3  1-2        each both ways, one after the other
    round 2    hosts 0-2  3-1
    round 3    hosts 0-1  2-3

Then all ranks of two hosts send at once: where that takes longer than one of them alone, they share a network card.

    sender     go -- n bytes ---------> |                the receive is posted before, as the runtime posts its own
    receiver        | <---- 8 bytes --- answer           seconds = until the answer - half of a round trip of 8 bytes

Answers always travel between the hosts, over gloo. The messages are tensors of the CPU that do the same, or go from GPU
to GPU by other means (`Messages`): then the receiver waits for its GPU before it answers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cost_models.hardware.devices import synchronize
from cost_models.hardware.links import Link, fit_link

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of the messages: latency decides the small ones, bandwidth the large ones."""

LONGEST = 0.2
"""s: after a message that takes longer than this, no larger one is sent. Such a network is known well enough."""

ROUNDS, WARM_UP_ROUNDS, FEW_ROUNDS = 7, 2, 2
"""Repeats of a message; few of one that takes longer than a tenth of LONGEST. The first ones open connections."""

SHARED = 1.3
"""If all ranks of two hosts send at once, and their messages take this many times as long as one alone, they share a
card."""

_ANSWER = 8  # bytes


@dataclass(frozen=True)
class Messages:
    """What carries the messages that are measured. Both functions take a tensor and the other rank, and return what
    has a `wait()`."""

    device: torch.device  # of the tensors
    send: Callable[[torch.Tensor, int], Any]
    receive: Callable[[torch.Tensor, int], Any]


@dataclass(frozen=True)
class ProcessLinks:
    """What was measured between processes on several hosts, or on one."""

    links: Mapping[tuple[int, int], Link]  # of every ordered pair of ranks
    shared: bool  # ranks of a host share its card to other hosts

    def within(self, hosts: Sequence[int]) -> Link | None:
        """The slowest link between ranks of one host; None where no host has two ranks."""
        return slowest(link for (a, b), link in self.links.items() if hosts[a] == hosts[b])

    def between(self, hosts: Sequence[int]) -> Link | None:
        """The slowest link between ranks of different hosts; None where there is one host."""
        return slowest(link for (a, b), link in self.links.items() if hosts[a] != hosts[b])


def slowest(links: Any) -> Link | None:
    """The largest latency with the lowest bandwidth; None without links."""
    known = list(links)
    return Link(max(x.latency for x in known), min(x.bandwidth for x in known)) if known else None


def measured_pairs(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The ranks, as (source, target), between which `measure_process_links` and `probe_process_links` send messages."""
    together, _ = _at_once(hosts)
    return sorted({pair for pairs in _rounds(hosts) for pair in pairs} | set(together))


def measure_process_links(hosts: Sequence[int], group: Any, messages: Messages | None = None) -> ProcessLinks:
    """The links between all ranks of `group`, which has tags (gloo). Collective: all its ranks call this together.

    `hosts[rank]`: a number of the host, the same for ranks that share one. `messages`: between the `measured_pairs`;
    None: over `group`. Every rank gets the same result.
    """
    carried = _over(group) if messages is None else messages
    rank, first = dist.get_rank(), _first_ranks(hosts)
    measured: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    for pairs in _rounds(hosts):
        dist.barrier(group)
        for source, target in pairs:
            found = _one_way(source, target, group, carried) if rank in (source, target) else None
            if found is not None and rank == source:
                measured[source, target] = found
    shared = _measure_sharing(hosts, measured, group, carried)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (measured, shared), group=group)
    fitted = {pair: fit_link(*times) for one, _ in everyone for pair, times in one.items()}
    own = {hosts[a]: link for (a, b), link in fitted.items() if hosts[a] == hosts[b]}
    links = {
        (a, b): own[hosts[a]] if hosts[a] == hosts[b] else fitted[first[hosts[a]], first[hosts[b]]]
        for a, b in itertools.permutations(range(len(hosts)), 2)
    }
    return ProcessLinks(links, any(shared for _, shared in everyone))


def probe_process_links(
    hosts: Sequence[int], known: ProcessLinks, group: Any, messages: Messages | None = None
) -> float:
    """The largest factor by which a message of 256 KiB between hosts differs now from `known`; 1 for one host.

    Collective. It takes milliseconds: enough to see that a network is not the one that was measured before.
    """
    rank, worst = dist.get_rank(), 1.0
    carried = _over(group) if messages is None else messages
    for pairs in _rounds(hosts):
        dist.barrier(group)
        for source, target in pairs:
            if rank not in (source, target) or hosts[source] == hosts[target]:
                continue
            found = _one_way(source, target, group, carried, sizes=(256 << 10,))
            if found is not None and rank == source:
                sizes, seconds = found
                expected = known.links[source, target].seconds(sizes[0])
                worst = max(worst, seconds[0] / expected, expected / seconds[0])
    largest = torch.tensor([worst], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)


def _first_ranks(hosts: Sequence[int]) -> dict[int, int]:
    """By host."""
    first: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return first


def _rounds(hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs (source, target) of ranks, both directions; the pairs of one round share no host, but for directions."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    inside = [pair for ranks in members.values() if len(ranks) > 1 for pair in (ranks[:2], ranks[1::-1])]
    rounds = [[(a, b) for a, b in inside]] if inside else []
    ring: list[int | None] = [ranks[0] for ranks in members.values()]
    if len(ring) % 2:
        ring.append(None)
    for _ in range(len(ring) - 1 if len(members) > 1 else 0):  # the circle method for tournaments
        halves = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        met = [(a, b) for a, b in halves if a is not None and b is not None]
        rounds.append([pair for a, b in met for pair in ((a, b), (b, a))])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _over(group: Any) -> Messages:
    """Tensors of the CPU over gloo."""

    def send(tensor: torch.Tensor, target: int) -> Any:
        return dist.isend(tensor, target, group=group)

    def receive(tensor: torch.Tensor, source: int) -> Any:
        return dist.irecv(tensor, source, group=group)

    return Messages(torch.device("cpu"), send, receive)


def _one_way(
    source: int, target: int, group: Any, messages: Messages, sizes: Sequence[int] = SIZES
) -> tuple[list[int], list[float]] | None:
    """Sizes, and median seconds of a message from `source` to `target`; None on the target. Both ranks call this."""
    if dist.get_rank() == target:
        _receiving(source, group, _over(group))
        _receiving(source, group, messages)
        return None
    half = _median(target, _ANSWER, ROUNDS, group, _over(group)) / 2
    _order(target, 0, 0, group)
    used, seconds, last = [], [], 0.0
    for size in sizes:
        if last > LONGEST:
            break
        rounds = FEW_ROUNDS if last > LONGEST / 10 else ROUNDS
        last = _median(target, size, rounds, group, messages)
        used.append(size)
        seconds.append(max(last - half, last / 2))
    _order(target, 0, 0, group)
    return used, seconds


def _order(target: int, nbytes: int, times: int, group: Any) -> None:
    dist.send(torch.tensor([nbytes, times]), target, group=group)


def _median(target: int, nbytes: int, rounds: int, group: Any, messages: Messages) -> float:
    """Median seconds from sending a message until its answer is here."""
    warm_up = WARM_UP_ROUNDS if rounds > FEW_ROUNDS else 0
    _order(target, nbytes, warm_up + rounds, group)
    message = torch.zeros(nbytes, dtype=torch.uint8, device=messages.device)
    answer = torch.zeros(_ANSWER, dtype=torch.uint8)
    samples = []
    for turn in range(warm_up + rounds):
        dist.recv(answer, target, group=group)  # the receive is posted
        start = time.perf_counter()
        sent = messages.send(message, target)
        dist.recv(answer, target, group=group)
        sent.wait()
        if turn >= warm_up:
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _receiving(source: int, group: Any, messages: Messages) -> None:
    """Answer what `_median` sends, until there is no more."""
    order, answer = torch.zeros(2, dtype=torch.int64), torch.zeros(_ANSWER, dtype=torch.uint8)
    while True:
        dist.recv(order, source, group=group)
        nbytes, times = order.tolist()
        if times == 0:
            return
        message = torch.zeros(nbytes, dtype=torch.uint8, device=messages.device)
        for _ in range(times):
            posted = messages.receive(message, source)
            dist.send(answer, source, group=group)
            posted.wait()
            synchronize(messages.device)
            dist.send(answer, source, group=group)


def _at_once(hosts: Sequence[int]) -> tuple[list[tuple[int, int]], bool]:
    """Ranks of the first host, each with one of the next host that has several; and whether there are any."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for one, host in enumerate(hosts):
        members[host].append(one)
    first, *others = members.values()
    second = next((ranks for ranks in others if len(ranks) >= 2), None)
    if len(first) < 2 or second is None:
        return [], False
    return list(zip(first, second, strict=False)), True


def _measure_sharing(
    hosts: Sequence[int],
    measured: Mapping[tuple[int, int], tuple[list[int], list[float]]],
    group: Any,
    messages: Messages,
) -> bool:
    """Whether the ranks of the first host slow each other down if all send to the next host with as many ranks."""
    pairs, can_share = _at_once(hosts)
    if not can_share:
        return False
    rank = dist.get_rank()
    found: tuple[list[int], list[float]] | None = None
    largest = torch.tensor([0])  # the size that was measured alone; all pairs send it
    if rank == pairs[0][0]:
        largest[0] = measured[pairs[0]][0][-1]
    dist.broadcast(largest, pairs[0][0], group=group)
    dist.barrier(group)
    for source, target in pairs:
        if rank in (source, target):
            found = _one_way(source, target, group, messages, sizes=(int(largest),))
    if rank != pairs[0][0] or found is None:
        return False
    return found[1][0] > SHARED * measured[pairs[0]][1][-1]
