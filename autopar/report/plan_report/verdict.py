"""What a plan is, in one sentence for people who train models."""

from __future__ import annotations

import math

from autopar.errors import PlanError
from autopar.plan.degrees import Degrees
from autopar.plan.exits.plan_degrees import beside_degrees, degrees_in
from autopar.plan.plan import Plan
from autopar.plan.recompute import DESCRIBED, RECOMPUTE, Recompute
from autopar.report.plan_report.axis_words import axes_of, repeated, words, zero_words
from autopar.report.quantities import count
from autopar.report.stage_devices import nodes_of

_RECOMPUTED = {
    "stage": "stages run their forward again in the backward",
    "full": "layers run their forward again in the backward",
    "selective": "attention runs again in the backward",
    "selective-op": "layers run again in the backward, but for every second product",
}


def verdict(plan: Plan) -> str:
    """`Data parallel over 2 nodes x tensor parallel 8, ZeRO-1, 32 micro-batches.`"""
    if len(plan.used_devices) == 1 and len(plan.stages) == 1:
        text = f"one device, {plan.used_devices[0]}, does the whole model"
        text += f", in {count(plan.n_microbatches, 'micro-batch', 'micro-batches')}" * (plan.n_microbatches > 1)
        return _sentence(text + _again(plan))
    try:
        degrees = degrees_in(plan, "a sentence")
        # Where operators do otherwise than the degrees say, more words are needed.
        text = _by_stages(plan) if any(beside_degrees(plan)) else _by_degrees(plan, degrees)
    except PlanError:  # no degrees describe it
        text = _by_stages(plan)
    return _sentence(text)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _by_degrees(plan: Plan, degrees: Degrees) -> str:
    nodes = len(nodes_of(plan.used_devices))
    parts = []
    if degrees.data > 1:
        a_replica_a_node = nodes == degrees.data and degrees.pipeline == 1
        parts.append(f"data parallel over {nodes} nodes" if a_replica_a_node else f"data parallel {degrees.data}")
    if degrees.tensor > 1:
        parts.append(f"tensor parallel {degrees.tensor}")
    if degrees.pipeline > 1:
        chunks = f" with {degrees.chunks} stages each" if degrees.chunks > 1 else ""
        parts.append(f"pipeline parallel {degrees.pipeline}{chunks} ({degrees.schedule})")
    text = " x ".join(parts) or "one device"
    if degrees.zero:
        text += f", ZeRO-{degrees.zero}"
    if degrees.sequence_parallel and degrees.tensor > 1:
        text += ", sequence parallel"
    text += f", {count(degrees.n_microbatches, 'micro-batch', 'micro-batches')}"
    text += f" of {count(degrees.micro_batch, 'sample')}{' on each replica' if degrees.data > 1 else ''}"
    mode = RECOMPUTE[degrees.recompute]
    return text + (f"; {_RECOMPUTED[degrees.recompute]}" if mode is not Recompute.NONE else "")


def _by_stages(plan: Plan) -> str:
    """By what the devices of the stages' meshes do, where degrees are too few words."""
    first = plan.first_stages
    widths, replicas = [stage.shards for stage in first], {stage.replicas for stage in first}
    axes = axes_of(plan.stages)
    if axes is None or len(replicas) > 1:
        return _by_shape(plan, widths)
    copies = plan.stages[0].replicas
    data = math.prod(axis.size for axis in axes if axis.cuts_samples and axis.only_samples) * copies
    parts = [f"data parallel {data}"] * (data > 1)
    parts += [words(axis) for axis in axes if axis.size > 1 and not (axis.cuts_samples and axis.only_samples)]
    if plan.ranks > 1:
        chunks = f" with {plan.chunks} stages each" if plan.chunks > 1 else ""
        parts.append(f"pipeline parallel {plan.ranks}{chunks} ({plan.schedule})")
    text = " x ".join(parts)
    zero = zero_words(plan.stages, axes)
    text += f", {zero}" * bool(zero)
    text += f", {_microbatches(plan, math.prod(axis.size for axis in axes if axis.cuts_samples))}"
    again = repeated(axes)
    text += f"; every replica does {again} for all samples" * bool(again)
    return text + _again(plan) + ("" if plan.training else ", for inference")


def _by_shape(plan: Plan, widths: list[int]) -> str:
    """Of stages whose devices share work in different ways."""
    used = len(plan.used_devices)
    replicas = [stage.replicas for stage in plan.first_stages]
    if len(plan.stages) == 1:
        text = f"data parallel {used}"
    else:
        text = f"a pipeline of {count(len(plan.stages), 'stage')} on {count(used, 'device')} ({plan.schedule})"
        if max(widths) > 1:
            text += f", meshes of {_each(widths)} devices that split samples or parameters, operator by operator"
        if max(replicas) > 1:
            text += f", {_each(replicas)} replicas"
    text += f", {_microbatches(plan, 1)}" + _again(plan)
    return text + ("" if plan.training else ", for inference")


def _microbatches(plan: Plan, data: int) -> str:
    """Those of each replica, where they go round evenly; `data`: devices of a mesh that cut samples."""
    m, r = plan.n_microbatches, max(stage.replicas for stage in plan.stages)
    same = len({stage.replicas for stage in plan.stages}) == 1
    if not same or m % r or (plan.batch_size or 0) % (m * data):
        return count(m, "micro-batch", "micro-batches") + " in all" * (r > 1)
    text = count(m // r, "micro-batch", "micro-batches")
    if plan.batch_size is not None:
        text += f" of {count(plan.batch_size // m // data, 'sample')}"
    return text + " on each replica" * (r * data > 1)


def _each(numbers: list[int]) -> str:
    return str(numbers[0]) if len(set(numbers)) == 1 else " | ".join(map(str, numbers))


def _again(plan: Plan) -> str:
    """Which stages recompute."""
    found = ""
    for mode, (_, how) in DESCRIBED.items():
        again = [str(index) for index, stage in enumerate(plan.stages) if stage.mode == mode]
        if again:
            which = "all stages" if len(again) == len(plan.stages) else f"stages {', '.join(again)}"
            found += f"; {how}{which}"
    return found
