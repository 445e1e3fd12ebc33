"""Architectures of transformers at full size, with random weights: planned, run, and held against the plain model."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.other_systems.independent import CEILING, ceiling
from autopar.runtime.other_systems.training_step import TrainingStep
from benchmarks.kept import Kept, as_row
from benchmarks.output import Report, Rounds, Table
from benchmarks.timing import interleave, ratio
from cost_models.hardware.devices import operator_threads

log = logging.getLogger(__name__)

DEVICES = ("cpu", "cpu")
BATCH, N_MICROBATCHES = 4, 2
ROUNDS = 5


@dataclass(frozen=True)
class Subject:
    """A model without randomness of its own, and a call of it; the loss is the mean square of its largest output."""

    name: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]  # the batch is dimension 0

    def __post_init__(self) -> None:
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # statistics of micro-batches would be other numbers

    @property
    def training_step(self) -> TrainingStep:
        """The same step, as other systems take it."""
        dims = (0,) * len(self.inputs)
        return TrainingStep(self.model, (), self.inputs, None, mean_square, BATCH, dims, (None,))


@dataclass(frozen=True)
class Row:
    """What came of one model."""

    name: str
    parameters: int  # tied ones once
    operators: tuple[int, ...]  # of each stage
    n_microbatches: int  # in the plan: 1 where the batch must stay whole
    planning: float  # s, capture, profile and search, nothing remembered
    predicted: float | None  # s, the plan's step
    steps: tuple[float, ...]  # s, pipelined forward and backward, in turn with
    plain_steps: tuple[float, ...]  # s, the plain model's on one thread, and
    ceiling_steps: tuple[float, ...]  # s, those of independent processes, each with its part of the batch
    speedup: float  # median over rounds of plain / pipelined
    output_error: float  # largest difference / largest value of the plain model
    gradient_error: float  # largest norm of a parameter's difference / largest norm of the plain model's gradients


def run_zoo(quick: bool, kept: Kept) -> Report:
    rows = []
    for build in BUILDERS:
        found = kept.case(
            build.__name__,
            make=lambda b=build: dataclasses.asdict(measure(b(quick), rounds=1 if quick else ROUNDS)),  # type: ignore[misc]
        )
        rows.append(as_row(Row, found))
        gc.collect()  # modules and graphs refer to each other, and the next model needs the memory
    size = "Tiny models" if quick else "Full-size models"
    return Report(
        f"{size} of transformers on two CPU devices",
        (_table(rows),),
        {"rows": list(map(_values, rows))},
        measured=_rounds(rows),
    )


def _rounds(rows: list[Row]) -> tuple[Rounds, ...]:
    return tuple(
        Rounds(row.name, {"pipelined": row.steps, "plain model": row.plain_steps, CEILING: row.ceiling_steps}, CEILING)
        for row in rows
    )


def measure(subject: Subject, rounds: int) -> Row:
    """Plans a pure pipeline for the subject's model and compares it with a copy that stays as it is."""
    log.info("%s: planning", subject.name)
    oracle = copy.deepcopy(subject.model)
    with operator_threads(1):
        start = time.perf_counter()
        pm = autopar.parallelize(
            subject.model,
            list(DEVICES),
            max_replicas=1,
            n_microbatches=N_MICROBATCHES,
            example_kwargs=subject.inputs,
            tune=0,
            cache=False,
        )
        planning = time.perf_counter() - start
        assert pm.plan is not None
        log.info("%s: planned in %.1f s; comparing", subject.name, planning)
        models: dict[str, nn.Module] = {"pipelined": pm, "plain": oracle}

        def clear() -> None:
            for model in models.values():
                model.zero_grad(set_to_none=True)

        clear()
        ours, theirs = (step(model, subject.inputs) for model in models.values())
        output_error = float((ours - theirs).abs().max() / theirs.abs().max())
        gradient_error = largest_gradient_error(pm, oracle)
        with ceiling(dataclasses.replace(subject.training_step, model=oracle), len(DEVICES)) as independent:
            steps: dict[str, Callable[[], object]] = {
                "pipelined": lambda: step(pm, subject.inputs),
                "plain": lambda: step(oracle, subject.inputs),
                CEILING: independent.step,
            }

            def clear_all() -> None:
                clear()
                independent.clear()

            seconds = interleave(steps, rounds, clear_all)
        pm.close()
    return Row(
        name=subject.name,
        parameters=sum(p.numel() for p in oracle.parameters()),
        operators=tuple(len(stage.operators) for stage in pm.plan.stages),
        n_microbatches=pm.plan.n_microbatches,
        planning=planning,
        predicted=pm.plan.predicted_step_time,
        steps=seconds["pipelined"],
        plain_steps=seconds["plain"],
        ceiling_steps=seconds[CEILING],
        speedup=ratio(seconds["plain"], seconds["pipelined"]),
        output_error=output_error,
        gradient_error=gradient_error,
    )


