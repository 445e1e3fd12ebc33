"""The automatic plan against the plain model: ten models whose steps take from a millisecond to over a second."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.other_systems.independent import CEILING, ceiling
from benchmarks import models
from benchmarks.kept import Kept, as_row
from benchmarks.models import Workload
from benchmarks.output import Report, Rounds, Table
from benchmarks.timing import interleave, ratio

log = logging.getLogger(__name__)

DEVICES = ("cpu", "cpu")
Iteration = tuple[Callable[[], object], Callable[[], object]]  # a training step; what drops its gradients
_SECONDS = 6.0  # of the steps of a model, all systems together
_MOST_ROUNDS = 100
# s, of a turn of a system: a training loop repeats its step, and a single step of a millisecond would mostly
# show what the other systems have left in the caches.
_TURN = 0.02


@dataclass(frozen=True)
class Row:
    """One model."""

    name: str
    plan: str  # places, micro-batches and schedule of the plan that was followed
    planning: float  # s, with an empty cache
    predicted: float | None  # s of a step
    step: float  # s, median
    plain: float  # s, median, of the plain model in turn with it
    speedup: float  # median over rounds of plain / followed
    untuned: str  # the plan that the prediction alone would have followed
    untuned_speedup: float  # median over rounds of plain / that plan
    seconds: dict[str, tuple[float, ...]]  # of all systems, in the same rounds


def run_automatic(quick: bool, kept: Kept) -> Report:
    rows = []
    for number, build in enumerate(SUBJECTS[:3] if quick else SUBJECTS):
        found = kept.case(number, make=lambda b=build: dataclasses.asdict(measure(b(), quick)))  # type: ignore[misc]
        rows.append(as_row(Row, found))
    measured = tuple(Rounds(row.name, row.seconds, CEILING) for row in rows)
    title = 'The automatic plan against the plain model, tune="auto" and tune=0'
    return Report(title, (_table(rows),), _values(rows), measured=measured)


def measure(workload: Workload, quick: bool) -> Row:
    """Training steps by the automatic plan, by the plan that was predicted fastest, and of the plain model, in turn."""
    log.info("%s: planning", workload.title)
    call: dict[str, Any] = {"example_kwargs": workload.inputs, "target": workload.target, "loss_fn": workload.loss}
    start = time.perf_counter()
    tuned = autopar.parallelize(copy.deepcopy(workload.model), list(DEVICES), cache=False, **call)
    planning = time.perf_counter() - start
    untuned = autopar.parallelize(copy.deepcopy(workload.model), list(DEVICES), tune=0, cache=False, **call)
    assert tuned.plan is not None
    assert untuned.plan is not None
    step: dict[str, Any] = {"target": workload.target, "loss_fn": workload.loss, **workload.inputs}
    systems: dict[str, Iteration] = {
        "plain": (workload.step, workload.clear),
        "tuned": (lambda: tuned.train_step(**step), tuned.unwrap().zero_grad),
        "untuned": (lambda: untuned.train_step(**step), untuned.unwrap().zero_grad),
    }
    log.info("%s: %s; comparing", workload.title, _described(tuned.plan))
    with ceiling(workload.training_step, len(DEVICES)) as independent:
        systems[CEILING] = independent.step, independent.clear
        first = {name: seconds[0] for name, seconds in _in_turn(systems, rounds=1, steps=1).items()}
        steps = max(1, round(_TURN / first["plain"]))
        rounds = 1 if quick else min(_MOST_ROUNDS, max(5, math.ceil(_SECONDS / steps / sum(first.values()))))
        seconds = _in_turn(systems, rounds, steps)
    row = Row(
        name=workload.title,
        plan=_described(tuned.plan),
        planning=planning,
        predicted=tuned.plan.predicted_step_time,
        step=median(seconds["tuned"]),
        plain=median(seconds["plain"]),
        speedup=ratio(seconds["plain"], seconds["tuned"]),
        untuned=_described(untuned.plan),
        untuned_speedup=ratio(seconds["plain"], seconds["untuned"]),
        seconds=seconds,
    )
    tuned.close()
    untuned.close()
    return row


def _in_turn(systems: Mapping[str, Iteration], rounds: int, steps: int) -> dict[str, tuple[float, ...]]:
    """Seconds of a step of every system in each of `rounds` rounds, each the mean of `steps` steps in a row."""

    def clear() -> None:
        for _, clear_one in systems.values():
            clear_one()

    def turn(iteration: Iteration) -> None:
        step, clear_one = iteration
        for number in range(steps):
            if number:
                clear_one()
            step()

    turns = {name: partial(turn, iteration) for name, iteration in systems.items()}
    return {name: tuple(s / steps for s in taken) for name, taken in interleave(turns, rounds, clear).items()}


def _described(plan: autopar.Plan) -> str:
    return f"{plan.places}, {plan.n_microbatches}" + (f", {plan.schedule}" if len(plan.stages) > 1 else "")


# -- the models -------------------------------------------------------------------------------------------------------


def _mlp() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)))
    return _by_position("MLP of 6 x 256, 64 rows", model, torch.randn(64, 256), torch.randn(64, 256))


def _by_position(title: str, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> Workload:
    return Workload(title, _Keyword(model).train(), {"x": x}, target, nn.functional.mse_loss)


class _Keyword(nn.Module):
    """Takes its input by keyword."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        return output[0] if isinstance(output, tuple) else output


