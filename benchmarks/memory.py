"""Memory of training steps of models of transformers: predicted without running them, and as they allocate it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.program import capture
from benchmarks import plan_memory
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from benchmarks.plan_memory import Call, Peak, usual_plans
from cost_models.memory.recomputation import nodes_inside
from cost_models.memory.step_memory import step_memory

log = logging.getLogger(__name__)

MOMENTS = ("forward", "backward", "step")

# Optimizer, and whether every layer keeps its inputs alone.
VARIANTS = (("adamw", False), ("sgd", False), ("adamw", True))

MAKERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Subject:
    """A model that returns its loss, and a call of it."""

    name: str
    batch: str  # in words
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    layers: tuple[str, ...]  # modules whose children are the layers


@dataclass(frozen=True)
class Row:
    """A step of one model."""

    name: str
    batch: str
    parameters: int
    optimizer: str
    recompute: bool
    first: bool  # of all steps: the optimizer's states appear in it
    moment: str  # of the predicted peak
    predicted: int  # bytes, peak
    measured: int  # bytes, peak
    predicted_moments: dict[str, int]  # bytes, peak of each
    measured_moments: dict[str, int]
    seconds: float  # that the prediction took, once captured

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run_memory(quick: bool, kept: Kept) -> Report:
    rows: list[Row] = []
    for build in BUILDERS:
        for optimizer, recompute in VARIANTS:
            found = kept.case(
                build.__name__, optimizer, recompute, make=partial(_rows, build, quick, optimizer, recompute)
            )
            rows += [Row(**row) for row in found]
            gc.collect()  # modules and graphs refer to each other, and the next model needs the memory
    plans = list(measure_plans(quick, kept.part("plans")))
    data = [{**dataclasses.asdict(row), "error": row.error} for row in rows]
    tables = (_table(rows), _moments(rows), _plans(plans))
    return Report("Memory of a training step on a CPU", tables, {"rows": data, "plans": [one.data for one in plans]})


@dataclass(frozen=True)
class PlanRow:
    """A step of one model under one plan."""

    name: str
    batch: str
    loss: str  # where it is computed
    plan: str
    stages: list[Peak]

    @property
    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _rows(build: Callable[[bool], Subject], quick: bool, optimizer: str, recompute: bool) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in measure(build(quick), optimizer, recompute)]


def measure_plans(quick: bool, kept: Kept) -> Iterator[PlanRow]:
    """The models under the usual plans, at batches that are small enough for three workers."""
    for build, (first, cuts) in PLANNED.items():
        found = kept.case(build.__name__, make=partial(_plan_rows, build, quick, first, cuts[0 if quick else 1]))
        for row in found:
            yield PlanRow(**{**row, "stages": [Peak(**stage) for stage in row["stages"]]})


def _plan_rows(build: Callable[[bool], Subject], quick: bool, first: str, cuts: Any) -> list[dict[str, Any]]:
    """The rows of one model, as JSON has them."""
    made, subject = [], build(quick)
    rows, length = (4, 32) if quick else (4, 128)
    inputs = {
        name: (x[:rows, :length] if x.dim() == 2 and not x.is_floating_point() else x[:rows]).clone()
        for name, x in subject.inputs.items()
    }
    for train_step in (True, False):
        call = Call(kwargs=inputs, train_step=train_step)
        ready = plan_memory.Subject.of(subject.model.train(), call, workers=3)
        for name, plan in usual_plans(first, cuts):
            if train_step or name in LOSS_BY_CALLER:
                log.info("%s, %s%s", subject.name, name, "" if train_step else ", loss by the caller")
                found = plan_memory.peaks(ready, plan, optimizer="adamw", maker=MAKERS["adamw"])
                where = "last stage" if train_step else "caller"
                made.append(PlanRow(subject.name, f"{rows} samples", where, name, found).data)
                gc.collect()
    return made


def measure(subject: Subject, optimizer: str, recompute: bool) -> Iterator[Row]:
    """The first step and the one after it."""
    log.info("%s, %s%s", subject.name, optimizer, ", layers recomputed" if recompute else "")
    model, inputs = subject.model.train(), subject.inputs
    program = capture(model, (), inputs)
    leaves, _ = program.bind((), inputs) or ([], 0)
    layers = [(f"{path}.{name}", layer) for path in subject.layers for name, layer in _children(model, path)]
    groups = [nodes_inside(program.graph, path) for path, _ in layers] if recompute else []
    predictions = []
    for first in (True, False):
        start = time.perf_counter()
        found = step_memory(program.graph_module, leaves, optimizer=optimizer, recompute=groups, first=first)
        predictions.append((found, time.perf_counter() - start))
    if recompute:
        for _, layer in layers:
            checkpointed(layer)
    real = steps(model, inputs, MAKERS[optimizer](model.parameters()), count=2)
    for first, (found, seconds), peaks in zip((True, False), predictions, real, strict=True):
        yield Row(
            name=subject.name,
            batch=subject.batch,
            parameters=sum(p.numel() for p in model.parameters()),
            optimizer=optimizer,
            recompute=recompute,
            first=first,
            moment=found.moment,
            predicted=found.peak.total,
            measured=max(peaks.values()),
            predicted_moments={moment: getattr(found, moment).total for moment in MOMENTS},
            measured_moments=peaks,
            seconds=seconds,
        )


# -- real steps -------------------------------------------------------------------------------------------------------


def steps(
    model: nn.Module, inputs: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, count: int
) -> list[dict[str, int]]:
    """By moment, the most bytes in use in each of `count` steps on a CPU: parameters, buffers, inputs, the optimizer's
    states, and whatever is allocated. The model returns an object with its loss, which is held to the step's end."""
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        base = nbytes([*model.parameters(), *model.buffers(), *inputs.values(), *states])
        held: list[Any] = []
        actions: tuple[Callable[[], Any], ...] = (
            lambda held=held: held.append(model(**inputs)),  # type: ignore[misc]
            lambda held=held: held[0].loss.backward(),  # type: ignore[misc]
            optimizer.step,
        )
        peaks = {}
        for moment, action in zip(MOMENTS, actions, strict=True):
            most, more = allocated(action)
            peaks[moment] = base + most
            base += more
        found.append(peaks)
    return found


