"""A stand-in for NCCL between threads: one queue for every ordered pair of ranks, no tags, and nothing is buffered.

A send and a receive match by the order in which they were posted. An exchange holds its thread until all its transfers
have ended, which NCCL does only to its stream: what gets through here needs no two streams that go on side by side.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

PATIENCE = 10.0  # s; a rank that waits longer has deadlocked


class Deadlock(Exception):
    """A rank waited for another one that did not come."""


class PairQueues:
    """The queues of all pairs. `most_ahead`: the most receives that any pair had posted without a send."""

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.most_ahead = 0
        self._changed = threading.Condition()
        self._sends: defaultdict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[_Posted]] = defaultdict(deque)

    @cached_property
    def headers(self) -> PairQueues:
        """Queues of their own, for what hosts exchange beside the tensors of GPUs."""
        return PairQueues(patience=self.patience)

    def of(self, rank: int) -> RankLink:
        return RankLink(self, rank)

    def post(self, pair: tuple[int, int], tensor: torch.Tensor, *, receive: bool) -> _Posted:
        one = _Posted(self, tensor)
        with self._changed:
            (self._receives if receive else self._sends)[pair].append(one)
            while self._sends[pair] and self._receives[pair]:
                sent, received = self._sends[pair].popleft(), self._receives[pair].popleft()
                if sent.tensor.shape != received.tensor.shape or sent.tensor.dtype != received.tensor.dtype:
                    raise AssertionError(f"{pair}: a send of {sent.tensor} met a receive of {received.tensor.shape}")
                received.tensor.copy_(sent.tensor)
                sent.done = received.done = True
            self.most_ahead = max(self.most_ahead, len(self._receives[pair]))
            self._changed.notify_all()
        return one

    def wait(self, posted: _Posted) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: posted.done, self.patience):
                raise Deadlock


class _Posted:
    def __init__(self, queues: PairQueues, tensor: torch.Tensor) -> None:
        self.queues, self.tensor, self.done = queues, tensor, False

    def wait(self) -> None:
        self.queues.wait(self)


class RankLink:
    """The link of one rank."""

    def __init__(self, queues: PairQueues, rank: int) -> None:
        self._queues, self._rank = queues, rank

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Any:
        return self._queues.post((self._rank, target), tensor, receive=False)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return self._queues.post((source, self._rank), tensor, receive=True)

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Any:
        posted = [self.send(tensor, other, 0) for tensor, other in sends]
        posted += [self.receive(tensor, other, 0) for tensor, other in receives]
        for one in posted:
            one.wait()
        return posted[0]
