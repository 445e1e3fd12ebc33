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
from autopar.plan.exits.configuration import NotExpressed, ToolConfiguration, ToolDegrees, refuse, refuse_reading
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
    """The degrees of a ParallelismConfig, of a mapping of its arguments, or of a configuration file as JSON text.

    Raises PlanError that lists what no plan by hand expresses.
    """
    steps = None
    if isinstance(source, ToolConfiguration):
        steps, source = source.settings, source.text
    if isinstance(source, str):
        source = _parsed(source)
    file = (
        source
        if isinstance(source, Mapping) and ("distributed_type" in source or "parallelism_config" in source)
        else {}
    )
    sizes = _sizes(file.get("parallelism_config") or {} if file else source)
    problems = [f"{name}={sizes[name]}" for name in ("cp_size", "sp_size") if sizes.get(name, 1) not in (None, 1)]
    replicas, shards, tensor = (sizes.get(name) or 1 for name in _SIZES)
    if replicas > 1 and shards > 1:
        problems.append(f"dp_replicate_size={replicas} with dp_shard_size={shards} (HSDP): give one of them")
    if file.get("distributed_type", "NO") not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        problems.append(f"distributed_type={file['distributed_type']}")
    refuse_reading(TITLE, problems)
    fsdp = file.get("fsdp_config") or {}
    reshard = fsdp.get("fsdp_reshard_after_forward", True)
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": 1, "data": replicas * shards}
    if shards > 1:
        degrees["zero"] = 3 if reshard in (True, "true", "FULL_SHARD") else 2
    degrees["recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") else "none"
    if steps is None:
        return ToolDegrees(degrees)
    degrees["micro_batch"] = steps["per_device_batch_size"]
    n_microbatches = steps["Accelerator"]["gradient_accumulation_steps"]
    return ToolDegrees(degrees, n_microbatches * degrees["micro_batch"] * degrees["data"])


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError as error:
        found, why = None, f"the file is not JSON: {error}"
    else:
        why = f"the file has no settings by name, but {type(found).__name__}"
    if not isinstance(found, dict):
        refuse_reading(TITLE, [why])
    return found


def _sizes(source: Any) -> dict[str, Any]:
    """The sizes of a ParallelismConfig, or of a mapping, by the names that ParallelismConfig has."""
    found = source if isinstance(source, Mapping) else vars(source)
    sizes = {str(name).removeprefix(_PREFIX): value for name, value in found.items()}
    wrong = [
        f"{name} must be a whole number of at least 1, got {value!r}"
        for name, value in sizes.items()
        if name.endswith("_size") and value is not None and (type(value) is not int or value < 1)
    ]
    refuse_reading(TITLE, wrong)
    return sizes