def allocated(action: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that PyTorch's CPU allocator gave out more than it got back: at the most, and in the end.

    Tensors in circles of references from earlier work must not be freed meanwhile, so collect them first.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        return _allocated(action)
    finally:
        if enabled:
            gc.enable()


def _allocated(action: Callable[[], Any]) -> tuple[int, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most, now


def nbytes(values: Iterable[Any]) -> int:
    """Bytes of the storages of all tensors among `values`, each once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def checkpointed(layer: nn.Module) -> None:
    """Make a layer keep its inputs alone, and run again for its backward."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _children(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    return iter(model.get_submodule(path).named_children())


# -- the models -------------------------------------------------------------------------------------------------------

_QUICK_VOCABULARY = 500


def resnet(quick: bool) -> Subject:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    batch, size = (2, 64) if quick else (32, 224)
    labels: dict[str, Any] = {"num_labels": 1000}
    inputs = {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(1000, (batch,))}
    layers = tuple(f"resnet.encoder.stages.{stage}.layers" for stage in range(4))
    model = ResNetForImageClassification(ResNetConfig(**labels))
    return Subject("ResNet-50", f"{batch} images of {size} x {size}", model, inputs, layers)


def gpt2(quick: bool) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": _QUICK_VOCABULARY}
    config = GPT2Config(use_cache=False, **(tiny if quick else {}))
    tokens, batch = _text(config.vocab_size, *((2, 32) if quick else (4, 512)))
    return Subject("GPT-2", batch, GPT2LMHeadModel(config), tokens, ("transformer.h",))


def bert(quick: bool) -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    tiny |= {"num_attention_heads": 4, "vocab_size": _QUICK_VOCABULARY}
    config = BertConfig(**(tiny if quick else {}))
    tokens, batch = _text(config.vocab_size, *((2, 32) if quick else (8, 256)))
    return Subject("BERT-base", batch, BertForMaskedLM(config), tokens, ("bert.encoder.layer",))


def t5(quick: bool) -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"num_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4, "d_kv": 16}
    tiny["vocab_size"] = _QUICK_VOCABULARY
    common: dict[str, Any] = {"use_cache": False, "decoder_start_token_id": 0}
    config = T5Config(**common, **(tiny if quick else {}))
    tokens, batch = _text(config.vocab_size, *((2, 32) if quick else (8, 256)))
    return Subject("T5-small", batch, T5ForConditionalGeneration(config), tokens, ("encoder.block", "decoder.block"))


BUILDERS: tuple[Callable[[bool], Subject], ...] = (resnet, gpt2, bert, t5)


LOSS_BY_CALLER = ("2 stages, gpipe", "2 replicas")  # plans that are also measured so

# For plans: a module of the first stage and, for the quick and the real model, where the second of two stages starts,
# and the second and third of three.
PLANNED: dict[Callable[[bool], Subject], tuple[str, tuple[tuple[str, str, str], tuple[str, str, str]]]] = {
    resnet: (
        "resnet.embedder",
        (("resnet.encoder.stages.2", "resnet.encoder.stages.1", "resnet.encoder.stages.2"),) * 2,
    ),
    gpt2: (
        "transformer.h.0",
        (
            ("transformer.h.1", "transformer.h.1", "transformer.ln_f"),
            ("transformer.h.6", "transformer.h.4", "transformer.h.8"),
        ),
    ),
    bert: (
        "bert.encoder.layer.0",
        (
            ("bert.encoder.layer.1", "bert.encoder.layer.1", "cls"),
            ("bert.encoder.layer.6", "bert.encoder.layer.4", "bert.encoder.layer.8"),
        ),
    ),
    t5: (
        "encoder.block.0",
        (
            ("decoder.block.0", "encoder.block.1", "decoder.block.0"),
            ("decoder.block.0", "encoder.block.3", "decoder.block.0"),
        ),
    ),
}


def _text(vocabulary: int, batch: int, length: int) -> tuple[dict[str, torch.Tensor], str]:
    tokens = torch.randint(vocabulary, (batch, length))
    return {"input_ids": tokens, "labels": tokens}, f"{batch} sequences of {length} tokens"


# -- what is shown ----------------------------------------------------------------------------------------------------


def _table(rows: list[Row]) -> Table:
    return Table(
        "Peak of the step",
        (
            "model",
            "batch",
            "parameters, millions",
            "optimizer",
            "layers recomputed",
            "step",
            "peak in",
            "predicted MB",
            "measured MB",
            "error",
            "prediction s",
        ),
        tuple(
            (
                row.name,
                row.batch,
                f"{row.parameters / 1e6:.1f}",
                *_variant(row),
                row.moment,
                f"{row.predicted / 1e6:.0f}",
                f"{row.measured / 1e6:.0f}",
                f"{row.error:+.1%}",
                f"{row.seconds:.2f}",
            )
            for row in rows
        ),
        "Predicted from the captured graph on the meta device. Measured: what PyTorch's CPU allocator gives out during "
        "the step, with what is there before it (parameters, buffers, the batch, the optimizer's states). float32, "
        "dropout as the models have it, gradients set to None before the step, the output held to its end.",
    )


def _plans(rows: list[PlanRow]) -> Table:
    def text(stage: Peak) -> str:
        least = f", {stage.certain / stage.measured - 1:+.1%}" if stage.certain != stage.stated else ""
        return f"{stage.stated / 1e6:.0f} / {stage.measured / 1e6:.0f} ({stage.ratio - 1:+.1%}{least})"

    return Table(
        "Peaks of the stages of plans, stated / measured MB",
        ("model", "batch", "loss", "plan", "stage 0", "stage 1", "stage 2", "formula / measured"),
        tuple(
            (
                row.name,
                row.batch,
                row.loss,
                row.plan,
                *[*map(text, row.stages), "", ""][:3],
                " ".join(f"{stage.formula / stage.measured:.2f}" for stage in row.stages),
            )
            for row in rows
        ),
        "AdamW after its first step. What each worker holds is counted from its first use of a storage until that is "
        "freed; CPU workers pass tensors on without a copy, which then count on both. Workers wait for each other "
        "differently in every run: a plan states the most that any run holds. The most of two steps counts; in "
        "brackets how far the statement is above it, and how far the least that every run holds is. Formula: what the "
        "partition search filters with.",
    )


def _moments(rows: list[Row]) -> Table:
    return Table(
        "Predicted / measured MB by moment",
        ("model", "optimizer", "layers recomputed", "step", *MOMENTS),
        tuple(
            (
                row.name,
                *_variant(row),
                *(f"{row.predicted_moments[m] / 1e6:.0f} / {row.measured_moments[m] / 1e6:.0f}" for m in MOMENTS),
            )
            for row in rows
        ),
    )


def _variant(row: Row) -> tuple[str, str, str]:
    return row.optimizer, "yes" if row.recompute else "no", "first" if row.first else "later"
