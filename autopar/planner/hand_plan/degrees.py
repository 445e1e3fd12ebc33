"""What the degrees of a plan that an expert writes down must satisfy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.plan.degrees import ZERO, Degrees
from autopar.plan.recompute import RECOMPUTE
from autopar.schedule.builders import SCHEDULES, SPLIT_BACKWARD, V_SHAPED, possible_chunks
from autopar.sharding.mesh import divisors


@dataclass(frozen=True)
class Limits:
    """What degrees must fit."""

    n_devices: int
    batch: int  # samples of a step
    obstacle: str  # why the batch cannot be split; "" if it can
    least: int  # samples that a micro-batch needs
    n_layers: int  # that stages can be made of
    refused: Callable[[Degrees], Iterable[str]]  # what is wrong for the sizes of the model and the types of the devices


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
    them. Degrees that are no numbers or names count as if they were not given.

    Where degrees contradict each other or the limits, the last line has what to give instead, so that nothing is wrong,
    or says that no degrees are right.
    """
    counts = {"tensor": tensor, "pipeline": pipeline}
    optional = {"data": data, "micro_batch": micro_batch, "chunks": chunks}
    counts |= {name: n for name, n in optional.items() if n is not None}
    wrong = {
        name: f"{name} must be a whole number of at least 1, got {value!r}"
        for name, value in counts.items()
        if type(value) is not int or value < 1
    }
    chosen = {"zero": zero, "recompute": recompute} | ({} if schedule is None else {"schedule": schedule})
    for name, known in (("schedule", SCHEDULES), ("zero", ZERO), ("recompute", RECOMPUTE)):
        value = chosen.get(name, next(iter(known)))
        if type(value) is not (int if name == "zero" else str) or value not in known:
            wrong[name] = f"{name} must be one of {', '.join(map(str, known))}, got {value!r}"
    if type(sequence_parallel) is not bool:
        wrong["sequence_parallel"] = f"sequence_parallel must be True or False, got {sequence_parallel!r}"
    every = counts | chosen | {"sequence_parallel": sequence_parallel}
    given = {name: value for name, value in every.items() if name not in wrong}  # so that other problems are found, too
    wanted = _filled_in(given, limits)
    contradictions = list(_contradictions(wanted, given, limits))
    if contradictions:
        contradictions.append(_proposal(wanted, given, wrong, limits))
    return wanted, [*wrong.values(), *contradictions]


