"""Arguments of torchtitan's trainer, after `--module llama3 --config ...`.

Names are those of torchtitan.config.configs (version 0.3.0). Its parallel dimensions are, from the outermost: pipeline,
replicate, shard, tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import tomllib
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
from autopar.plan.exits.schedule_csv import csv_text
from autopar.plan.exits.stage_layers import StageLayers, even_counts, stage_layers
from autopar.schedule.builders import INTERLEAVED, V_SHAPED

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

NAME = "torchtitan"
TITLE = "torchtitan"
VERSION = "torchtitan 0.3.0"

_CSV_FILE = "schedule.csv"
_PARTS = "parallelism.module_fqns_per_model_part"
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
_CHECKPOINTS = {"none": "none", "selective-op": "selective", "selective": "selective", "full": "full", "stage": "full"}
_AC = "activation-checkpoint"


# -- to torchtitan ----------------------------------------------------------------------------------------------------


def configuration_of(plan: Plan) -> ToolConfiguration:
    """Raises PlanError that lists why torchtitan cannot express the plan at all."""
    degrees, layers = degrees_in(plan, TITLE), stage_layers(plan)
    refuse(TITLE, list(_impossible(degrees, layers)))
    shards = degrees.data if degrees.zero else 1
    settings: dict[str, Any] = {
        "parallelism.data_parallel_replicate_degree": degrees.data // shards,
        "parallelism.data_parallel_shard_degree": shards,
        "parallelism.tensor_parallel_degree": degrees.tensor,
        "parallelism.pipeline_parallel_degree": degrees.pipeline,
        "training.global_batch_size": degrees.batch,
    }
    companions: dict[str, str] = {}
    if degrees.zero:
        settings["parallelism.fsdp_reshard_after_forward"] = "always" if degrees.zero == 3 else "never"
    if degrees.tensor > 1:
        settings["parallelism.enable_sequence_parallel"] = degrees.sequence_parallel
    if degrees.pipeline > 1:
        settings["training.disable_cuda_graphs"] = True  # torchtitan refuses them with pipelines
        settings["training.local_batch_size"] = degrees.batch // degrees.data
        settings["parallelism.pipeline_parallel_microbatch_size"] = degrees.micro_batch
        settings[_PARTS] = _module_names(layers)
        if _has_schedule(degrees):
            settings["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[degrees.schedule]
        else:
            chunked = "Interleaved1F1B" if degrees.chunks > 1 else "1F1B"
            settings["parallelism.pipeline_parallel_schedule"] = (
                chunked  # says where stages are; the order is the CSV's
            )
            settings["parallelism.pipeline_parallel_schedule_csv"] = _CSV_FILE
            companions[_CSV_FILE] = csv_text(degrees.schedule, degrees.n_microbatches, degrees.pipeline, degrees.chunks)
    else:
        settings["training.local_batch_size"] = degrees.micro_batch  # the rest are steps of gradient accumulation
    lost = [*beyond_degrees(plan, degrees), *layers.cut_layers(), *_lost(degrees, layers)]
    precision = plan.assumed.precision if plan.assumed is not None else None
    if precision in (None, "fp32"):
        settings["training.mixed_precision_param"] = "float32"
    elif precision == "bf16":
        settings["training.dtype"] = "bfloat16"
    else:
        lost.append(
            NotExpressed("precision", f"{precision}; parameters, gradients and states are float32, casts are bfloat16")
        )
    settings[_AC] = _CHECKPOINTS[degrees.recompute]
    return ToolConfiguration(NAME, VERSION, settings, _text(settings), len(plan.used_devices), tuple(lost), companions)


def _has_schedule(degrees: Degrees) -> bool:
    """Whether one of torch's schedules takes these numbers: single-stage ones need a micro-batch for every stage,
    interleaved ones whole rounds, ZBVZeroBubble nothing."""
    m, p = degrees.n_microbatches, degrees.pipeline
    if degrees.schedule not in _SCHEDULES:
        return False
    if degrees.schedule in V_SHAPED:
        return degrees.pipeline > 1
    if degrees.schedule in INTERLEAVED:
        return degrees.chunks > 1 and m % max(1, m // p) == 0
    return m >= p


def _impossible(degrees: Degrees, layers: StageLayers) -> Iterator[str]:
    if degrees.pipeline > 1 and len(layers.lists) != 1:
        found = ", ".join(layers.lists) or "none"
        yield f"its pipelines split one list of transformer layers, and the model's module lists are: {found}"


def _module_names(layers: StageLayers) -> list[list[str]]:
    """The modules of every stage, as torchtitan's decoders call them."""
    number = itertools.count()
    names = [[f"layers.{next(number)}" for _ in stage] for stage in layers.layers]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return names


