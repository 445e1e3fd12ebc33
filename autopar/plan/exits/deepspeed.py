"""DeepSpeed's configuration file (ds_config.json), version 0.19.

Its pipelines (deepspeed.pipe.PipelineModule) run 1F1B with one stage a device; ZeRO 2 and 3 do not go with them. Stages
and their layers are arguments of PipelineModule, which the script passes: `settings["PipelineModule"]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autopar.plan.degrees import ZERO, Degrees
from autopar.plan.exits.configuration import (
    NotExpressed,
    ToolConfiguration,
    ToolDegrees,
    refuse,
    refuse_reading,
    section_of,
    settings_by_name,
)
from autopar.plan.exits.plan_degrees import beyond_degrees, degrees_in
from autopar.plan.exits.stage_layers import stage_layers

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

NAME = "deepspeed"
TITLE = "DeepSpeed"
VERSION = "deepspeed 0.19"

_PRECISIONS: Mapping[str | None, Mapping[str, Any]] = {
    None: {},
    "fp32": {},
    "bf16-mixed": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16-mixed-bf16-grads": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16-mixed": {"fp16": {"enabled": True}},
}


# -- to DeepSpeed -----------------------------------------------------------------------------------------------------


def configuration_of(plan: Plan) -> ToolConfiguration:
    """Raises PlanError that lists why DeepSpeed cannot express the plan at all."""
    degrees = degrees_in(plan, TITLE)
    refuse(TITLE, list(_impossible(degrees)))
    file: dict[str, Any] = {
        "train_batch_size": degrees.batch,
        "train_micro_batch_size_per_gpu": degrees.micro_batch,
        "gradient_accumulation_steps": degrees.n_microbatches,
        "zero_optimization": {"stage": degrees.zero},
    }
    if degrees.tensor > 1:
        file["tensor_parallel"] = {"autotp_size": degrees.tensor}
    settings: dict[str, Any] = {"config": file}
    layers = stage_layers(plan)
    lost = [*beyond_degrees(plan, degrees), *_lost(degrees)]
    if degrees.pipeline > 1:
        file["pipeline"] = {"activation_checkpoint_interval": 0 if degrees.recompute == "none" else 1}
        settings["PipelineModule"] = {"num_stages": degrees.pipeline, "partition_method": "uniform"}
        settings["layers"] = layers.counts
        lost += layers.cut_layers()
        each = ", ".join(map(str, layers.counts))
        lost.append(
            NotExpressed(
                "stages",
                f"in the script: PipelineModule(layers, num_stages={degrees.pipeline}); its partition_method takes no "
                f"layers by stage, and the plan has {each}",
            )
        )
    precision = plan.assumed.precision if plan.assumed is not None else None
    file |= _PRECISIONS.get(precision, {})
    if precision not in _PRECISIONS:
        lost.append(NotExpressed("precision", f"{precision}: build the model in that dtype"))
    text = json.dumps(file, indent=2) + "\n"
    return ToolConfiguration(NAME, VERSION, settings, text, len(plan.used_devices), tuple(lost))


def _impossible(degrees: Degrees) -> Iterator[str]:
    if degrees.pipeline > 1 and degrees.zero > 1:
        yield f"its pipelines go with zero=0 or 1, not with zero={degrees.zero}"
    if degrees.pipeline > 1 and degrees.tensor > 1:
        yield f"its tensor parallelism (AutoTP) does not go with pipelines: tensor={degrees.tensor}, " + (
            f"pipeline={degrees.pipeline}"
        )
    if degrees.chunks > 1:
        yield f"its pipelines have one stage a device, and the plan has chunks={degrees.chunks}"


def _lost(degrees: Degrees) -> Iterator[NotExpressed]:
    if degrees.pipeline > 1 and degrees.schedule != "1f1b":
        yield NotExpressed("schedule", f"{degrees.schedule}; DeepSpeed runs 1f1b")
    if degrees.sequence_parallel:
        yield NotExpressed("sequence_parallel", "True; AutoTP keeps what is between matrices whole")
    if degrees.recompute != "none" and degrees.pipeline == 1:
        yield NotExpressed(
            "recompute", f"{degrees.recompute}; the model's own code calls deepspeed.checkpointing.checkpoint"
        )
    elif degrees.recompute not in ("none", "full"):
        yield NotExpressed(
            "recompute", f"{degrees.recompute}; every layer of PipelineModule runs again, which keeps less"
        )


# -- from DeepSpeed ---------------------------------------------------------------------------------------------------


def degrees_from(source: Any) -> ToolDegrees:
    """The degrees of a configuration: its JSON text, or a mapping.

    The number of stages is no part of it, so a pipeline is read only from what `configuration_of` made. Raises
    PlanError that lists what no plan by hand expresses.
    """
    stages = 1
    if isinstance(source, ToolConfiguration):
        stages = source.settings.get("PipelineModule", {}).get("num_stages", 1)
        source = source.settings["config"]
    source = settings_by_name(TITLE, source)
    notes = tuple(f"{name} is 'auto': {_OPEN[name]}" for name in _BATCH if source.get(name) == "auto")
    source = {name: None if value == "auto" else value for name, value in source.items()}
    refuse_reading(TITLE, list(_problems(source, stages)))
    zero = section_of(TITLE, source, "zero_optimization").get("stage", 0)
    tensor = max(1, section_of(TITLE, source, "tensor_parallel").get("autotp_size", 1))
    interval = section_of(TITLE, source, "pipeline").get("activation_checkpoint_interval", 0)
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": stages, "zero": zero}
    degrees["recompute"] = "full" if interval else "none"
    batch, micro, steps = (source.get(name) for name in _BATCH)
    if micro is not None:
        degrees["micro_batch"] = micro
        if batch is not None and steps is not None:
            degrees["data"] = batch // (micro * steps)
    return ToolDegrees(degrees, batch, notes)


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OPEN = {  # what settings are that the training script fills in
    "train_batch_size": "it is that of the example call",
    "train_micro_batch_size_per_gpu": "micro_batch= gives it, otherwise each replica takes all of its samples at once",
    "gradient_accumulation_steps": "it follows from the other two",
}
_SECTIONS = ("zero_optimization", "tensor_parallel", "pipeline")


def _problems(source: Mapping[str, Any], stages: int) -> Iterator[str]:
    for name in _BATCH:
        value = source.get(name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"{name} must be a whole number of at least 1, got {value!r}; 'auto' leaves it open"
            return
    if not any(name in source for name in (*_BATCH, *_SECTIONS, "sequence_parallel_size")):
        yield f"none of {', '.join((*_BATCH, *_SECTIONS))} is there; is this a configuration of DeepSpeed?"
    zero, tensor, pipeline = (section_of(TITLE, source, name) for name in _SECTIONS)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in ZERO:
        yield f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}"
    for name in ("offload_optimizer", "offload_param"):
        if section_of(TITLE, zero, name).get("device", "none") not in (None, "none"):
            yield f"zero_optimization.{name}"
    size = tensor.get("autotp_size", 1)
    if type(size) is not int:
        yield f"tensor_parallel.autotp_size must be a whole number, got {size!r}"
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        if zero.get(name, 1) not in (1, -1):
            yield f"zero_optimization.{name}={zero[name]}"
    if source.get("sequence_parallel_size") not in (None, 1):
        yield f"sequence_parallel_size={source['sequence_parallel_size']}"
    batch, micro, steps = (source.get(name) for name in _BATCH)
    if batch is not None and micro is not None and steps is not None and batch % (micro * steps):
        yield f"train_batch_size={batch} is no multiple of {micro} x {steps} samples"
    if stages == 1 and pipeline.get("activation_checkpoint_interval", 0):
        yield "pipeline: its stages are an argument of PipelineModule; write the plan with Plan.by_hand(pipeline=)"
