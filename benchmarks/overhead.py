"""What a micro-batch and a wrapped call cost beyond the arithmetic, on a model too small for anything else to count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import Plan
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from benchmarks.timing import Step, interleave, slope
from cost_models.hardware.devices import operator_threads

WIDTH, BATCH = 64, 64
LAYERS = (1, 4)  # in each of the two stages
CALLS = 50  # timed together where one call is short


@dataclass(frozen=True)
class Scale:
    counts: tuple[int, ...]  # n_microbatches
    rounds: int


FULL = Scale((2, 4, 8, 16, 32), 60)
QUICK = Scale((2, 8, 32), 5)


@dataclass(frozen=True)
class Result:
    pipeline: dict[int, dict[int, float]]  # layers a stage -> n_microbatches -> s, median step by train_step
    accumulation: dict[int, dict[int, float]]  # the same micro-batches by the plain model, one after the other
    per_microbatch: dict[int, float]  # layers a stage -> s, slope of `pipeline`
    per_plain_microbatch: dict[int, float]  # layers a stage -> s, slope of `accumulation`
    wrapped_call: float  # s, a call wrapped for one device, without gradients, beyond the plain model's
    wrapped_step: float  # s, train_step wrapped for one device, beyond the plain model's forward and backward


def run_overhead(scale: Scale, kept: Kept) -> Report:
    with operator_threads(1):
        result = measure(scale, kept)
    counts = scale.counts
    microbatches = [
        Table(
            f"Step of two stages of {layers} linear layer{'s' if layers > 1 else ''}, {WIDTH} wide, {BATCH} samples",
            ("", *(f"{m} micro-batches, ms" for m in counts), "us per extra micro-batch"),
            (
                ("autopar, two devices", *_line(result.pipeline[layers], result.per_microbatch[layers])),
                ("plain model in turn", *_line(result.accumulation[layers], result.per_plain_microbatch[layers])),
            ),
            "The samples stay the same, so that the slope is what each micro-batch costs by itself: PyTorch's own "
            "dispatch and autograd (second line), and the runtime's messages.",
        )
        for layers in LAYERS
    ]
    wrapped = Table(
        "Wrapped for one device, beyond the plain model",
        ("", "us a call"),
        (
            ("call without gradients", f"{result.wrapped_call * 1e6:.1f}"),
            ("train_step", f"{result.wrapped_step * 1e6:.1f}"),
        ),
    )
    return Report("Overhead on tiny stages", (*microbatches, wrapped), dataclasses.asdict(result))


def measure(scale: Scale, kept: Kept) -> Result:
    times = {layers: step_times(scale, layers, kept.part(layers)) for layers in LAYERS}
    call, step = _wrapped(*example(LAYERS[-1]), scale.rounds, kept.part("wrapped"))
    slopes = {layers: [slope(list(t), list(t.values())) for t in pair] for layers, pair in times.items()}
    return Result(
        {layers: pipeline for layers, (pipeline, _) in times.items()},
        {layers: plain for layers, (_, plain) in times.items()},
        {layers: pipeline for layers, (pipeline, _) in slopes.items()},
        {layers: plain for layers, (_, plain) in slopes.items()},
        call,
        step,
    )


def example(layers: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """The model, a batch and its target. "0" begins the first stage, str(layers) the second."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * layers)])
    return model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def step_times(scale: Scale, layers: int, kept: Kept) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds by n_microbatches: pipelined, and accumulated by the plain model."""
    model, x, y = example(layers)
    steps = {(True, m): _pipeline_step(model, x, y, m, layers) for m in scale.counts}
    steps |= {(False, m): _accumulation_step(model, x, y, m) for m in scale.counts}
    seconds = interleave(steps, scale.rounds, _clear(model), kept)
    pipeline, accumulation = ({m: median(seconds[piped, m]) for m in scale.counts} for piped in (True, False))
    return pipeline, accumulation


def _pipeline_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int, layers: int) -> Step:
    plan = Plan.from_split({"0": 0, str(layers): 1}, n_microbatches=m)
    module = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    return lambda: module.train_step(x, target=y, loss_fn=mse_loss)


def _accumulation_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int) -> Step:
    def step() -> None:
        for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (mse_loss(model(part), target) / m).backward()

    return step


def _wrapped(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rounds: int, kept: Kept) -> tuple[float, float]:
    """Seconds that one call and one training step take more when wrapped for one device."""
    module = autopar.parallelize(model, ["cpu"], plan=Plan.from_split({"0": 0}, n_microbatches=1))
    steps = {
        "plain call": _often(lambda: model(x), grad=False),
        "wrapped call": _often(lambda: module(x), grad=False),
        "plain step": _often(lambda: mse_loss(model(x), y).backward()),
        "wrapped step": _often(lambda: module.train_step(x, target=y, loss_fn=mse_loss)),
    }
    taken = interleave(steps, rounds, _clear(model), kept)
    seconds = {name: median(s) / CALLS for name, s in taken.items()}
    return seconds["wrapped call"] - seconds["plain call"], seconds["wrapped step"] - seconds["plain step"]


def _often(call: Callable[[], object], grad: bool = True) -> Step:
    def step() -> None:
        with torch.set_grad_enabled(grad):
            for _ in range(CALLS):
                call()

    return step


def _clear(model: nn.Module) -> Step:
    return lambda: model.zero_grad(set_to_none=True)


def _line(seconds: dict[int, float], per_microbatch: float) -> list[str]:
    return [*(f"{s * 1e3:.2f}" for s in seconds.values()), f"{per_microbatch * 1e6:.0f}"]
