"""The same tiny stages by torch.distributed.pipelining over gloo, a process a stage, beside autopar's threads."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import mse_loss

from benchmarks.output import Report, Table
from benchmarks.overhead import BATCH, LAYERS, WIDTH, Effort, example, step_times
from benchmarks.timing import slope, threads

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True)
class Result:
    autopar: dict[int, float]  # n_microbatches -> s, median step
    peers: dict[str, dict[int, float]]  # by schedule


def run_peers(effort: Effort) -> Report:
    with threads(1):
        own, _ = step_times(effort)
    result = Result(own, _distributed(effort))
    ways = {"autopar, 1f1b, two threads": result.autopar}
    ways |= {f"torch.distributed.pipelining, {name}, two processes": times for name, times in result.peers.items()}
    table = Table(
        f"Step of two stages of {LAYERS} linear layers, {WIDTH} wide, {BATCH} samples",
        ("", *(f"{m} micro-batches, ms" for m in effort.counts), "us per extra micro-batch"),
        tuple(
            (name, *(f"{s * 1e3:.2f}" for s in times.values()), f"{slope(list(times), list(times.values())) * 1e6:.0f}")
            for name, times in ways.items()
        ),
        "One core a stage. The processes meet at a barrier after each step, which the slope leaves out.",
    )
    return Report("Overhead on tiny stages, beside torch.distributed.pipelining", (table,), dataclasses.asdict(result))


def _distributed(effort: Effort) -> dict[str, dict[int, float]]:
    queue: SimpleQueue[dict[str, dict[int, float]]] = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_rank, (str(Path(directory) / "rendezvous"), effort, queue), nprocs=2)
    return queue.get()


def _rank(rank: int, rendezvous: str, effort: Effort, queue: SimpleQueue[dict[str, dict[int, float]]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model, x, y = example()
    part = model[:LAYERS] if rank == 0 else model[LAYERS:]
    found: dict[str, dict[int, float]] = {}
    for name, schedule_type in SCHEDULES.items():
        found[name] = {}
        for m in effort.counts:
            stage = PipelineStage(part, rank, 2, torch.device("cpu"))
            schedule = schedule_type(stage, m, loss_fn=mse_loss)
            seconds = []
            for _ in range(effort.rounds + 2):
                part.zero_grad()
                dist.barrier()
                start = time.perf_counter()
                schedule.step(x) if rank == 0 else schedule.step(target=y)
                dist.barrier()
                seconds.append(time.perf_counter() - start)
            found[name][m] = median(seconds[2:])  # the first ones exchange shapes
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()
