"""Several GPUs: the automatic plan and pipelines against one GPU, DataParallel and DistributedDataParallel.

Each system runs in turn with the plain model on the first device, on a copy of its own. DistributedDataParallel has a
process for each device, which runs alone.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import autopar
from benchmarks.gpu_checks import in_turn
from benchmarks.gpu_models import MODELS, Subject
from benchmarks.gpu_setting import Finding, Setting
from benchmarks.timing import Step, ratio
from cost_models.hardware.devices import synchronize

CPU_WORKERS = 2


def places_of(setting: Setting) -> list[str]:
    """All GPUs, the benchmark's first; two workers where it runs on a CPU."""
    if not setting.is_gpu:
        return ["cpu"] * CPU_WORKERS
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != setting.device.index]
    return [str(setting.device), *others]


def several(name: str, title: str, setting: Setting) -> Iterator[Finding]:
    """Findings of the model `name` of `MODELS`; `title` is what reports call it."""
    places = places_of(setting)
    if len(places) < 2:
        yield Finding(title, "several GPUs", "", None, "", None, "there is one GPU")
        return
    subject = MODELS[name](setting.device, setting.quick)
    speeds: dict[str, float] = {}
    single = 0.0
    for system, make in _systems(subject, places).items():
        step, close = make()
        try:
            systems: dict[str, Step] = {"one": subject.workload.step, system: step}
            seconds = in_turn(systems, setting, subject.workload.clear, places)
        finally:
            close()
        gc.collect()
        single = median(seconds["one"])
        speeds[system] = ratio(seconds["one"], seconds[system])
    speeds["DistributedDataParallel"] = single / ddp_seconds(name, setting, places, single)
    automatic = speeds["automatic plan"]
    for system, speed in speeds.items():
        goal = "more than 1" if system == "automatic plan" else ""
        promise = f"speed-up over one device, {system} on {len(places)}"
        met = None if not goal or not setting.is_gpu else speed > 1  # CPU workers share the cores of one device
        yield Finding(title, promise, goal, speed, f"{speed:.2f}", met)
    for rival in ("DataParallel", "DistributedDataParallel"):
        value = speeds[rival] / automatic
        met = value <= 1.05 if setting.is_gpu else None
        yield Finding(title, f"automatic plan / {rival}, seconds", "at most 1.05", value, f"{value:.3f}", met)


def _systems(subject: Subject, places: list[str]) -> dict[str, Callable[[], tuple[Step, Step]]]:
    """By name, what makes a step and the action that ends the system."""

    def pipelined(where: list[str], **options: Any) -> tuple[Step, Step]:
        work = subject.workload
        model = copy.deepcopy(work.model)
        pm = autopar.parallelize(model, where, **subject.call, **options)

        def step() -> None:
            model.zero_grad()
            pm.train_step(**work.inputs, target=work.target, loss_fn=work.loss)

        return step, pm.close

    def data_parallel() -> tuple[Step, Step]:
        work = subject.workload
        model = copy.deepcopy(work.model)
        replicated = nn.DataParallel(model)

        def step() -> None:
            model.zero_grad()
            work.loss(replicated(**work.inputs), work.target).backward()

        return step, lambda: None

    pipelines = {
        f"pipeline of {n}": (lambda n=n: pipelined(places[:n], max_replicas=1, tune=0))
        for n in range(2, len(places) + 1)
    }
    return {"automatic plan": lambda: pipelined(places), **pipelines, "DataParallel": data_parallel}


# -- DistributedDataParallel ------------------------------------------------------------------------------------------


def ddp_seconds(name: str, setting: Setting, places: list[str], single: float) -> float:
    """Median seconds of a step on the whole batch, cut over one process a device. `single`: s of a step on one."""
    count = max(1, round(setting.seconds / single))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_ddp_process, (name, setting, places, count, folder), nprocs=len(places))
        seconds: list[float] = json.loads(Path(folder, "seconds").read_text())
    return median(seconds)


def _ddp_process(rank: int, name: str, setting: Setting, places: list[str], count: int, folder: str) -> None:
    device = torch.device(places[rank])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(places))
    try:
        seconds = _ddp_steps(MODELS[name](device, setting.quick), rank, len(places), setting.rounds, count)
        if rank == 0:
            Path(folder, "seconds").write_text(json.dumps(seconds))
    finally:
        dist.destroy_process_group()


def _ddp_steps(subject: Subject, rank: int, world: int, rounds: int, count: int) -> list[float]:
    """Seconds per step in each round, on this rank's part of the batch."""
    work, device = subject.workload, subject.workload.target.device
    inputs = {name: x.tensor_split(world)[rank] for name, x in work.inputs.items()}
    target = work.target.tensor_split(world)[rank]
    replicated = nn.parallel.DistributedDataParallel(work.model)
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            work.clear()
            work.loss(replicated(**inputs), target).backward()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / count)
    return seconds[1:]
