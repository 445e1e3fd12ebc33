"""Hugging Face Accelerate's configuration: ParallelismConfig, and the file of `accelerate launch --config_file`.

    settings["ParallelismConfig"]    keyword arguments of accelerate.parallelism_config.ParallelismConfig
    settings["Accelerator"]          keyword arguments of accelerate.Accelerator
    settings["per_device_batch_size"]  samples of each batch that a process loads
    text                             the configuration file, as JSON

Version 1.15. It has no pipelines. Replicas beside tensor parallelism are always fully sharded (FSDP 2).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autopar.plan.degrees import Degrees
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

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

NAME = "accelerate"
TITLE = "Accelerate"
VERSION = "accelerate 1.15"

_PREFIX = "parallelism_config_"
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size")
_PRECISIONS = {None: "no", "fp32": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


# -- to Accelerate ----------------------------------------------------------------------------------------------------


def configuration_of(plan: Plan) -> ToolConfiguration:
    """Raises PlanError that lists why Accelerate cannot express the plan at all."""
    degrees = degrees_in(plan, TITLE)
    if degrees.pipeline > 1:
        refuse(TITLE, [f"it has no pipelines, and the plan has pipeline={degrees.pipeline}"])
    sharded = degrees.data > 1 and (degrees.zero > 0 or degrees.tensor > 1)
    replicas, shards = (1, degrees.data) if sharded else (degrees.data, 1)
    sizes = dict(zip(_SIZES, (replicas, shards, degrees.tensor), strict=True))
    lost = [*beyond_degrees(plan, degrees), *_lost(degrees, sharded)]
    precision = plan.assumed.precision if plan.assumed is not None else None
    if precision not in _PRECISIONS:
        lost.append(NotExpressed("precision", f"{precision}: build the model in that dtype"))
    n = len(plan.used_devices)
    file: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "NO" if n == 1 else "MULTI_GPU",
        "num_processes": n,
        "mixed_precision": _PRECISIONS.get(precision, "no"),
        "parallelism_config": {_PREFIX + name: size for name, size in sizes.items()},
    }
    if sharded:
        file["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": degrees.zero == 3,
            "fsdp_activation_checkpointing": degrees.recompute != "none",
        }
    settings = {
        "ParallelismConfig": sizes,
        "Accelerator": {"gradient_accumulation_steps": degrees.n_microbatches},
        "per_device_batch_size": degrees.micro_batch,
        "config_file": file,
    }
    return ToolConfiguration(NAME, VERSION, settings, json.dumps(file, indent=2) + "\n", n, tuple(lost))


def _lost(degrees: Degrees, sharded: bool) -> Iterator[NotExpressed]:
    yield NotExpressed(
        "micro-batches",
        f"in the script: Accelerator(gradient_accumulation_steps={degrees.n_microbatches}), and batches of "
        f"{degrees.micro_batch} samples in each group of processes that cut tensors together",
    )
    if sharded and degrees.zero in (0, 1):
        yield NotExpressed(
            "zero", f"{degrees.zero}; FSDP without resharding cuts states and gradients as well (ZeRO 2)"
        )
    if degrees.sequence_parallel:
        yield NotExpressed("sequence_parallel", "True; the model's own tensor-parallel plan decides")
    if degrees.recompute != "none" and not sharded:
        yield NotExpressed("recompute", f"{degrees.recompute}; call model.gradient_checkpointing_enable()")
    elif degrees.recompute not in ("none", "full"):
        yield NotExpressed("recompute", f"{degrees.recompute}; every wrapped layer runs again, which keeps less")


# -- from Accelerate --------------------------------------------------------------------------------------------------


def degrees_from(source: Any) -> ToolDegrees:
    """The degrees of a ParallelismConfig, of a mapping of its arguments, or of a configuration file as text: JSON, or
    the YAML that `accelerate config` writes.

    Raises PlanError that lists what no plan by hand expresses.
    """
    steps = None
    if isinstance(source, ToolConfiguration):
        steps, source = source.settings, source.text
    if not isinstance(source, (str, Mapping)) and hasattr(source, "__dict__"):
        source = vars(source)
    source = settings_by_name(TITLE, source)
    file = source if any(name in source for name in _OF_FILES) else {}
    fsdp = section_of(TITLE, file, "fsdp_config")
    sizes = _sizes(section_of(TITLE, file, "parallelism_config") if file else source)
    refuse_reading(TITLE, list(_problems(file, fsdp, sizes)))
    replicas, shards, tensor = (sizes.get(name) or 1 for name in _SIZES)
    if file and not sizes:  # the processes are replicas, or FSDP cuts over all of them
        kind, n = file.get("distributed_type", "NO"), file.get("num_processes", 1)
        replicas, shards = (1, n) if kind == "FSDP" else (n, 1)
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": 1, "data": replicas * shards}
    if shards > 1:
        degrees["zero"] = 3 if _reshards(fsdp) else 2
    degrees["recompute"] = "full" if _is_on(fsdp.get("fsdp_activation_checkpointing")) else "none"
    if steps is None:
        return ToolDegrees(degrees)
    degrees["micro_batch"] = steps["per_device_batch_size"]
    n_microbatches = steps["Accelerator"]["gradient_accumulation_steps"]
    return ToolDegrees(degrees, n_microbatches * degrees["micro_batch"] * degrees["data"])


_OF_FILES = ("distributed_type", "parallelism_config", "num_processes")
_STRATEGIES = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}  # of FSDP 1, and what follows


def _problems(file: Mapping[str, Any], fsdp: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[str]:
    if not file and not any(name in sizes for name in (*_SIZES, "cp_size", "sp_size")):
        yield f"none of {', '.join(_SIZES)} is there; is this a ParallelismConfig, or a file of accelerate?"
    yield from (f"{name}={sizes[name]}" for name in ("cp_size", "sp_size") if sizes.get(name, 1) not in (None, 1))
    replicas, shards = (sizes.get(name) or 1 for name in _SIZES[:2])
    if replicas > 1 and shards > 1:
        yield f"dp_replicate_size={replicas} with dp_shard_size={shards} (HSDP): give one of them"
    kind, n = file.get("distributed_type", "NO"), file.get("num_processes", 1)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        yield f"distributed_type={kind}"
    if type(n) is not int or n < 1:
        yield f"num_processes must be a whole number of at least 1, got {n!r}"
    strategy = fsdp.get("fsdp_sharding_strategy")
    if strategy is not None and str(strategy) not in _STRATEGIES:
        yield f"fsdp_sharding_strategy={strategy}"
    if _is_on(fsdp.get("fsdp_offload_params")):
        yield "fsdp_offload_params"


def _reshards(fsdp: Mapping[str, Any]) -> bool:
    """Whether parameters are cut between forward and backward as well (ZeRO 3)."""
    if "fsdp_sharding_strategy" in fsdp and "fsdp_reshard_after_forward" not in fsdp:
        return _STRATEGIES[str(fsdp["fsdp_sharding_strategy"])]
    return str(fsdp.get("fsdp_reshard_after_forward", True)) in ("True", "true", "FULL_SHARD")


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def _sizes(source: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a ParallelismConfig, or of a mapping, by the names that ParallelismConfig has."""
    sizes = {str(name).removeprefix(_PREFIX): value for name, value in source.items()}
    wrong = [
        f"{name} must be a whole number of at least 1, got {value!r}"
        for name, value in sizes.items()
        if name.endswith("_size") and value is not None and (type(value) is not int or value < 1)
    ]
    refuse_reading(TITLE, wrong)
    return sizes
