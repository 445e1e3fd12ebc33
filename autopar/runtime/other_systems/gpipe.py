"""torchgpipe over the blocks of a model, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from autopar.runtime.other_systems.blocks import need_blocks
from autopar.runtime.other_systems.training_step import Refusal, TrainingStep

BALANCING = 1.0  # s of its own balance_by_time


def gpipe_step(
    step: TrainingStep, n_stages: int, n_microbatches: int, balancing: float = BALANCING
) -> tuple[Callable[[], float], list[int]]:
    """A step by torchgpipe, which returns the loss, and the blocks in each stage, by `balancing` s of its own search.

    Raises ImportError without torchgpipe, Refusal for a model that it cannot cut.
    """
    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    blocks, device = need_blocks(step, n_stages), torch.device("cpu")
    assert step.block_loss is not None
    loss_of = step.block_loss
    sample = step.input.tensor_split(n_microbatches)[0]
    step.clear()  # it profiles no model with gradients
    balance = balance_by_time(n_stages, blocks, sample, timeout=balancing, device=device)
    if 0 in balance:
        raise Refusal(f"its own balancing leaves a stage of {n_stages} without a module")
    try:
        pipe = GPipe(blocks, balance, devices=[device] * n_stages, chunks=n_microbatches, checkpoint="never")
    except (TypeError, ValueError) as error:
        raise Refusal(str(error)) from error

    def run() -> float:
        with _one_thread_a_worker():
            loss = loss_of(pipe(step.input), step.target)
        loss.backward()
        return loss.item()

    return run, list(balance)


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
