"""Processes over gloo that serve requests, so that their steps take turns with those of this process.

this process   A ............ A ......     measures; computes its own systems
process 0      . C .......... . C ....     blocked on a pipe until a step is requested
process 1      . C .......... . C ....
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autopar.runtime.host_memory import freed_memory_is_kept, keep_freed_memory

_PATIENCE = 10.0  # s that a process gets to end by itself


class Processes:
    """`n` processes in one group of gloo, each on one thread, that wait without spinning.

    They keep freed memory where this process does: otherwise their steps would have page faults that its steps have
    not.

    RuntimeError: with the traceback, where one fails.
    """

    def __init__(self, worker: Callable[[int], Any], n: int) -> None:
        """`worker(rank)`: in each process, whose methods serve the requests."""
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._stuck = ""  # why there is no going on
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        keep = freed_memory_is_kept()
        pipes = [context.Pipe() for _ in range(n)]
        self._connections = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(worker, rank, n, rendezvous, there, keep), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process, (_, there) in zip(self._processes, pipes, strict=True):
            process.start()
            there.close()  # so that the end of the process is the end of the pipe

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """`method` of the workers of all processes at once; what each returned.

        Raises RuntimeError where one fails, once the others have answered, too. If they do not, because they wait for
        the one that failed, every later call raises.
        """
        if self._stuck:
            raise RuntimeError(f"a process ended: {self._stuck}")
        for connection in self._connections:
            try:
                connection.send((method.__name__, args))
            except OSError:
                raise RuntimeError("a process ended") from None
        replies: dict[Any, Any] = {}
        failed: Exception | None = None
        while len(replies) < len(self._connections):
            missing = [c for c in self._connections if c not in replies]
            ready = wait(missing, None if failed is None else _PATIENCE)
            if failed is not None and not ready:
                self._stuck = "it waits for another one, which failed"
                raise failed
            for connection in (c for c in self._connections if c in ready):
                try:
                    reply = connection.recv()
                except (EOFError, OSError):
                    self._stuck = "its pipe is closed"
                    raise RuntimeError("a process ended") from failed
                replies[connection] = reply
                if isinstance(reply, Exception):
                    failed = failed or reply
        if failed is not None:
            raise failed
        return [replies[connection] for connection in self._connections]

    def close(self, *, at_once: bool = False) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            if at_once:
                process.terminate()
            connection.close()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(
    make: Callable[[int], Any], rank: int, n: int, rendezvous: str, connection: Connection, keep_memory: bool
) -> None:
    """A process's life: methods of its worker by name, until the pipe closes."""
    if keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=n)
    worker = make(rank)
    while True:
        try:
            name, args = connection.recv()
        except (EOFError, KeyboardInterrupt):
            break
        try:
            reply = getattr(worker, name)(*args)
        except Exception:
            reply = RuntimeError(traceback.format_exc())
        connection.send(reply)
    dist.destroy_process_group()
