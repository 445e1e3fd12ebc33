"""The other pipelines over the blocks of a subject: torchgpipe in this process, torch.distributed.pipelining in two.

this process   A ............ A ......     measures; computes itself for autopar and torchgpipe
rank 0         . C .......... . C ....     blocked on a pipe until a step is requested
rank 1         . C .......... . C ....
"""

from __future__ import annotations

import itertools
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.peer_models import Builder, Subject

Gradients = dict[str, np.ndarray[Any, Any]]  # by the model's names of its parameters

STAGES = 2

_PATIENCE = 10.0  # s that a process gets to end by itself


def gradients_of(model: nn.Module, names: Sequence[str]) -> Gradients:
    """Those of the parameters `names` that have one."""
    parameters = dict(model.named_parameters())
    return {name: g.numpy().copy() for name in names if (g := parameters[name].grad) is not None}


# -- where to cut -----------------------------------------------------------------------------------------------------


def block_seconds(subject: Subject, n_microbatches: int, rounds: int) -> list[float]:
    """Forward and backward of every block with the first micro-batch, the last block's with the loss; medians.

    The blocks run within passes over all of them, as they will in a step: alone, they would find their caches warm.
    """
    x, target = (tensor.tensor_split(n_microbatches)[0] for tensor in (subject.input, subject.workload.target))
    found: list[list[float]] = [[] for _ in subject.blocks]
    for _ in range(rounds + 1):
        subject.workload.clear()
        inputs, outputs, seconds = [], [], []
        value = x
        for index, block in enumerate(subject.blocks):
            value = value.detach().requires_grad_(value.is_floating_point())
            start = time.perf_counter()
            output = block(value)
            if index == len(subject.blocks) - 1:
                output = subject.loss(output, target)
            seconds.append(time.perf_counter() - start)
            inputs.append(value)
            outputs.append(output)
            value = output
        gradient = None
        for index in reversed(range(len(outputs))):
            start = time.perf_counter()
            torch.autograd.backward(outputs[index], gradient)
            seconds[index] += time.perf_counter() - start
            gradient = inputs[index].grad
        for times, taken in zip(found, seconds, strict=True):
            times.append(taken)
    subject.workload.clear()
    return [median(times[1:]) for times in found]


def best_cut(seconds: Sequence[float]) -> int:
    """How many blocks the first of two stages has, so that the longer one is as short as can be. O(n)."""
    before = list(itertools.accumulate(seconds))
    return min(range(1, len(seconds)), key=lambda cut: max(before[cut - 1], before[-1] - before[cut - 1]))


# -- torchgpipe -------------------------------------------------------------------------------------------------------


def gpipe_step(subject: Subject, n_microbatches: int, balancing: float) -> tuple[Callable[[], float], int]:
    """A step by torchgpipe, and the blocks in its first stage, by `balancing` s of its own balance_by_time.

    Raises ImportError without torchgpipe.
    """
    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    workload, device = subject.workload, torch.device("cpu")
    sample = subject.input.tensor_split(n_microbatches)[0]
    workload.clear()  # it profiles no model with gradients
    balance = balance_by_time(STAGES, subject.blocks, sample, timeout=balancing, device=device)
    pipe = GPipe(subject.blocks, balance, devices=[device] * STAGES, chunks=n_microbatches, checkpoint="never")

    def step() -> float:
        with _one_thread_a_worker():
            loss = subject.loss(pipe(subject.input), workload.target)
        loss.backward()
        return loss.item()

    return step, balance[0]


def worker_a_stage(step: Callable[[], float]) -> float:
    """A step by torchgpipe whose stages have a thread each: as it is, all stages on CPUs share one."""
    import torchgpipe.pipeline

    spawn = torchgpipe.pipeline.spawn_workers

    @contextmanager
    def spawn_each(devices: list[torch.device]) -> Iterator[tuple[list[Any], list[Any]]]:
        with ExitStack() as stack:
            queues = [stack.enter_context(spawn([device])) for device in devices]
            yield [q for queues_in, _ in queues for q in queues_in], [q for _, queues_out in queues for q in queues_out]

    with patch.object(torchgpipe.pipeline, "spawn_workers", spawn_each):
        return step()


