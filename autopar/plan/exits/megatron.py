"""Arguments of Megatron-LM's training scripts, such as pretrain_gpt.py.

Names are those of megatron/training/arguments.py and of megatron-core's TransformerConfig, ModelParallelConfig and
DistributedDataParallelConfig, version 0.16.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.plan.degrees import Degrees
from autopar.plan.exits.configuration import (
    NotExpressed,
    ToolConfiguration,
    ToolDegrees,
    refuse,
    refuse_reading,
    words_in,
)
from autopar.plan.exits.plan_degrees import beyond_degrees, degrees_in
from autopar.plan.exits.stage_layers import StageLayers, even_counts, stage_layers

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

NAME = "megatron"
TITLE = "Megatron-LM"
VERSION = "megatron-core 0.16"

Value = str | bool
"""Of an argument; True for one without a value."""

_FSDP: Mapping[str, Value] = {  # what Megatron-FSDP needs, by its documentation
    "--use-distributed-optimizer": True,
    "--use-megatron-fsdp": True,
    "--no-gradient-accumulation-fusion": True,
    "--ckpt-format": "fsdp_dtensor",
}
_ZERO: Mapping[int, Mapping[str, Value]] = {
    0: {},
    1: {"--use-distributed-optimizer": True},
    2: {**_FSDP, "--data-parallel-sharding-strategy": "optim_grads"},
    3: {**_FSDP, "--data-parallel-sharding-strategy": "optim_grads_params"},
}
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_PRECISIONS: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16-mixed": ("--bf16",),  # gradients in float32 are the default with --bf16
    "fp16-mixed": ("--fp16",),
    "bf16-mixed-bf16-grads": ("--bf16", "--grad-reduce-in-bf16"),
}
_INTERLEAVED = "interleaved-1f1b"


# -- to Megatron-LM ---------------------------------------------------------------------------------------------------


def configuration_of(plan: Plan) -> ToolConfiguration:
    """Raises PlanError that lists why Megatron-LM cannot express the plan at all."""
    degrees, layers = degrees_in(plan, TITLE), stage_layers(plan)
    refuse(TITLE, list(_impossible(degrees, layers)))
    arguments: dict[str, Value] = {
        "--tensor-model-parallel-size": str(degrees.tensor),
        "--pipeline-model-parallel-size": str(degrees.pipeline),
    }
    if layers.counts and sum(layers.counts):
        arguments["--num-layers"] = str(sum(layers.counts))
    if degrees.n_stages > 1 and not layers.even:
        arguments["--pipeline-model-parallel-layout"] = layout_text(layers.counts)
    elif degrees.chunks > 1:
        arguments["--num-virtual-stages-per-pipeline-rank"] = str(degrees.chunks)
    arguments |= {"--micro-batch-size": str(degrees.micro_batch), "--global-batch-size": str(degrees.batch)}
    if degrees.sequence_parallel:
        arguments["--sequence-parallel"] = True
    arguments |= _ZERO[degrees.zero]
    arguments |= _recompute(degrees, layers)
    precision = plan.assumed.precision if plan.assumed is not None else None
    arguments |= dict.fromkeys(_PRECISIONS.get(precision or "fp32", ()), True)
    lost = [*beyond_degrees(plan, degrees), *layers.cut_layers(), *_lost(plan, degrees, layers)]
    if precision is not None and precision not in _PRECISIONS:
        lost.append(NotExpressed("precision", f"{precision} has no argument"))
    words = [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in arguments.items()]
    return ToolConfiguration(NAME, VERSION, arguments, " \\\n".join(words) + "\n", len(plan.used_devices), tuple(lost))


def layout_text(counts: Sequence[int]) -> str:
    """`Ett|tt|t|tL` for stages of 2, 2, 1 and 1 layers: embedding, transformer layers, loss; stages in model order."""
    first, last = 0, len(counts) - 1
    return "|".join(f"{'E' * (s == first)}{'t' * n}{'L' * (s == last)}" for s, n in enumerate(counts))


def _impossible(degrees: Degrees, layers: StageLayers) -> Iterator[str]:
    if degrees.n_stages > 1 and len(layers.lists) != 1:
        found = ", ".join(layers.lists) or "none"
        yield f"its pipelines split one list of transformer layers, and the model's module lists are: {found}"
    if degrees.chunks > 1 and degrees.n_microbatches % degrees.pipeline:
        yield (
            f"interleaved stages need a multiple of pipeline={degrees.pipeline} micro-batches, and each replica has "
            f"{degrees.n_microbatches}"
        )


def _recompute(degrees: Degrees, layers: StageLayers) -> dict[str, Value]:
    if degrees.recompute == "none":
        return {}
    if degrees.recompute == "selective":
        return {"--recompute-granularity": "selective"}
    n = max(layers.counts, default=1) if degrees.recompute == "stage" else 1
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": str(max(1, n)),
    }


def _lost(plan: Plan, degrees: Degrees, layers: StageLayers) -> Iterator[NotExpressed]:
    if degrees.pipeline > 1 and degrees.schedule not in ("1f1b", _INTERLEAVED):
        its_own = _INTERLEAVED if degrees.chunks > 1 else "1f1b"
        yield NotExpressed("schedule", f"{degrees.schedule}; Megatron-LM runs {its_own}")
    if degrees.recompute == "selective-op":
        yield NotExpressed("recompute", "selective-op; full recomputation of each layer takes its place and keeps less")
    if degrees.recompute == "stage":
        yield NotExpressed("recompute", "stage; layers alone run again, embedding and head are kept")
    middle = layers.others[1:-1]
    elsewhere = [f"{path} on stage {stage}" for stage, paths in enumerate(middle, 1) for path in paths]
    if elsewhere:
        yield NotExpressed(
            "modules", f"outside of layers, {', '.join(elsewhere[:4])}; Megatron-LM has such on the first or last stage"
        )


# -- from Megatron-LM -------------------------------------------------------------------------------------------------


def degrees_from(source: str | Sequence[str] | Mapping[str, Any] | ToolConfiguration) -> ToolDegrees:
    """The degrees of a command line: as text (a shell script's arguments), word by word, or by name.

    Arguments that say nothing of how the work is divided are skipped. Raises PlanError that lists those that no plan by
    hand expresses.
    """
    found = arguments_in(source)
    refuse_reading(TITLE, [*_refused(found)])
    tensor, pipeline = _int(found, "--tensor-model-parallel-size", 1), _int(found, "--pipeline-model-parallel-size", 1)
    chunks, problems = _chunks(found, pipeline)
    recompute, more = _recompute_of(found, pipeline * chunks)
    refuse_reading(TITLE, [*problems, *more])
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "chunks": chunks}
    if "--micro-batch-size" in found:
        degrees["micro_batch"] = _int(found, "--micro-batch-size", 1)
    zero = int("--use-distributed-optimizer" in found)
    if "--use-megatron-fsdp" in found:
        zero = _STRATEGIES[str(found.get("--data-parallel-sharding-strategy", "no_shard"))]
    degrees |= {
        "schedule": _INTERLEAVED if chunks > 1 else "1f1b",
        "zero": zero,
        "recompute": recompute,
        "sequence_parallel": tensor > 1 and "--sequence-parallel" in found,  # as Megatron-LM does
    }
    batch = _int(found, "--global-batch-size", 0)
    return ToolDegrees(degrees, batch or None)


def arguments_in(source: str | Sequence[str] | Mapping[str, Any] | ToolConfiguration) -> dict[str, Value]:
    """Arguments by name, with hyphens; several values of one are one text."""
    if isinstance(source, ToolConfiguration):
        return dict(source.settings)
    if isinstance(source, Mapping):
        return dict(_settings(source))
    words = words_in(TITLE, source)
    found: dict[str, Value] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            found[name] = value if equals else True
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found


def _settings(source: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Arguments of a mapping, written with or without hyphens; those that are off or None are left out."""
    for name, value in source.items():
        if value is None or value is False:
            continue
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        yield f"--{str(name).removeprefix('--').replace('_', '-')}", True if value is True else text


_WITHOUT_DEGREE = (
    *("--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    *("--num-distributed-optimizer-instances", "--encoder-tensor-model-parallel-size"),
    "--encoder-pipeline-model-parallel-size",
)
"""Options that divide the work in ways that plans by hand do not have. Their value 1 changes nothing."""

_NOT_BY_HAND = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--rampup-batch-size"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--use-torch-fsdp2"),
    *("--overlap-moe-expert-parallel-comm", "--cpu-offloading", "--optimizer-cpu-offload"),
    *("--distribute-saved-activations", "--num-microbatches-with-partial-activation-checkpoints"),
)