def largest_gradient_error(model: nn.Module, oracle: nn.Module) -> float:
    """The largest norm of a parameter's difference / the largest of the oracle's gradients. No gradient counts as 0.

    By the largest, not by each parameter's own: some gradients are zero but for rounding, as those of the bias of
    attention's keys.
    """
    expected = {name: _gradient(p) for name, p in oracle.named_parameters()}
    differences = [(_gradient(p) - expected[name]).norm() for name, p in model.named_parameters()]
    # The maximum of tensors lets NaN through, that of numbers may not.
    return float(torch.stack(differences).max() / torch.stack([g.norm() for g in expected.values()]).max())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward; returns the largest floating-point output."""
    output = model(**inputs)
    mean_square(output, None).backward()
    return _largest(output.values()).detach()


def mean_square(output: Any, target: None) -> torch.Tensor:
    """Of the largest floating-point output: a loss without a target."""
    return _largest(output.values()).square().mean()


def _largest(outputs: Iterable[Any]) -> torch.Tensor:
    return max((x for x in outputs if isinstance(x, torch.Tensor) and x.is_floating_point()), key=torch.Tensor.numel)


# -- the models -------------------------------------------------------------------------------------------------------

_CAUSAL: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
_TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_TINY_VOCABULARY = 100


def resnet(quick: bool) -> Subject:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 1, 1]}
    config = ResNetConfig(**(tiny if quick else {}))
    return Subject("ResNet-50", ResNetForImageClassification(config), {"pixel_values": _images(32 if quick else 224)})


def gpt2(quick: bool) -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": _TINY_VOCABULARY}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_CAUSAL, **(tiny if quick else {}))
    return Subject("GPT-2", GPT2LMHeadModel(config), {"input_ids": _tokens(config)})


def bert(quick: bool) -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    tiny = {**_TINY, "vocab_size": _TINY_VOCABULARY} if quick else {}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **tiny)
    tokens = _tokens(config)
    length = tokens.shape[1]
    lengths = length - torch.arange(BATCH) * length // (BATCH + 1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    return Subject("BERT-base", BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask})


def t5(quick: bool) -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    tiny: dict[str, Any] = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8}
    tiny["vocab_size"] = _TINY_VOCABULARY
    config = T5Config(use_cache=False, dropout_rate=0.0, **(tiny if quick else {}))
    inputs = {"input_ids": _tokens(config), "decoder_input_ids": _tokens(config)}
    return Subject("T5-small", T5ForConditionalGeneration(config), inputs)


def vit(quick: bool) -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    tiny = {**_TINY, "image_size": 32, "patch_size": 8} if quick else {}
    config = ViTConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **tiny)
    return Subject("ViT-base", ViTForImageClassification(config), {"pixel_values": _images(32 if quick else 224)})


def llama(quick: bool) -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "intermediate_size": 4864,
    }
    tiny = {**_TINY, "vocab_size": _TINY_VOCABULARY}
    config = LlamaConfig(**_CAUSAL, **(tiny if quick else shape))
    return Subject("Llama", LlamaForCausalLM(config), {"input_ids": _tokens(config)})


def mixtral(quick: bool) -> Subject:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
    }
    tiny = {**_TINY, "vocab_size": _TINY_VOCABULARY}
    config = MixtralConfig(num_local_experts=4, num_key_value_heads=4, **_CAUSAL, **(tiny if quick else shape))
    return Subject("Mixtral", MixtralForCausalLM(config), {"input_ids": _tokens(config)})


BUILDERS: tuple[Callable[[bool], Subject], ...] = (resnet, gpt2, bert, t5, vit, llama, mixtral)


def _images(size: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def _tokens(config: Any) -> torch.Tensor:
    return torch.randint(config.vocab_size, (BATCH, 64))


# -- what is shown ----------------------------------------------------------------------------------------------------


def _values(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "step": median(row.steps), "plain_step": median(row.plain_steps)}


def _table(rows: list[Row]) -> Table:
    return Table(
        f"Forward and backward of a batch of {BATCH}",
        (
            "model",
            "parameters, millions",
            "stages",
            "operators a stage",
            "micro-batches",
            "plan s",
            "step s",
            "predicted s",
            "plain s",
            "ceiling s",
            "speed-up",
            "output error",
            "gradient error",
        ),
        tuple(_cells(row) for row in rows),
        "Dropout 0, batch norm frozen, random weights. Pure pipelines with no cached measurements; steps were measured "
        "in turn with the plain model on one thread and with the ceiling, two independent processes with half of the "
        "batch each; medians. Errors are relative to the plain model: the largest "
        "difference to its largest output, and the largest norm of a gradient's difference to its largest gradient's.",
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.parameters / 1e6:.3g}",
        str(len(row.operators)),
        ", ".join(map(str, row.operators)),
        str(row.n_microbatches),
        f"{row.planning:.1f}",
        f"{median(row.steps):.3f}",
        "" if row.predicted is None else f"{row.predicted:.3f}",
        f"{median(row.plain_steps):.3f}",
        f"{median(row.ceiling_steps):.3f}",
        f"{row.speedup:.2f}",
        f"{row.output_error:.1e}",
        f"{row.gradient_error:.1e}",
    )
