"""What a micro-batch and a wrapped call cost beyond the arithmetic, on a model too small for anything else to count.

autopar              stage 0 |- - - -|         m micro-batches through two workers
                     stage 1   |- - - -|
plain model in turn          |-- -- -- --|     the same m, one after another
ceiling              process |-- --|           half of the m each, by two processes that send each other nothing
                     process |-- --|
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import Plan
from autopar.runtime.other_systems.independent import CEILING
from autopar.runtime.other_systems.processes import Processes
from autopar.runtime.other_systems.rank import SystemRank
from benchmarks.kept import Kept
from benchmarks.output import Report, Rounds, Table
from benchmarks.stamps import measure_stamps
from benchmarks.timing import Step, interleave, slope
from cost_models.hardware.devices import operator_threads

WIDTH, BATCH = 64, 64
LAYERS = (1, 4)  # in each of the two stages
CALLS = 50  # timed together where one call is short
PIPELINED, PLAIN = "autopar", "plain model in turn"
SYSTEMS = (PIPELINED, PLAIN, CEILING)
STAGES = 2


@dataclass(frozen=True)
class Scale:
    counts: tuple[int, ...]  # n_microbatches
    rounds: int
    small: bool = False  # the model whose steps are stamped


FULL = Scale((2, 4, 8, 16, 32), 60)
QUICK = Scale((2, 8, 32), 5, small=True)


@dataclass(frozen=True)
class Result:
    pipeline: dict[int, dict[int, float]]  # layers a stage -> n_microbatches -> s, median step by train_step
    accumulation: dict[int, dict[int, float]]  # the same micro-batches by the plain model, one after the other
    ceiling: dict[int, dict[int, float]]  # half of them each, by independent processes
    per_microbatch: dict[int, float]  # layers a stage -> s, slope of `pipeline`
    per_plain_microbatch: dict[int, float]  # layers a stage -> s, slope of `accumulation`
    per_ceiling_microbatch: dict[int, float]  # layers a stage -> s, slope of `ceiling`
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
                (PLAIN, *_line(result.accumulation[layers], result.per_plain_microbatch[layers])),
                (CEILING, *_line(result.ceiling[layers], result.per_ceiling_microbatch[layers])),
            ),
            "The samples stay the same, so that the slope is what each micro-batch costs by itself: PyTorch's own "
            "dispatch and autograd (second line), and the runtime's messages. The ceiling: two independent processes, "
            "each with half of the micro-batches.",
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
    stamps = measure_stamps(scale.small, scale.rounds, kept.part("stamps"))
    data = dataclasses.asdict(result) | {"stamps": stamps.data()}
    del data["rounds"]  # they are the report's own
    tables = (*microbatches, wrapped, stamps.table())
    return Report("Overhead on tiny stages, and of stamps", tables, data, measured=(*result.rounds, stamps.rounds))


def measure(scale: Scale, kept: Kept) -> Result:
    with Processes(OverheadRank, STAGES) as ranks:
        seconds = {layers: step_times(scale, layers, ranks, kept.part(layers)) for layers in LAYERS}
    wrapped = _wrapped(*example(LAYERS[-1]), scale.rounds, kept.part("wrapped"))
    typical = {name: median(taken) / CALLS for name, taken in wrapped.items()}
    rounds = [
        Rounds(f"{layers} layers a stage, {m} micro-batches", {name: found[name, m] for name in SYSTEMS}, CEILING)
        for layers, found in seconds.items()
        for m in scale.counts
    ]
    # On one device, the plain model in the same process is what the machine gives at most.
    for what in ("call", "step"):
        pair = {f"{how} {what}": wrapped[f"{how} {what}"] for how in ("plain", "wrapped")}
        rounds.append(Rounds(f"{CALLS} {what}s on one device", pair, f"plain {what}"))
    times = {
        name: {layers: {m: median(found[name, m]) for m in scale.counts} for layers, found in seconds.items()}
        for name in SYSTEMS
    }
    slopes = {
        name: {layers: slope(list(t), list(t.values())) for layers, t in of_layers.items()}
        for name, of_layers in times.items()
    }
    return Result(
        times[PIPELINED],
        times[PLAIN],
        times[CEILING],
        slopes[PIPELINED],
        slopes[PLAIN],
        slopes[CEILING],
        typical["wrapped call"] - typical["plain call"],
        typical["wrapped step"] - typical["plain step"],
        tuple(rounds),
    )


def example(layers: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """The model, a batch and its target. "0" begins the first stage, str(layers) the second."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 * layers)])
    return model, torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


class OverheadRank(SystemRank):
    """One of the independent processes."""

    def in_turn(self, name: str, layers: int, m: int, repeats: int) -> None:
        """A step of this process's part of the batch, as its part of `m` micro-batches; `repeats` of it in a call."""
        model, x, y = example(layers)
        x, y = (whole.chunk(self.n)[self.rank].clone() for whole in (x, y))
        once = _accumulation_step(model, x, y, m // self.n)

        def step() -> None:
            for _ in range(repeats):
                once()

        self.add(name, model, step)


def step_times(scale: Scale, layers: int, ranks: Processes, kept: Kept) -> dict[tuple[str, int], tuple[float, ...]]:
    """Seconds of every round, by system and n_microbatches, which are multiples of `STAGES`."""
    model, x, y = example(layers)
    steps: dict[tuple[str, int], Step] = {}
    # A request to the processes takes as long as a few micro-batches of their steps.
    repeats = {m: max(1, 4 * CALLS // m) for m in scale.counts}
    for m in scale.counts:
        name = f"{layers} layers, {m} micro-batches"
        ranks.call(OverheadRank.in_turn, name, layers, m, repeats[m])
        steps[PIPELINED, m] = _pipeline_step(model, x, y, m, layers)
        steps[PLAIN, m] = _accumulation_step(model, x, y, m)
        steps[CEILING, m] = partial(ranks.call, OverheadRank.step, name)

    def clear() -> None:
        model.zero_grad(set_to_none=True)
        ranks.call(OverheadRank.clear)

    found = interleave(steps, scale.rounds, clear, kept)
    for m in scale.counts:
        found[CEILING, m] = tuple(seconds / repeats[m] for seconds in found[CEILING, m])
    return found


def _pipeline_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int, layers: int) -> Step:
    plan = Plan.from_split({"0": 0, str(layers): 1}, n_microbatches=m)
    module = autopar.parallelize(model, ["cpu"] * STAGES, plan=plan)
    return lambda: module.train_step(x, target=y, loss_fn=mse_loss)


def _accumulation_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, m: int) -> Callable[[], None]:
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
