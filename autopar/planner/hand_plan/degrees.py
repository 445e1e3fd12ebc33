"""What the degrees of a plan that an expert writes down must satisfy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.plan.degrees import ZERO, Degrees
from autopar.plan.recompute import RECOMPUTE
from autopar.schedule.builders import SCHEDULES
from autopar.sharding.mesh import divisors

_INTERLEAVED = "interleaved-1f1b"


@dataclass(frozen=True)
class Limits:
    """What degrees must fit."""

    n_devices: int
    batch: int  # samples of a step
    obstacle: str  # why the batch cannot be split; "" if it can
    least: int  # samples that a micro-batch needs
    n_layers: int  # that stages can be made of
    allows: Callable[[Degrees], bool]  # whether the sizes of the model and the types of the devices fit degrees


def read_degrees(
    limits: Limits,
    *,
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
    given = {name: n for name, n in counts.items() if name not in wrong}  # so that other problems are found, too
    usable = {"tensor": 1, "pipeline": 1, "chunks": 1} | given
    replicas = usable.get("data", max(1, limits.n_devices // (usable["tensor"] * usable["pipeline"])))
    wanted = Degrees(
        tensor=usable["tensor"],
        pipeline=usable["pipeline"],
        data=replicas,
        micro_batch=usable.get("micro_batch", _usual_micro_batch(usable["pipeline"], replicas, limits)),
        chunks=usable["chunks"],
        sequence_parallel=sequence_parallel,
        batch=limits.batch,
        **chosen,
    )
    return wanted, [*problems, *_contradictions(wanted, given, limits)]


def _usual_micro_batch(pipeline: int, data: int, limits: Limits) -> int:
    """Samples of a micro-batch where the user says none: stages take turns with many, a stage alone needs one."""
    return 1 if pipeline > 1 and not limits.obstacle else max(1, limits.batch // data)


def _contradictions(wanted: Degrees, given: Collection[str], limits: Limits) -> Iterator[str]:
    """`given`: the degrees that the user gave; the others follow from these."""
    yield from _of_devices_and_batch(wanted, given, limits)
    yield from _of_counts(wanted, limits.n_layers)
    if wanted.chunks > 1 and wanted.schedule != _INTERLEAVED:
        yield f"chunks={wanted.chunks} needs schedule='{_INTERLEAVED}', got {wanted.schedule!r}"


def _of_devices_and_batch(wanted: Degrees, given: Collection[str], limits: Limits) -> Iterator[str]:
    tensor, pipeline, data, batch = wanted.tensor, wanted.pipeline, wanted.data, wanted.batch
    samples = data * wanted.micro_batch
    each, uneven = divmod(batch, data)
    right = functools.cache(lambda: _right(wanted, given, limits))  # a search, where something is wrong only
    if (product := tensor * pipeline * data) != limits.n_devices:
        other = f"{right()} would be right" if right() else "give degrees whose product it is"
        are = f"{'is' if product == 1 else 'are'} {_number(product, 'device')}"
        yield f"tensor={tensor} x pipeline={pipeline} x data={data} {are}, not {limits.n_devices}; {other}"
    if limits.obstacle:
        if data > 1 or wanted.micro_batch != batch:
            yield f"the batch cannot be split, neither over replicas nor into micro-batches: {limits.obstacle}; " + (
                f"{right()} would be right" if right() else f"it needs data=1 and micro_batch={batch}"
            )
        return
    if uneven:
        replicas = f"data={data} replicas share each batch"
        if "data" not in given:
            replicas = f"tensor={tensor} x pipeline={pipeline} leave data={data} replicas of {limits.n_devices} devices"
            replicas += ", which share each batch"
        yield (
            f"{replicas}, but the batch of {batch} samples is no multiple of {data}; give a batch that is, or "
            f"{right() or 'other degrees'}"
        )
    elif each % wanted.micro_batch:
        divisor = _fitting_micro_batch(data, wanted.micro_batch, limits)
        proposed = f"{right()} would be right" if right() else f"micro-batches of {divisor} divide it"
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} are {samples} samples at a time, but the batch of "
            f"{batch} samples is no multiple of {samples}; {proposed}"
        )
    if samples < min(limits.least, batch):
        at_once = "is 1 sample" if samples == 1 else f"are {samples} samples"
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} {at_once} at a time, but the model's batch norm needs "
            f"{limits.least} in a micro-batch; give {right() or 'another batch'}"
        )


def _of_counts(wanted: Degrees, n_layers: int) -> Iterator[str]:
    tensor, pipeline, data, chunks = wanted.tensor, wanted.pipeline, wanted.data, wanted.chunks
    if n_layers < wanted.n_stages:
        of = f"pipeline={pipeline} x chunks={chunks}" if chunks > 1 else f"pipeline={pipeline}"
        stages, layers = _number(wanted.n_stages, "stage"), _number(n_layers, "layer")
        at_most = f"give at most {_number(n_layers, 'stage')}" if n_layers else "it has nothing to divide"
        yield f"{of} makes {stages}, but the model has {layers}: some stages would have none; {at_most}"
    if chunks > 1 and pipeline == 1:
        yield f"chunks={chunks} needs pipeline=2 or more: the stages of a device alternate with those of others"
    if wanted.zero and data == 1:
        yield f"zero={wanted.zero} cuts what replicas hold, and data=1 has no replicas; give zero=0"
    if wanted.sequence_parallel and tensor == 1:
        yield (
            "sequence_parallel=True cuts activations over the devices that cut tensors, and tensor=1 has one; "
            "give tensor=2 or more, or sequence_parallel=False"
        )


# -- what would be right ----------------------------------------------------------------------------------------------


def _right(wanted: Degrees, given: Collection[str], limits: Limits) -> str:
    """What to give instead, so that nothing contradicts: `pipeline=3, data=2`; empty if there is no such thing.

    As few degrees as can be are others than those `wanted`, the replicas rather than the stages, and these rather than
    the cut of tensors.
    """
    found = []
    for tensor in divisors(limits.n_devices):
        for pipeline in divisors(limits.n_devices // tensor):
            data = limits.n_devices // (tensor * pipeline)
            usual = _usual_micro_batch(pipeline, data, limits)
            asked = wanted.micro_batch if "micro_batch" in given else usual
            micro_batch = _fitting_micro_batch(data, asked, limits)
            if micro_batch is None:
                continue
            other = replace(wanted, tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch)
            if not any(_of_counts(other, limits.n_layers)):
                found.append((other, _changes(replace(wanted, micro_batch=asked), other, given)))

    def effort(one: tuple[Degrees, dict[str, int]]) -> tuple[float, ...]:
        other, changes = one
        steps = (math.log(getattr(other, name) / getattr(wanted, name)) for name in ("tensor", "pipeline", "data"))
        return len(changes), "tensor" in changes, "pipeline" in changes, sum(map(abs, steps))

    changes = next((changes for other, changes in sorted(found, key=effort) if limits.allows(other)), {})
    return ", ".join(f"{name}={n}" for name, n in changes.items())


def _changes(wanted: Degrees, other: Degrees, given: Collection[str]) -> dict[str, int]:
    """The degrees to give for `other`; replicas that nobody gave follow from the rest."""
    names = ("tensor", "pipeline", *(["data"] if "data" in given else []), "micro_batch")
    return {name: getattr(other, name) for name in names if getattr(other, name) != getattr(wanted, name)}


def _fitting_micro_batch(data: int, asked: int, limits: Limits) -> int | None:
    """The largest micro-batch of at most `asked` samples that `data` replicas can do, or else the smallest; None if
    they cannot share the batch."""
    each, uneven = divmod(limits.batch, data)
    if uneven or (limits.obstacle and data > 1):
        return None
    if limits.obstacle:
        return limits.batch
    fitting = [n for n in divisors(each) if data * n >= min(limits.least, limits.batch)]
    return max((n for n in fitting if n <= asked), default=fitting[0])


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
