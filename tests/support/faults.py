"""Faults to inject: an operator that runs a test's code, a model made of it, and checks of what is left behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import autopar
from autopar import PipelinedModule, Plan

ROWS, MICROBATCHES, WIDTH, TOKENS = 2, 3, 6, 10  # ROWS samples a micro-batch

Act = Callable[[], None]
Acts = dict[tuple[str, int], Act]  # ("forward" or "backward", place) -> what `passing` runs there
_acts: Acts = {}


@torch.library.custom_op("autopar_tests::passing", mutates_args=())
def passing(x: torch.Tensor, place: int) -> torch.Tensor:
    """The identity. Its forward and its backward run what `happening` has set for `place`."""
    _acts.get(("forward", place), _nothing)()
    return x.clone()


@passing.register_fake
def _(x: torch.Tensor, place: int) -> torch.Tensor:
    return torch.empty_like(x)


def _pass_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    _acts.get(("backward", ctx.place), _nothing)()
    return gradient, None


def _remember_place(ctx: Any, inputs: tuple[torch.Tensor, int], output: torch.Tensor) -> None:
    ctx.place = inputs[1]


passing.register_autograd(_pass_back, setup_context=_remember_place)


@contextlib.contextmanager
def happening(acts: Acts) -> Iterator[None]:
    """Inside, `passing` runs `acts`."""
    _acts.update(acts)
    try:
        yield
    finally:
        _acts.clear()


def at_call(number: int, act: Act) -> Act:
    """Runs `act` at call `number` (from 0), and nothing at other calls. Threads may share it."""
    acts = iter([*[_nothing] * number, act])
    return lambda: next(acts, _nothing)()


def _nothing() -> None:
    pass


class Block(nn.Module):
    """Fails for tokens that its table does not have, and where a test lets `passing` fail."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.layer, self.table = place, nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return passing(torch.tanh(self.layer(x) + self.table(tokens[:, self.place])), self.place)


class Blocks(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(place) for place in range(n))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, tokens)
        return x


def pipelined(schedule: str, devices: list[Any], recompute: Sequence[int] = ()) -> PipelinedModule:
    """One block per stage."""
    split = {f"blocks.{stage}": stage for stage in range(len(devices))}
    plan = Plan.from_split(split, n_microbatches=MICROBATCHES, schedule=schedule, devices=devices, recompute=recompute)
    return autopar.parallelize(Blocks(len(devices)), ["cpu"] * 4, plan=plan)


def batch(n_stages: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ROWS * MICROBATCHES
    return torch.randn(rows, WIDTH), torch.randint(0, TOKENS, (rows, n_stages))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def on_every_worker(pm: PipelinedModule) -> AbstractContextManager[None]:
    """Inside, every device uses its own worker. Stages this small might share one."""
    return pm.device_context(lambda _: contextlib.nullcontext())


def workers() -> set[threading.Thread]:
    """The live threads of all pipelines."""
    return {t for t in threading.enumerate() if t.name.startswith("autopar")}


def comes_true(condition: Callable[[], bool], within: float = 20.0) -> bool:
    """Whether `condition` becomes true within `within` seconds, for conditions that other threads bring about."""
    end = time.monotonic() + within
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return true
