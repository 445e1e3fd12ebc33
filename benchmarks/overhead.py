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
from benchmarks.output import Report, Rounds, Table
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
    rounds: tuple[Rounds, ...]  # what all of these are the medians of


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
    data = dataclasses.asdict(result)
    del data["rounds"]  # they are the report's own
    return Report("Overhead on tiny stages", (*microbatches, wrapped), data, measured=result.rounds)


def measure(scale: Scale, kept: Kept) -> Result:
    seconds = {layers: step_times(scale, layers, kept.part(layers)) for layers in LAYERS}
    times = {layers: _medians(found, scale.counts) for layers, found in seconds.items()}
    wrapped = _wrapped(*example(LAYERS[-1]), scale.rounds, kept.part("wrapped"))
    typical = {name: median(taken) / CALLS for name, taken in wrapped.items()}
    rounds = [
        Rounds(f"{layers} layers a stage", {_step_name(*key): taken for key, taken in found.items()})
        for layers, found in seconds.items()
    ]
    slopes = {layers: [slope(list(t), list(t.values())) for t in pair] for layers, pair in times.items()}
    return Result(
        {layers: pipeline for layers, (pipeline, _) in times.items()},
        {layers: plain for layers, (_, plain) in times.items()},
        {layers: pipeline for layers, (pipeline, _) in slopes.items()},
        {layers: plain for layers, (_, plain) in slopes.items()},
        typical["wrapped call"] - typical["plain call"],
        typical["wrapped step"] - typical["plain step"],
        (*rounds, Rounds(f"{CALLS} calls", wrapped)),
    )


def _step_name(pipelined: bool, n_microbatches: int) -> str:
    return f"{'autopar' if pipelined else 'plain model in turn'}, {n_microbatches} micro-batches"


def _medians(
    seconds: dict[tuple[bool, int], tuple[float, ...]], counts: tuple[int, ...]
) -> tuple[dict[int, float], dict[int, float]]:
    """By n_microbatches: pipelined, and accumulated by the plain model."""
    pipeline, accumulation = ({m: median(seconds[piped, m]) for m in counts} for piped in (True, False))
    return pipeline, accumulation


def example(layers: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """The model, a batch and its target. "0" begins the first stage, str(layers) the second."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * layers)])
    return model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def step_times(scale: Scale, layers: int, kept: Kept) -> dict[tuple[bool, int], tuple[float, ...]]:
    """Seconds of every round, by whether the step is pipelined, or accumulated by the plain model, and by
    n_microbatches."""
    model, x, y = example(layers)
    steps = {(True, m): _pipeline_step(model, x, y, m, layers) for m in scale.counts}
    steps |= {(False, m): _accumulation_step(model, x, y, m) for m in scale.counts}
    return interleave(steps, scale.rounds, _clear(model), kept)


def _pipeline_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int, layers: int) -> Step:
    plan = Plan.from_split({"0": 0, str(layers): 1}, n_microbatches=m)
    module = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    return lambda: module.train_step(x, target=y, loss_fn=mse_loss)


def _accumulation_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int) -> Step:
    def step() -> None:
        for part, target in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (mse_loss(model(part), target) / m).backward()

    return step


def _wrapped(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, rounds: int, kept: Kept
) -> dict[str, tuple[float, ...]]:
    """Seconds of CALLS calls and training steps, plain and wrapped for one device, in each round."""
    module = autopar.parallelize(model, ["cpu"], plan=Plan.from_split({"0": 0}, n_microbatches=1))
    steps = {
        "plain call": _often(lambda: model(x), grad=False),
        "wrapped call": _often(lambda: module(x), grad=False),
        "plain step": _often(lambda: mse_loss(model(x), y).backward()),
        "wrapped step": _often(lambda: module.train_step(x, target=y, loss_fn=mse_loss)),
    }
    return interleave(steps, rounds, _clear(model), kept)


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
