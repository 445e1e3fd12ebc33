"""Prices of compiled stages: steps of the whole model as one stage, captured and compiled in turn.

    captured, 1 micro-batch   compiled, 1 micro-batch   captured, 8   compiled, 8      <- rounds in turn, on copies

Every kind of device and every size costs one compilation of the whole model. Results are cached. Of ranks, the one that
plans times its own device, while the others wait.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from autopar.analysis.example import Example
from autopar.costs.call_signature import call_signature
from autopar.costs.compiled import CompiledRatio, left_alone_under, microbatches_to_compile
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Progress
from autopar.costs.measured import measurement_cache
from autopar.errors import without_warnings
from autopar.lower.stages import lower
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.predict import predict_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.comparing.contestants import ComparedCall, Rounds, contestants, steps_in_turn
from autopar.runtime.signatures.bound_signature import RunSettings
from autopar.runtime.stages.stage_code import GRAPHS, left_alone_because
from cost_models import Device, signature_key
from cost_models.hardware.devices import available_memory, operator_threads

log = logging.getLogger(__name__)

_NOT_COMPILED = "predicted for stages that are not compiled:"
_ROUNDS = Rounds(3, 0.1, 10.0)  # medians of a few steps, after the one that compiles


Ratio = tuple[int, float]  # number of micro-batches, and seconds of compiled stages over those of captured ones


@dataclass(frozen=True)
class CompiledPrices:
    """Costs that price compiled stages, and what a plan has to say about them."""

    costs: CostGraph
    notes: tuple[str, ...] = ()


def with_compiled(
    costs: CostGraph,
    call: ComparedCall,
    search: SearchOptions,
    *,
    cache: bool,
    progress: Progress,
) -> CompiledPrices:
    """`costs` for stages that run as the call's settings say; unchanged where these compile nothing, or where the whole
    model as one stage cannot be compiled."""
    compile = call.settings.compile
    if not compile:
        return CompiledPrices(costs)
    why = _left_alone(call.example, compile)
    if why:
        return CompiledPrices(costs, (f"{_NOT_COMPILED} as one stage, {why}",))
    ratios = {}
    kinds: dict[str, Device] = {}
    for device in costs.devices if costs.ranks is None else costs.devices[:1]:  # of ranks, the one that plans
        kinds.setdefault(device.kind, device)
    for kind, device in kinds.items():
        found = _cached_ratios(device, costs, call, search, cache, progress)
        if found is None:
            why = f"{device.name} does not hold the whole model in one stage"
            return CompiledPrices(costs, (f"{_NOT_COMPILED} {why}",))
        ratios[kind] = replace(found, left_alone=left_alone_under(compile == GRAPHS), of_one=compile == GRAPHS)
    what = "recorded as CUDA graphs" if compile == GRAPHS else "compiled"
    texts = (f"{one.text()}{f' on {kind}' if len(ratios) > 1 else ''}" for kind, one in ratios.items())
    note = f"stages that are {what} are priced by whole steps, as a multiple of captured ones: {'; '.join(texts)}"
    others = ", ".join(sorted({device.kind for device in costs.devices} - ratios.keys()))
    notes = (note, f"{_NOT_COMPILED} those on {others}, which only other ranks could time") if others else (note,)
    return CompiledPrices(replace(costs, compiled=ratios), notes)


def _left_alone(example: Example, compile: bool | str) -> str:
    """Why the whole model as one stage would run as it was captured; "" if it would be compiled."""
    program = example.program
    stage_of = dict.fromkeys(program.graph.nodes, 0)
    (stage,) = lower(program, stage_of, example.batching.storages).stages
    return left_alone_because(stage, compile, recompute=False)


def _cached_ratios(
    device: Device, costs: CostGraph, call: ComparedCall, search: SearchOptions, cache: bool, progress: Progress
) -> CompiledRatio | None:
    """None where the device lacks memory for the whole model."""
    example, settings = call.example, call.settings
    most = 1 if search.one_microbatch_because else costs.batch_size // max(1, search.least_rows)
    counts = microbatches_to_compile(costs.batch_size, max(1, most), search.n_microbatches)
    how = (settings.batch_norm, settings.compile)
    key = signature_key("compiled", call_signature(example, [device]), device.kind, device.threads, how, counts)
    with measurement_cache(cache) as store:
        known = store.get(key, partial(_from_json, counts=counts)) if store is not None else None
        if known is None:
            known = _measured(device, costs, call, search, counts, progress)
            if store is not None and known:
                store.put(key, known)
    if not known:
        return None
    pairs = sorted((costs.batch_size / m, ratio) for m, ratio in known)
    rows, ratios = zip(*pairs, strict=True)
    return CompiledRatio(rows, ratios)


def _measured(
    device: Device,
    costs: CostGraph,
    call: ComparedCall,
    search: SearchOptions,
    counts: Sequence[int],
    progress: Progress,
) -> list[Ratio]:
    """Seconds of compiled steps over those of captured ones, for each number of micro-batches that fits the memory."""
    plans = {}
    for m in counts:
        whole = Plan((Stage((device.name,)),), n_microbatches=m, schedule="gpipe")
        plan = predict_plan(whole, call.example, costs, search.conditions)
        if 2 * (plan.stages[0].peak_memory or 0) <= available_memory(device.torch_device):  # captured, and compiled
            plans[m] = plan
    if not plans:
        return []
    plain: RunSettings = replace(call.settings, compile=False)
    with without_warnings(), operator_threads(device.threads), ExitStack() as stack:
        ready = []
        for settings, what in ((plain, "captured"), (call.settings, "compiled")):
            named = {f"{what}, micro-batches: {m}": plan for m, plan in plans.items()}
            own = replace(call, settings=settings)
            ready.append(stack.enter_context(contestants(own, named, costs.devices, progress)))
        steps = steps_in_turn(
            [one for pair in zip(*ready, strict=True) for one in pair], costs.devices, _ROUNDS, progress
        )
    seconds = [median(one) for one in steps]
    log.info("steps on %s, captured and compiled in turn: %s ms", device.kind, [f"{s * 1e3:.3g}" for s in seconds])
    found = zip(plans, seconds[::2], seconds[1::2], strict=True)
    return [(m, compiled / captured) for m, captured, compiled in found]


def _from_json(value: Any, counts: Sequence[int]) -> list[Ratio]:
    """Cached ratios of some of `counts`. Raises TypeError or ValueError for anything else."""
    ratios = [(int(m), float(ratio)) for m, ratio in value]
    if not ratios or not {m for m, _ in ratios} <= {*counts} or not all(0 < ratio < math.inf for _, ratio in ratios):
        raise ValueError(f"cached ratios must be numbers > 0 for {counts} micro-batches")
    return ratios
