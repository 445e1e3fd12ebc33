"""Processes that run tests as ranks over gloo, on CPUs unless a pool is made for GPUs.

One process imports what they need, and all of them are forked from it.

A job is a function at the top level of a module. Every rank calls it inside a process group of its own, and what the
ranks return comes back by rank. A job that fails or hangs ends the pool, because other ranks may wait for the failed
one; the next job starts a new one.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120.0  # s for a job


class RankFailure(Exception):
    """A rank raised. The message has every failed rank's traceback."""


class RankPool:
    """Up to as many ranks as a job asks for."""

    def __init__(self, folder: Path, backend: str = "gloo", *, gpus: bool = False) -> None:
        """`backend`: of the ranks' process groups. `gpus`: ranks see the GPUs of the machine."""
        self._folder, self._backend, self._gpus = folder, backend, gpus
        self._numbers = itertools.count()
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        """`job(*args)` on `n` ranks. Returns what each returned. Raises RankFailure, TimeoutError."""
        self._start(n)
        store = f"file://{self._folder / f'store{next(self._numbers)}'}"
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

    def outcomes(self, job: Callable[..., Any], n: int, *args: Any, within: float) -> list[str]:
        """What became of `job(*args)` on each of `n` ranks after at most `within` seconds: "returned", "ended" (the
        process), "still runs", or the traceback of what it raised. The ranks end with the job."""
        self._start(n)
        store = f"file://{self._folder / f'store{next(self._numbers)}'}"
        connections = [connection for _, connection in self._workers[:n]]
        for rank, connection in enumerate(connections):
            connection.send((job, args, rank, n, store, self._backend))
        end, found = time.monotonic() + within, []
        for connection in connections:
            if not connection.poll(max(0.0, end - time.monotonic())):
                found.append("still runs")
                continue
            try:
                ok, value = connection.recv()
                found.append("returned" if ok else value)
            except (EOFError, ConnectionResetError):
                found.append("ended")
        self.close()
        return found

    def close(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self, n: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rank_cases"])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the forking process knows no other way
        try:
            while len(self._workers) < n:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._gpus), daemon=True)
                process.start()
                self._workers.append((process, ours))
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def _serve(connection: Connection, gpus: bool) -> None:
    torch.set_num_threads(1)
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
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