def _lost(degrees: Degrees, layers: StageLayers) -> Iterator[NotExpressed]:
    if degrees.zero == 1:
        yield NotExpressed("zero", "1; fully_shard without resharding cuts gradients as well (ZeRO 2)")
    if degrees.recompute == "selective":
        yield NotExpressed(
            "recompute", "selective; torchtitan's selective checkpoints keep products and attention alone"
        )
    if degrees.recompute == "stage":
        yield NotExpressed("recompute", "stage; every layer runs again by itself")
    if degrees.pipeline > 1:
        own = [path for stage in layers.layers for path in stage]
        if layers.lists[0] != "layers":
            yield NotExpressed(
                "module names",
                f"{own[0]} is layers.0, and so on; tok_embeddings, norm and lm_head are torchtitan's own",
            )


def _text(settings: Mapping[str, Any]) -> str:
    """The command line. Union types of torchtitan's configuration come last."""
    words = []
    for name, value in settings.items():
        if name == _AC:
            continue
        if value is True or value is False:
            section, _, key = name.rpartition(".")
            words.append(f"--{section}.{'' if value else 'no-'}{key.replace('_', '-')}")
        elif name == _PARTS:
            words.append(f"--{name.replace('_', '-')} {' '.join(map(','.join, value))}")
        else:
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    words.append(f"{_AC}:{settings[_AC]}")
    return " \\\n".join(words) + "\n"


# -- from torchtitan --------------------------------------------------------------------------------------------------

_REFUSED = ("parallelism.context_parallel_degree", "parallelism.expert_parallel_degree")


def degrees_from(source: str | Sequence[str] | Mapping[str, Any] | ToolConfiguration) -> ToolDegrees:
    """The degrees of a command line, as text or word by word; of settings by name; or of a TOML file. Defaults are
    those of torchtitan.

    Raises PlanError that lists what no plan by hand expresses.
    """
    found = settings_in(source)
    refuse_reading(TITLE, list(_problems(found)))
    tensor, pipeline = _int(found, "tensor_parallel_degree", 1), _int(found, "pipeline_parallel_degree", 1)
    replicas, shards = _int(found, "data_parallel_replicate_degree", 1), _int(found, "data_parallel_shard_degree", -1)
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline}
    notes: tuple[str, ...] = ()
    if replicas > 1 or shards >= 1:
        degrees["data"] = replicas * max(1, shards)
    if pipeline > 1:
        schedule = {name.lower(): ours for ours, name in _SCHEDULES.items()}[_schedule(found)]
        chunks, notes = _stages(found, pipeline, schedule)
        degrees |= {"schedule": schedule, "chunks": chunks}
        degrees["micro_batch"] = _int(found, "pipeline_parallel_microbatch_size", 1)
    elif "training.local_batch_size" in found:
        degrees["micro_batch"] = int(found["training.local_batch_size"])
    reshard = found.get("parallelism.fsdp_reshard_after_forward", "default")
    if shards != 1:
        degrees["zero"] = 3 if reshard == "always" or (reshard == "default" and pipeline == 1) else 2
    checkpoints = {"none": "none", "selective": "selective-op", "full": "full"}
    degrees["recompute"] = checkpoints[found.get(_AC, "selective")]
    degrees["sequence_parallel"] = tensor > 1 and found.get("parallelism.enable_sequence_parallel", "True") == "True"
    batch = int(found.get("training.global_batch_size", -1))
    return ToolDegrees(degrees, batch if batch > 0 else None, notes)


def _stages(found: Mapping[str, str], pipeline: int, schedule: str) -> tuple[int, tuple[str, ...]]:
    """Stages of each device, and what the plan by hand does otherwise. Raises PlanError for stages of other layers."""
    parts = found.get(_PARTS, "").split()
    if not parts:
        less = "torchtitan gives the first and the last stage fewer layers by its defaults; those of this plan are even"
        return 2 if schedule in INTERLEAVED else 1, (less,)
    counts = tuple(sum(name.startswith("layers.") for name in part.split(",")) for part in parts)
    even = even_counts(sum(counts), len(parts))
    if len(parts) % pipeline:
        refuse_reading(TITLE, [f"{_PARTS}: {len(parts)} stages do not go round {pipeline} devices"])
    if counts != even:
        ours, theirs = (", ".join(map(str, one)) for one in (even, counts))
        why = f"stages have {theirs} layers, those of a plan by hand {ours}; write the split with Plan.from_split"
        refuse_reading(TITLE, [f"{_PARTS}: {why}"])
    return len(parts) // pipeline, ()


