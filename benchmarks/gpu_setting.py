"""What all parts of the GPU benchmark have in common: where they run, what they find, plans and steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autopar import PipelinedModule, Plan
from benchmarks.gpu_models import Subject

N_MICROBATCHES = 4


@dataclass(frozen=True)
class Setting:
    """Where and how long everything runs."""

    device: torch.device
    quick: bool
    rounds: int  # of steps in turn: A B A B ...
    seconds: float  # that each round of a system takes at least
    steps: int  # of the long run
    backend: str = "inductor"  # of torch.compile

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


FULL = (5, 0.5, 100)
QUICK = (2, 0.0, 20)


@dataclass(frozen=True)
class Finding:
    """One promise on one model."""

    model: str
    promise: str
    goal: str
    value: float | None  # in the unit of the goal; None: not measured
    text: str  # the value as shown
    met: bool | None  # None: not measured, or not judged
    note: str = ""  # why not, or how measured


def slots(setting: Setting, count: int) -> list[str]:
    """`count` workers on the one device."""
    return [str(setting.device)] * count


def one_stage_plan(subject: Subject, n_microbatches: int) -> Plan:
    return Plan.from_split({next(iter(subject.split)): 0}, n_microbatches=n_microbatches)


def two_stage_plan(subject: Subject, n_microbatches: int) -> Plan:
    return Plan.from_split(subject.split, n_microbatches=n_microbatches)


@contextmanager
def closing(module: PipelinedModule) -> Iterator[PipelinedModule]:
    try:
        yield module
    finally:
        module.close()


def train_step(module: PipelinedModule, subject: Subject) -> None:
    work = subject.workload
    module.train_step(**work.inputs, target=work.target, loss_fn=work.loss)


def title(n_stages: int, n_microbatches: int) -> str:
    return f"{n_stages} stage{'s' if n_stages > 1 else ''}, {batches(n_microbatches)}"


def batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def skipped(subject: Subject, promise: str, goal: str, why: str) -> Finding:
    return Finding(subject.name, promise, goal, None, "", None, why)