def _refused(found: Mapping[str, Value]) -> Iterator[str]:
    if not any(name in _KNOWN for name in found):
        yield (
            "no argument says how the work is divided, such as --tensor-model-parallel-size or --micro-batch-size; is "
            "this a command line of Megatron-LM?"
        )
    for name in _WITHOUT_DEGREE:
        if found.get(name, "1") not in ("1", "0"):
            if name == "--expert-tensor-parallel-size" and found[name] == found.get("--tensor-model-parallel-size"):
                continue
            yield f"{name} {found[name]}"
    yield from (
        f"{name} {'' if found[name] is True else found[name]}".strip() for name in _NOT_BY_HAND if name in found
    )
    if found.get("--data-parallel-sharding-strategy", "no_shard") not in _STRATEGIES:
        yield f"--data-parallel-sharding-strategy {found['--data-parallel-sharding-strategy']}"
    for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", *_COUNTS):
        if name in found and not str(found[name]).isdecimal():
            yield f"{name} needs a whole number, got {found[name]}"


_COUNTS = (
    *("--global-batch-size", "--num-layers", "--num-virtual-stages-per-pipeline-rank", "--recompute-num-layers"),
    "--num-layers-per-virtual-pipeline-stage",
)


_KNOWN = {
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--sequence-parallel"),
    *("--use-distributed-optimizer", "--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
    *("--pipeline-model-parallel-layout", "--recompute-activations", "--recompute-granularity", "--recompute-method"),
    *("--recompute-modules", *_COUNTS, *_WITHOUT_DEGREE, *_NOT_BY_HAND),
}


def _int(found: Mapping[str, Value], name: str, default: int) -> int:
    return int(found[name]) if name in found else default


def _chunks(found: Mapping[str, Value], pipeline: int) -> tuple[int, list[str]]:
    """Stages of each device, and what is wrong with them."""
    n_layers = _int(found, "--num-layers", 0)
    if "--num-virtual-stages-per-pipeline-rank" in found:
        return _int(found, "--num-virtual-stages-per-pipeline-rank", 1), []
    name = "--num-layers-per-virtual-pipeline-stage"
    if name in found:
        each = _int(found, name, 1)
        if not n_layers:
            return 1, [f"{name} {each}: give --num-layers, too"]
        if each < 1 or n_layers % (pipeline * each):
            return 1, [f"{name} {each}: {n_layers} layers make no equal stages on {pipeline} devices"]
        return n_layers // pipeline // each, []
    name = "--pipeline-model-parallel-layout"
    if name not in found:
        return 1, []
    counts = layout_counts(str(found[name]))
    if counts is None:
        return 1, [f"{name} {found[name]}: only E, t and L with counts are understood"]
    if len(counts) % pipeline:
        return 1, [f"{name} {found[name]}: {len(counts)} stages do not go round {pipeline} devices"]
    even = even_counts(sum(counts), len(counts))
    if counts != even:
        ours, theirs = (", ".join(map(str, one)) for one in (even, counts))
        return 1, [
            f"{name} {found[name]}: stages have {theirs} layers, those of a plan by hand {ours}; write the split with "
            "Plan.from_split"
        ]
    return len(counts) // pipeline, []


def layout_counts(text: str) -> tuple[int, ...] | None:
    """Transformer layers of every stage of a layout such as `Et*2|(tt|)*2tL`; None for other kinds of layers."""
    text = text.replace("\\", "").replace(",", "").replace(" ", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    if re.fullmatch(r"E[t|]*L", text) is None:
        return None
    return tuple(len(list(stage)) for stage in text[1:-1].split("|"))


def _recompute_of(found: Mapping[str, Value], n_stages: int) -> tuple[str, list[str]]:
    """What runs again, as `Plan.by_hand` calls it, and what no plan by hand does."""
    granularity = found.get("--recompute-granularity", "selective" if "--recompute-activations" in found else None)
    if granularity is None:
        return "none", []
    if granularity == "selective":
        modules = str(found.get("--recompute-modules", "core_attn"))
        return "selective", [] if modules == "core_attn" else [f"--recompute-modules {modules}"]
    if granularity != "full" or found.get("--recompute-method") != "uniform":
        return "none", [f"--recompute-granularity {granularity} --recompute-method {found.get('--recompute-method')}"]
    each, n_layers = _int(found, "--recompute-num-layers", 1), _int(found, "--num-layers", 0)
    if each == 1:
        return "full", []
    if n_layers and each >= max(even_counts(n_layers, n_stages)):
        return "stage", []
    why = "give --num-layers, too" if not n_layers else f"no whole stage of {n_layers} layers on {n_stages} stages"
    return "none", [f"--recompute-num-layers {each}: {why}"]
