"""What the degrees of a plan that an expert writes down must satisfy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.plan.degrees import ZERO, Degrees
from autopar.plan.recompute import RECOMPUTE
from autopar.planner.hand_plan.cut_sizes import largest_divisor
from autopar.schedule.builders import SCHEDULES

_INTERLEAVED = "interleaved-1f1b"


def read_degrees(
    *,
    n_devices: int,
    batch: int,
    splittable: str,
    least: int,
    n_layers: int,
    tensor: Any,
    pipeline: Any,
    data: Any,
    micro_batch: Any,
    schedule: Any,
    chunks: Any,
    zero: Any,
    recompute: Any,
    sequence_parallel: Any,
) -> tuple[Degrees, list[str]]:
    """The degrees that a user asks for, with what follows from the others filled in, and everything that is wrong with
    them, each with what would be right. Degrees that are no numbers or names count as if they were not given.

    `splittable`: why the batch of the model cannot be split, "" if it can. `least`: samples that a micro-batch needs.
    `n_layers`: that stages can be made of.
    """
    counts = {"tensor": tensor, "pipeline": pipeline, "chunks": chunks}
    counts |= {name: n for name, n in (("data", data), ("micro_batch", micro_batch)) if n is not None}
    wrong = [name for name, value in counts.items() if type(value) is not int or value < 1]
    problems = [f"{name} must be a whole number of at least 1, got {counts[name]!r}" for name in wrong]
    default = _INTERLEAVED if chunks not in (0, 1) else "1f1b"
    chosen = {"schedule": default if schedule is None else schedule, "zero": zero, "recompute": recompute}
    for name, known in (("schedule", SCHEDULES), ("zero", ZERO), ("recompute", RECOMPUTE)):
        if type(chosen[name]) is not (int if name == "zero" else str) or chosen[name] not in known:
            problems.append(f"{name} must be one of {', '.join(map(str, known))}, got {chosen[name]!r}")
            chosen[name] = default if name == "schedule" else next(iter(known))
    if type(sequence_parallel) is not bool:
        problems.append(f"sequence_parallel must be True or False, got {sequence_parallel!r}")
        sequence_parallel = False
    usable = {name: n for name, n in counts.items() if name not in wrong}  # so that other problems are found, too
    usable = {"tensor": 1, "pipeline": 1, "chunks": 1} | usable
    parallel = usable["tensor"] * usable["pipeline"]
    replicas = usable.get("data", max(1, n_devices // parallel))
    few = usable["pipeline"] > 1 and not splittable
    wanted = Degrees(
        tensor=usable["tensor"],
        pipeline=usable["pipeline"],
        data=replicas,
        micro_batch=usable.get("micro_batch", 1 if few else max(1, batch // replicas)),
        chunks=usable["chunks"],
        sequence_parallel=sequence_parallel,
        batch=batch,
        **chosen,
    )
    given = "data" in usable
    return wanted, [*problems, *_contradictions(wanted, given, n_devices, n_layers, splittable, least)]


def _contradictions(
    wanted: Degrees, given: bool, n_devices: int, n_layers: int, splittable: str, least: int
) -> Iterator[str]:
    """`given`: whether the user gave `data`; else it follows from the other degrees."""
    tensor, pipeline, data, chunks = wanted.tensor, wanted.pipeline, wanted.data, wanted.chunks
    product = tensor * pipeline * data
    if product != n_devices:
        fits, rest = divmod(n_devices, tensor * pipeline)
        right = f"with these, data={fits} would be right" if fits and not rest else "give degrees whose product it is"
        yield f"tensor={tensor} x pipeline={pipeline} x data={data} are {product} devices, not {n_devices}; {right}"
    samples = data * wanted.micro_batch
    each, uneven = divmod(wanted.batch, data)
    if uneven and not given:
        yield (
            f"tensor={tensor} x pipeline={pipeline} leave data={data} replicas of {n_devices} devices, which share "
            f"each batch, but the batch of {wanted.batch} samples is no multiple of {data}; give a batch that is, or "
            "other degrees"
        )
    elif uneven:
        most = largest_divisor(math.gcd(wanted.batch, n_devices), data)
        yield (
            f"data={data} replicas share each batch, but the batch of {wanted.batch} samples is no multiple of {data}; "
            f"give a divisor of {wanted.batch} as data, such as {most}"
        )
    elif each % wanted.micro_batch:
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} are {samples} samples at a time, but the batch of "
            f"{wanted.batch} samples is no multiple of {samples}; "
            f"with data={data}, micro_batch={largest_divisor(each, wanted.micro_batch)} would be right"
        )
    elif splittable and wanted.batch != wanted.micro_batch:
        yield f"the batch cannot be split, neither over replicas nor into micro-batches: {splittable}; " + (
            f"give data=1, micro_batch={wanted.batch}"
        )
    if samples < min(least, wanted.batch):
        enough = range(-(-least // data), wanted.batch // data + 1)
        proposed = next((n for n in enough if wanted.batch % (data * n) == 0), None)
        at_once = "is 1 sample" if samples == 1 else f"are {samples} samples"
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} {at_once} at a time, but the model's batch norm needs "
            f"{least} in a micro-batch; {'give another batch' if proposed is None else f'give micro_batch={proposed}'}"
        )
    if n_layers < wanted.n_stages:
        of = f"pipeline={pipeline} x chunks={chunks}" if chunks > 1 else f"pipeline={pipeline}"
        stages, layers = _number(wanted.n_stages, "stage"), _number(n_layers, "layer")
        at_most = f"give at most {_number(n_layers, 'stage')}" if n_layers else "it has nothing to divide"
        yield f"{of} makes {stages}, but the model has {layers}: some stages would have none; {at_most}"
    if chunks > 1 and wanted.schedule != _INTERLEAVED:
        yield f"chunks={chunks} needs schedule='{_INTERLEAVED}', got {wanted.schedule!r}"
    if chunks > 1 and pipeline == 1:
        yield f"chunks={chunks} needs pipeline=2 or more: the stages of a device alternate with those of others"
    if wanted.zero and data == 1:
        yield f"zero={wanted.zero} cuts what replicas hold, and data=1 has no replicas; give zero=0"
    if wanted.sequence_parallel and tensor == 1:
        yield (
            "sequence_parallel=True cuts activations over the devices that cut tensors, and tensor=1 has one; "
            "give tensor=2 or more, or sequence_parallel=False"
        )


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
