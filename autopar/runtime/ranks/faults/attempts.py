"""The process group of one attempt: torchrun starts all processes anew after a failure, or on other machines.

Unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set, torchrun keeps one store for all attempts. What the ranks of an
attempt write there to find each other is overwritten by those of the next one, which may read it too early and wait
for processes that have ended. So the ranks of an attempt agree on a number of their own first, under which they write
everything else. torchrun's count of restarts cannot be that number: it differs between the machines of an attempt where
one restarted for its own failure, and another because a machine came or went.

```
   rank r   writes "hello/r": a word that no other process has ........... waits for "answer/<word>" .. "known/n/r"
   rank 0   n = number of attempts so far, counted in the store; answers every hello with n, until all know it
```
Rank 0 may answer the hello of a process that has ended. It then answers the next one as well.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError, warn
from autopar.runtime.ranks.faults.watcher import timeout_given

_POLL = 0.01  # s
_PATIENCE = 600.0  # s for all ranks to start


def start_group(backend: str) -> None:
    """Start torch's default process group from the variables that torchrun sets."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torch then makes a store of its own
        dist.init_process_group(backend)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=_PATIENCE))
    number = attempt_number(dist.PrefixStore("autopar/attempts", store), rank, size)
    dist.init_process_group(backend, store=dist.PrefixStore(f"autopar/{number}", store), rank=rank, world_size=size)


def attempt_number(store: Any, rank: int, size: int, patience: float = _PATIENCE) -> int:
    """The same on all ranks of this attempt, and another one than that of any attempt before.

    Raises AutoparError if not all ranks come within `patience` seconds. Warns once after the time after which a rank
    counts as failed.
    """
    wait = _Wait(patience)
    if rank == 0:
        return _answered(store, size, wait)
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", word)
    while not store.check([f"answer/{word}"]):
        wait.for_ranks("rank 0")
    number = int(store.get(f"answer/{word}"))
    store.set(f"known/{number}/{rank}", "")
    return number


def _answered(store: Any, size: int, wait: _Wait) -> int:
    """Rank 0's part."""
    number = int(store.add("count", 1))
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"known/{number}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"hello/{rank}"]):
                word = store.get(f"hello/{rank}")
                if answered.get(rank) != word:
                    answered[rank] = word
                    store.set(f"answer/{word.decode()}", str(number))
        if missing:
            several = "s" * (len(missing) > 1)
            wait.for_ranks(f"rank{several} {', '.join(map(str, sorted(missing)))}")
    return number


class _Wait:
    """For ranks that have not come."""

    def __init__(self, patience: float) -> None:
        self._start, self._patience, self._warns_after = time.monotonic(), patience, timeout_given()
        self._warned = False

    def for_ranks(self, who: str) -> None:
        """Sleep a moment."""
        waited = time.monotonic() - self._start
        why = "every rank must call parallelize without devices=, and a rank that passes devices= runs by itself"
        if waited > self._patience:
            raise AutoparError(f"{who} never joined, in {self._patience:g} s: {why}, or its process has ended")
        if waited > self._warns_after and not self._warned:
            self._warned = True
            warn(f"{who} has not joined after {waited:.0f} s: {why}, or it is slow to start; waiting on")
        time.sleep(_POLL)
