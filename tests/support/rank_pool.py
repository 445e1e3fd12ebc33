"""Processes that run tests as ranks over gloo, on CPUs unless a pool is made for GPUs.

One process imports what they need, and all of them are forked from it. Equal models are exported once on each rank
(shared_exports.py), and the machine is measured once (shared_measurements.py).

A job is a function at the top level of a module. Every rank calls it inside a process group of its own, and what the
ranks return comes back by rank. A job that fails or hangs ends the pool, because other ranks may wait for the failed
one; the next job starts a new one.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import context
from shared_exports import SharedExports
from shared_measurements import measure_once

from autopar.capture import export

TIMEOUT = 120.0  # s for a job


class RankFailure(Exception):
    """A rank raised. The message has every failed rank's traceback."""


class RankPool:
    """Up to as many ranks as a job asks for."""

    def __init__(self, folder: Path, backend: str = "gloo", *, gpus: str | None = "") -> None:
        """`backend`: of the ranks' process groups. `gpus`: the numbers of those that ranks see; None: all."""
        self._folder, self._backend, self._gpus = folder, backend, gpus
        self._numbers = itertools.count()
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        """`job(*args)` on `n` ranks. Returns what each returned. Raises RankFailure, TimeoutError."""
        self._start(n)
        store = self._store()
        connections = [connection for _, connection in self._workers[:n]]
        for rank, connection in enumerate(connections):
            connection.send((job, args, rank, n, store, self._backend))
        results, failures = [], []
        end = time.monotonic() + TIMEOUT
        for rank, connection in enumerate(connections):
            # Once a rank has failed, the others may wait for it.
            if not connection.poll(max(0.1, (2.0 if failures else end - time.monotonic()))):
                failures.append(f"rank {rank} did not end")
                continue
            try:
                ok, value = connection.recv()
            except EOFError:
                ok, value = False, "its process ended"
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results

    def outcomes(
        self,
        job: Callable[..., Any],
        n: int,
        *args: Any,
        within: float,
        stopped: int | None = None,
        store_on_rank_0: bool = False,
    ) -> list[str]:
        """What became of `job(*args)` on each of `n` ranks after at most `within` seconds: "returned", "ended" (the
        process), "still runs", or the traceback of what it raised. The ranks end with the job.

        `stopped`: a rank that cannot end by itself, so that nobody waits for it once all others have.
        `store_on_rank_0`: ranks meet in a store that ends with rank 0, as without torchrun."""
        self._start(n)
        store = f"tcp://127.0.0.1:{free_port()}" if store_on_rank_0 else self._store()
        connections = [connection for _, connection in self._workers[:n]]
        for rank, connection in enumerate(connections):
            connection.send((job, args, rank, n, store, self._backend))
        end, found = time.monotonic() + within, ["still runs"] * n
        for rank in sorted(range(n), key=lambda rank: rank == stopped):
            if not connections[rank].poll(0.0 if rank == stopped else max(0.0, end - time.monotonic())):
                continue
            try:
                ok, value = connections[rank].recv()
                found[rank] = "returned" if ok else value
            except (EOFError, ConnectionResetError):
                found[rank] = "ended"
        self.close()
        return found

    def _store(self) -> str:
        return f"file://{self._folder / f'store{next(self._numbers)}'}"

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self, n: int) -> None:
        forks = context()
        while len(self._workers) < n:
            ours, theirs = forks.Pipe()
            process = forks.Process(target=_serve, args=(theirs, self._gpus), daemon=True)
            process.start()
            self._workers.append((process, ours))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _serve(connection: Connection, gpus: str | None) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    export._export = SharedExports(export._export)
    measure_once()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    while True:
        try:
            job, args, rank, n, store, backend = connection.recv()
        except EOFError:
            return
        try:
            os.environ["LOCAL_WORLD_SIZE"] = str(n)
            timeout = datetime.timedelta(seconds=TIMEOUT)
            os.environ["LOCAL_RANK"] = str(rank)
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=n, timeout=timeout)
            connection.send((True, job(*args)))
            dist.destroy_process_group()
        except BaseException:
            connection.send((False, traceback.format_exc()))
