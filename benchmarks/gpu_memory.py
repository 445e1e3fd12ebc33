"""What the GPU benchmark promises of memory on one device, each promise measured on one model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

import autopar
from autopar import Plan
from autopar.runtime.comparing.contestants import predicted_memory
from benchmarks.gpu_models import Subject
from benchmarks.gpu_setting import (
    N_MICROBATCHES,
    Finding,
    Setting,
    closing,
    one_stage_plan,
    skipped,
    slots,
    title,
    train_step,
    two_stage_plan,
)
from benchmarks.memory import allocated, nbytes
from cost_models import parse_devices
from cost_models.hardware.devices import synchronize
from cost_models.memory.training_memory import FRAGMENTATION, WORKSPACE


def memory(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Predicted against measured bytes at the peak of a training step with AdamW."""
    plans = {
        title(1, 1): (one_stage_plan(subject, 1), slots(setting, 1)),
        title(1, N_MICROBATCHES): (one_stage_plan(subject, N_MICROBATCHES), slots(setting, 1)),
        title(2, N_MICROBATCHES): (two_stage_plan(subject, N_MICROBATCHES), slots(setting, 2)),
    }
    for name, (plan, where) in plans.items():
        promise, goal = f"peak memory predicted, {name}", "within 5 %, under by at most 1 %"
        if not setting.is_gpu and name != title(1, 1):  # its workers' allocations are not those of this thread
            yield skipped(subject, promise, goal, "only a GPU counts what several threads allocate")
            continue
        optimizer = torch.optim.AdamW(subject.workload.model.parameters())
        priced = autopar.plan(subject.workload.model, where, plan=plan, optimizer=optimizer, tune=0, **subject.call)
        # Plans set the bytes of libraries aside on every device.
        tensors = sum(predicted_memory(priced, parse_devices(where)).values())
        libraries = WORKSPACE[setting.device.type]
        peak = _peak(subject, setting, plan, where, optimizer)
        error = (tensors + libraries) / peak.allocated - 1
        note = f"{(tensors + libraries) / 1e6:.4g} MB predicted, {peak.allocated / 1e6:.4g} measured"
        if peak.requested:
            note += f", of which {peak.requested / 1e6:.4g} asked for"
        yield Finding(subject.name, promise, goal, error, f"{error:+.1%}", -0.01 <= error <= 0.05, note)
        if peak.reserved:
            aside = libraries + tensors * (1 + FRAGMENTATION[setting.device.type])
            share = peak.reserved / aside
            promise, goal = f"memory taken from the driver / set aside by the plan, {name}", "at most 1"
            note = f"{peak.reserved / 1e6:.4g} MB taken, {aside / 1e6:.4g} set aside"
            yield Finding(subject.name, promise, goal, share, f"{share:.3f}", share <= 1, note)


class _Peak(NamedTuple):
    """Bytes at the peak of a step."""

    allocated: int
    requested: int = 0  # on a GPU: allocated, without what is left over of blocks that were not cut
    reserved: int = 0  # on a GPU: blocks and the gaps between them


def _peak(
    subject: Subject, setting: Setting, plan: Plan, where: Sequence[str], optimizer: torch.optim.Optimizer
) -> _Peak:
    """Of a step whose optimizer has its states. On a GPU, of everything that lies there."""
    work = subject.workload
    if setting.is_gpu:
        torch.cuda.empty_cache()
    with closing(autopar.parallelize(work.model, list(where), plan=plan)) as pm:

        def step() -> None:
            train_step(pm, subject)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        gc.collect()
        if setting.is_gpu:
            synchronize(setting.device)
            torch.cuda.reset_peak_memory_stats(setting.device)
            step()
            synchronize(setting.device)
            found = torch.cuda.memory_stats(setting.device)
            return _Peak(*(found[f"{kind}_bytes.all.peak"] for kind in _Peak._fields))
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = [*work.model.parameters(), *work.model.buffers(), *work.inputs.values(), work.target, *states]
        return _Peak(nbytes(held) + allocated(step)[0])


def growth(subject: Subject, setting: Setting) -> Iterator[Finding]:
    """Bytes in use after many steps of two stages, less those after the first few. Two samples a step."""
    work = subject.rows(2)
    promise = f"growth of memory over {setting.steps} steps"
    with closing(autopar.parallelize(work.model, slots(setting, 2), plan=two_stage_plan(subject, 2))) as pm:

        def run(count: int) -> int:
            for _ in range(count):
                pm.train_step(**work.inputs, target=work.target, loss_fn=work.loss)
                work.clear()
            return in_use(setting.device)

        first = run(10)
        grown = run(setting.steps) - first
    yield Finding(subject.name, promise, "0 bytes", float(grown), f"{grown} bytes", grown <= 0)


def in_use(device: torch.device) -> int:
    """Bytes of the tensors on a device."""
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device)
    return nbytes(x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))