def settings_in(source: str | Sequence[str] | Mapping[str, Any] | ToolConfiguration) -> dict[str, str]:
    """Settings by name, with underscores, as text; several values of one are one text."""
    if isinstance(source, ToolConfiguration):
        source = source.text
    if isinstance(source, str):
        with contextlib.suppress(tomllib.TOMLDecodeError):  # a file of earlier versions
            sections = tomllib.loads(source)
            if not any(name.startswith("--") for name in sections):  # `--a.b=1` alone is TOML, too
                source = sections
    if isinstance(source, Mapping):
        return dict(_by_name(source))
    words = words_in(TITLE, source)
    found: dict[str, str] = {}
    name, fresh = "", False  # of the last setting, and whether it has no value yet
    for word in words:
        if word.startswith(f"{_AC}:"):
            found[_AC], name = word.partition(":")[2], ""
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            section, dot, key = name.rpartition(".")
            if key.startswith("no_"):
                found[section + dot + key.removeprefix("no_")], name = "False", ""
            else:
                found[name] = value if equals else "True"
                fresh = not equals
        elif name:
            found[name] = word if fresh else f"{found[name]} {word}"
            fresh = False
    return found


def _by_name(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Settings of sections in sections, such as those of a TOML file; those that are None are left out."""
    for name, value in settings.items():
        whole = f"{section}.{name}" if section else str(name)
        if isinstance(value, Mapping):
            yield from _by_name(value, whole)
        elif value is not None:
            listed = value if isinstance(value, (list, tuple)) else [value]
            text = " ".join(",".join(map(str, one)) if isinstance(one, (list, tuple)) else str(one) for one in listed)
            yield (_AC if whole == "activation_checkpoint.mode" else whole), text


def _problems(found: Mapping[str, str]) -> Iterator[str]:
    if not any(name.startswith(("parallelism.", "training.", _AC, "activation_checkpoint.")) for name in found):
        yield (
            "no setting says how the work is divided, such as parallelism.tensor_parallel_degree or "
            "training.local_batch_size; is this a configuration of torchtitan?"
        )
    if found.get("activation_checkpoint.selective_ac_option", "op") != "op":
        yield f"activation_checkpoint.selective_ac_option={found['activation_checkpoint.selective_ac_option']}"
    yield from (f"{name}={found[name]}" for name in _REFUSED if found.get(name, "1") != "1")
    for name, text in found.items():
        numeric = name.endswith(("_degree", "_batch_size", "_microbatch_size"))
        if numeric and not text.removeprefix("-").isdecimal():
            yield f"{name} needs a whole number, got {text}"
            return
    if found.get("training.enable_cpu_offload", "False") != "False":
        yield "training.enable_cpu_offload"
    if "parallelism.pipeline_parallel_layers_per_stage" in found:
        yield "parallelism.pipeline_parallel_layers_per_stage: write the stages with Plan.from_split"
    if _int(found, "data_parallel_replicate_degree", 1) > 1 and _int(found, "data_parallel_shard_degree", -1) != 1:
        yield "data_parallel_replicate_degree with shards in each replica (HSDP): give data_parallel_shard_degree 1"
    if _int(found, "pipeline_parallel_degree", 1) > 1:
        if found.get("parallelism.pipeline_parallel_schedule_csv", ""):
            yield "parallelism.pipeline_parallel_schedule_csv: read that file as a configuration of schedule-csv"
        elif _schedule(found) not in map(str.lower, _SCHEDULES.values()):
            yield f"parallelism.pipeline_parallel_schedule={found['parallelism.pipeline_parallel_schedule']}"
    if found.get(_AC, "selective") not in ("none", "selective", "full"):
        yield f"{_AC}:{found[_AC]}"


def _schedule(found: Mapping[str, str]) -> str:
    return found.get("parallelism.pipeline_parallel_schedule", "1F1B").lower()


def _int(found: Mapping[str, str], name: str, default: int) -> int:
    return int(found.get(f"parallelism.{name}", default))