def _lstm() -> Workload:
    torch.manual_seed(0)
    model = nn.LSTM(64, 64, num_layers=2, batch_first=True)
    return _by_position("LSTM of 2 x 64, 16 x 32", model, torch.randn(16, 32, 64), torch.randn(16, 32, 64))


def _unet() -> Workload:
    torch.manual_seed(0)
    return _by_position("U-Net, 8 images of 64 x 64", _UNet(), torch.randn(8, 3, 64, 64), torch.randn(8, 3, 64, 64))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = _convolutions(3, 32), _convolutions(32, 64)
        self.down, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(64, 32, 2, 2)
        self.last, self.out = _convolutions(64, 32), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.first(x)
        inside = self.up(self.middle(self.down(before)))
        return self.out(self.last(torch.cat([before, inside], 1)))


def _convolutions(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.SiLU(), nn.Conv2d(n_out, n_out, 3, padding=1)
    )


def _language_model(title: str, name: str, batch: int, length: int, **changes: Any) -> Workload:
    import transformers

    torch.manual_seed(0)
    changes |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config: Any = transformers.CONFIG_MAPPING[name](**changes)
    classes: dict[str, Any] = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    model = classes.get(name, transformers.AutoModelForCausalLM).from_config(config).train()
    tokens = torch.randint(1000, (batch, length))
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if name == "t5" else {})

    return Workload(f"{title}, {batch} x {length} tokens", model, inputs, tokens, _token_loss)


def _token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


SUBJECTS: tuple[Callable[[], Workload], ...] = (
    _mlp,
    _lstm,
    lambda: _language_model("GPT-2 of 2 x 64", "gpt2", 8, 32, n_layer=2, n_embd=64, n_head=4),
    lambda: _language_model(
        "BERT of 4 x 64",
        "bert",
        8,
        32,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
    ),
    lambda: _language_model(
        "T5 of 3 x 128",
        "t5",
        8,
        32,
        d_model=128,
        num_layers=3,
        num_heads=4,
        d_kv=32,
        d_ff=512,
        decoder_start_token_id=0,
    ),
    lambda: models.resnet(True),
    _unet,
    lambda: _language_model(
        "Llama of 8 x 256",
        "llama",
        8,
        128,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=688,
    ),
    lambda: models.gpt(False),
    lambda: models.resnet(False),
)


def _values(rows: list[Row]) -> dict[str, Any]:
    return {"rows": [dataclasses.asdict(row) for row in rows], "least_speedup": min(row.speedup for row in rows)}


def _table(rows: list[Row]) -> Table:
    return Table(
        "Training steps, in turn",
        (
            "model",
            "plan followed",
            "planning, s",
            "predicted, ms",
            "step, ms",
            "plain, ms",
            "speed-up",
            "predicted fastest",
            "its speed-up",
        ),
        tuple(
            (
                row.name,
                row.plan,
                f"{row.planning:.1f}",
                "-" if row.predicted is None else f"{row.predicted * 1e3:.4g}",
                f"{row.step * 1e3:.4g}",
                f"{row.plain * 1e3:.4g}",
                f"{row.speedup:.2f}",
                row.untuned,
                f"{row.untuned_speedup:.2f}",
            )
            for row in sorted(rows, key=lambda row: row.speedup)
        ),
        "The plans that lost come first. Plans: devices of each stage, micro-batches, schedule. The plain model runs "
        "with torch's own number of threads, each of the two devices with one. Speed-ups are medians over rounds; "
        f"short steps run for {_TURN * 1e3:.0f} ms in a row.",
    )