def _filled_in(given: Mapping[str, Any], limits: Limits) -> Degrees:
    """The degrees `given`, by name, with what follows from them, or usual ones, for the others."""
    values: dict[str, Any] = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "none"}
    values |= {"sequence_parallel": False, "batch": limits.batch, **given}
    values.setdefault("chunks", 2 if values.get("schedule") in V_SHAPED and values["pipeline"] > 1 else 1)
    values.setdefault("data", max(1, limits.n_devices // (values["tensor"] * values["pipeline"])))
    values.setdefault("schedule", _able("1f1b", values["chunks"]))
    # stages take turns with many micro-batches, a stage alone needs one
    several = values["pipeline"] > 1 and not limits.obstacle
    values.setdefault("micro_batch", 1 if several else max(1, limits.batch // values["data"]))
    return Degrees(**values)


def _able(schedule: str, chunks: int) -> str:
    """`schedule`, or one like it that puts as many stages on a device."""
    if possible_chunks(schedule, 2, chunks):
        return schedule
    alike = (name for name in SCHEDULES if (name in SPLIT_BACKWARD) == (schedule in SPLIT_BACKWARD))
    return next(name for name in alike if possible_chunks(name, 2, chunks))


def _contradictions(wanted: Degrees, given: Collection[str], limits: Limits) -> Iterator[str]:
    """`given`: the degrees that the user gave; the others follow from these."""
    yield from _of_devices_and_batch(wanted, given, limits)
    yield from _of_counts(wanted, limits.n_layers)
    if not possible_chunks(wanted.schedule, wanted.pipeline, wanted.chunks):
        able = [name for name in SCHEDULES if possible_chunks(name, wanted.pipeline, wanted.chunks)]
        yield f"chunks={wanted.chunks} needs schedule={' or '.join(map(repr, able))}, got {wanted.schedule!r}"
    yield from limits.refused(wanted)


def _of_devices_and_batch(wanted: Degrees, given: Collection[str], limits: Limits) -> Iterator[str]:
    tensor, pipeline, data, batch = wanted.tensor, wanted.pipeline, wanted.data, wanted.batch
    samples = data * wanted.micro_batch
    each, uneven = divmod(batch, data)
    if (product := tensor * pipeline * data) != limits.n_devices:
        are = f"{'is' if product == 1 else 'are'} {_number(product, 'device')}"
        yield f"tensor={tensor} x pipeline={pipeline} x data={data} {are}, not {limits.n_devices}"
    if limits.obstacle:
        if data > 1 or wanted.micro_batch != batch:
            yield f"the batch cannot be split, neither over replicas nor into micro-batches: {limits.obstacle}"
        return
    if uneven:
        replicas = f"data={data} replicas share each batch"
        if "data" not in given:
            replicas = f"tensor={tensor} x pipeline={pipeline} leave data={data} replicas of {limits.n_devices} devices"
            replicas += ", which share each batch"
        yield f"{replicas}, but the batch of {_number(batch, 'sample')} is no multiple of {data}"
    elif each % wanted.micro_batch:
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} are {samples} samples at a time, but the batch of "
            f"{_number(batch, 'sample')} is no multiple of {samples}"
        )
    if samples < min(limits.least, batch):
        at_once = "is 1 sample" if samples == 1 else f"are {samples} samples"
        yield (
            f"data={data} x micro_batch={wanted.micro_batch} {at_once} at a time, but the model's batch norm needs "
            f"{limits.least} in a micro-batch"
        )


def _of_counts(wanted: Degrees, n_layers: int) -> Iterator[str]:
    tensor, pipeline, data, chunks = wanted.tensor, wanted.pipeline, wanted.data, wanted.chunks
    if n_layers < wanted.n_stages:
        of = f"pipeline={pipeline} x chunks={chunks}" if chunks > 1 else f"pipeline={pipeline}"
        stages, layers = _number(wanted.n_stages, "stage"), _number(n_layers, "layer")
        at_most = f"at most {_number(n_layers, 'stage')} can be" if n_layers else "it has nothing to divide"
        yield f"{of} makes {stages}, but the model has {layers}: some stages would have none; {at_most}"
    if chunks > 1 and pipeline == 1:
        yield f"chunks={chunks} needs pipeline=2 or more: the stages of a device alternate with those of others"
    if wanted.zero and data == 1:
        yield f"zero={wanted.zero} cuts what replicas hold, and data=1 has no replicas"
    if wanted.sequence_parallel and tensor == 1:
        yield (
            "sequence_parallel=True cuts activations over the devices that cut tensors, and tensor=1 has one: it needs "
            "tensor=2 or more"
        )


# -- what would be right ----------------------------------------------------------------------------------------------


def _proposal(wanted: Degrees, given: Mapping[str, Any], wrong: Collection[str], limits: Limits) -> str:
    """What to give instead, so that nothing is wrong: `pipeline=3, data=2 would be right`.

    As few degrees as can be are others than those `given`: ZeRO and the replicas rather than the stages, and these
    rather than the cut of tensors. wrong: names of the degrees whose values cannot be used.
    """

    def effort(changes: Mapping[str, Any]) -> tuple[float, ...]:
        other = _filled_in({**given, **changes}, limits)
        steps = (math.log(getattr(other, name) / getattr(wanted, name)) for name in ("tensor", "pipeline", "data"))
        return len(changes), "tensor" in changes, "pipeline" in changes, sum(map(abs, steps))

    for changes in sorted(_changes(wanted, given, wrong, limits), key=effort):
        other = {**given, **changes}
        if not any(_contradictions(_filled_in(other, limits), other, limits)):
            return f"{', '.join(f'{name}={value!r}' for name, value in changes.items())} would be right"
    devices, samples = _number(limits.n_devices, "device"), _number(limits.batch, "sample")
    return f"no degrees fit the model, {devices} and the batch of {samples}"


def _changes(
    wanted: Degrees, given: Mapping[str, Any], wrong: Collection[str], limits: Limits
) -> Iterator[dict[str, Any]]:
    """What to give instead for each number of stages and of devices that cut tensors, the rest as near to `wanted` as
    these, the devices and the batch allow."""
    for tensor in divisors(limits.n_devices):
        for pipeline in divisors(limits.n_devices // tensor):
            data = limits.n_devices // (tensor * pipeline)
            chunks = max(1, min(wanted.chunks, limits.n_layers // pipeline)) if pipeline > 1 else 1
            follows = _filled_in({"tensor": tensor, "pipeline": pipeline, "chunks": chunks}, limits)
            micro_batch = _fitting_micro_batch(data, given.get("micro_batch", follows.micro_batch), limits)
            if micro_batch is None:
                continue
            other = replace(
                wanted,
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                micro_batch=micro_batch,
                schedule=_able(given.get("schedule", follows.schedule), chunks),
                chunks=chunks,
                zero=wanted.zero if data > 1 else 0,
                sequence_parallel=wanted.sequence_parallel and tensor > 1,
            )
            nearest = {field.name: getattr(other, field.name) for field in fields(other)}
            yield {
                name: value
                for name, value in nearest.items()
                if name in wrong or value != given.get(name, getattr(follows, name))
            }


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