@contextmanager
def _one_thread_a_worker() -> Iterator[None]:
    """torchgpipe's workers are fresh threads, whose convolutions use all cores unless limited."""
    import torchgpipe.worker

    work = torchgpipe.worker.worker

    def on_one_thread(*args: Any) -> None:
        torch.set_num_threads(1)
        work(*args)

    with patch.object(torchgpipe.worker, "worker", on_one_thread):
        yield


# -- torch.distributed.pipelining -------------------------------------------------------------------------------------

GLOO_SCHEDULES = ("1F1B", "GPipe")


class Rank:
    """The requests that each of the two processes serves."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._subject: Subject | None = None
        self._schedules: dict[tuple[str, int], Any] = {}

    def load(self, build: Builder) -> None:
        """Take up another subject."""
        self._schedules.clear()
        self._subject = build()

    def prepare(self, n_microbatches: int, cut: int) -> None:
        """Take the blocks before or after `cut` as the stage of the next steps."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        subject = self._loaded()
        part = subject.blocks[:cut] if self._rank == 0 else subject.blocks[cut:]
        for index, parameter in enumerate(subject.tied):  # gradients of a stage's own parameters alone become means
            part.register_parameter(f"tied{index}", parameter)
        for name, schedule in zip(GLOO_SCHEDULES, (Schedule1F1B, ScheduleGPipe), strict=True):
            stage = PipelineStage(part, self._rank, STAGES, torch.device("cpu"))
            self._schedules[name, n_microbatches] = schedule(stage, n_microbatches, loss_fn=subject.loss)

    def step(self, schedule: str, n_microbatches: int) -> float | None:
        """The mean loss, in the last rank. A tied parameter's gradient is summed over both here, as
        torch.distributed.pipelining does not."""
        subject = self._loaded()
        losses: list[torch.Tensor] = []
        run = self._schedules[schedule, n_microbatches].step
        if self._rank == 0:
            run(subject.input, return_outputs=False)
        else:
            run(target=subject.workload.target, losses=losses, return_outputs=False)
        for parameter in subject.tied:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        return torch.stack(losses).mean().item() if losses else None

    def gradients(self, names: Sequence[str]) -> Gradients:
        return gradients_of(self._loaded().workload.model, names)

    def clear(self) -> None:
        self._loaded().workload.clear()

    def _loaded(self) -> Subject:
        assert self._subject is not None, "load comes first"
        return self._subject


class Ranks:
    """Two processes over gloo, each on one thread, that serve requests and wait without spinning.

    RuntimeError: with the traceback, where one fails; the other may then wait for it until `close`.
    """

    def __init__(self, worker: Callable[[int], Any] = Rank) -> None:
        """`worker(rank)`: in each process, whose methods serve the requests."""
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        pipes = [context.Pipe() for _ in range(STAGES)]
        self._connections = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(worker, rank, rendezvous, there), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process, (_, there) in zip(self._processes, pipes, strict=True):
            process.start()
            there.close()  # so that the end of the process is the end of the pipe

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=error is not None)

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """`method` of the workers of both ranks at once; what each returned."""
        for connection in self._connections:
            connection.send((method.__name__, args))
        replies: dict[Any, Any] = {}
        while len(replies) < STAGES:
            ready = wait([c for c in self._connections if c not in replies])
            for connection in (c for c in self._connections if c in ready):
                try:
                    reply = connection.recv()
                except EOFError:
                    raise RuntimeError("a process of torch.distributed.pipelining ended") from None
                if isinstance(reply, Exception):
                    raise reply
                replies[connection] = reply
        return [replies[connection] for connection in self._connections]

    def step(self, schedule: str, n_microbatches: int) -> float:
        """The mean loss."""
        loss: float = self.call(Rank.step, schedule, n_microbatches)[-1]
        return loss

    def gradients(self, names: Sequence[str]) -> Gradients:
        first, last = self.call(Rank.gradients, names)
        return {**first, **last}

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


def _serve(make: Callable[[int], Any], rank: int, rendezvous: str, connection: Connection) -> None:
    """A process's life: methods of its worker by name, until the pipe closes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=STAGES)
    worker = make(rank)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            break
        try:
            reply = getattr(worker, name)(*args)
        except Exception:
            reply = RuntimeError(traceback.format_exc())
        connection.send(reply)
    dist.destroy_process_group()
