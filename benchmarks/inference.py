"""Samples per second of classification and scoring: batches pipelined over micro-batches, and the plain model."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

import autopar
from autopar.runtime.comparing.contestants import without_loss_function
from autopar.runtime.other_systems.independent import CEILING, ceiling
from autopar.runtime.other_systems.training_step import TrainingStep
from benchmarks import zoo
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.timing import Step, interleave, ratio
from benchmarks.zoo import Subject
from cost_models.hardware.devices import operator_threads

log = logging.getLogger(__name__)

DEVICES = ("cpu", "cpu")
SUBJECTS: tuple[Callable[[bool], Subject], ...] = (zoo.resnet, zoo.vit, zoo.bert, zoo.gpt2)
WAYS = {"pipeline": 1, "free choice": None}  # max_replicas of the search


@dataclass(frozen=True)
class Scale:
    batch: int  # samples in a call
    rounds: int


FULL = Scale(32, 5)
QUICK = Scale(8, 1)


@dataclass(frozen=True)
class Row:
    """One model, planned in one way."""

    name: str
    way: str  # a key of WAYS
    stages: tuple[tuple[str, ...], ...]  # devices of each stage
    n_microbatches: int
    throughput: float  # samples per s, median
    plain_throughput: float  # samples per s of the plain model on one thread, in turn with it
    speedup: float  # median over rounds of plain / pipelined seconds
    output_error: float  # largest difference / largest value of the plain model
    seconds: dict[str, tuple[float, ...]]  # of all systems, in the same rounds


def run_inference(quick: bool, kept: Kept) -> Report:
    scale = QUICK if quick else FULL
    rows = []
    for build in SUBJECTS:
        found = kept.case(
            build.__name__,
            make=lambda b=build: [dataclasses.asdict(row) for row in measure(b(quick), scale)],  # type: ignore[misc]
        )
        rows += [as_row(Row, row) for row in found]
    return Report(
        f"Inference on two CPU devices, {'tiny' if quick else 'full-size'} models",
        (_table(rows, scale),),
        {"rows": [dataclasses.asdict(row) for row in rows]},
        measured=tuple(Rounds(name, seconds, CEILING) for name, seconds in {r.name: r.seconds for r in rows}.items()),
    )


def measure(subject: Subject, scale: Scale) -> list[Row]:
    """Calls of the model in evaluation, planned in every way, in turn with the plain model."""
    plain = copy.deepcopy(subject.model).eval()
    inputs = {name: x.repeat(-(-scale.batch // len(x)), *[1] * (x.dim() - 1)) for name, x in subject.inputs.items()}
    inputs = {name: x[: scale.batch] for name, x in inputs.items()}
    modules = {}
    for way, replicas in WAYS.items():
        log.info("%s: planning, %s", subject.name, way)
        model = copy.deepcopy(plain)
        with torch.no_grad():
            modules[way] = autopar.parallelize(
                model, list(DEVICES), max_replicas=replicas, tune=0, example_kwargs=inputs
            )
    dims = (0,) * len(inputs)
    alone = TrainingStep(plain, (), inputs, None, without_loss_function, scale.batch, dims, (None,), training=False)
    with operator_threads(1), ceiling(alone, len(DEVICES)) as independent, torch.inference_mode():
        expected = plain(**inputs).logits
        errors = {
            way: float((pm(**inputs).logits - expected).abs().max() / expected.abs().max())
            for way, pm in modules.items()
        }
        systems: dict[str, Step] = {"plain": lambda: plain(**inputs), CEILING: independent.step}
        systems |= {way: lambda m=pm: m(**inputs) for way, pm in modules.items()}  # type: ignore[misc]
        seconds = interleave(systems, scale.rounds)
    rows = []
    for way, pm in modules.items():
        assert pm.plan is not None
        rows.append(
            Row(
                name=subject.name,
                way=way,
                stages=tuple(stage.devices for stage in pm.plan.stages),
                n_microbatches=pm.plan.n_microbatches,
                throughput=scale.batch / median(seconds[way]),
                plain_throughput=scale.batch / median(seconds["plain"]),
                speedup=ratio(seconds["plain"], seconds[way]),
                output_error=errors[way],
                seconds=seconds,
            )
        )
        pm.close()
    return rows


def _table(rows: list[Row], scale: Scale) -> Table:
    return Table(
        f"Calls under torch.inference_mode() with {scale.batch} samples",
        ("model", "plan", "stages", "micro-batches", "samples/s", "plain samples/s", "speed-up", "output error"),
        tuple(
            (
                row.name,
                row.way,
                " | ".join(", ".join(devices) for devices in row.stages),
                str(row.n_microbatches),
                f"{row.throughput:.1f}",
                f"{row.plain_throughput:.1f}",
                f"{row.speedup:.2f}",
                f"{row.output_error:.1e}",
            )
            for row in rows
        ),
        "Random weights. The plain model runs on one thread, as each of the two devices does. 'pipeline' allows one "
        "device per stage; 'free choice' also replicas. Errors are relative to the plain model's largest logit.",
    )
