"""Plans that run before one is followed: the fastest wins, whatever was predicted.

tune="auto"   the plan of the search; the best one on one device, without shards, without replicas, without a
              pipeline (in one stage); the plain model
tune=4        the four best plans of the search
candidates    the user's plans, beside either

A B C D   A B C D   A B C D  ...
warm up | these steps count

That is one pass. Where its rounds disagree or its steps cannot be true, as on a busy machine, up to two more passes
follow, and the undisturbed rounds of all count (`steady_steps`). Steps that still cannot be true are not followed,
remembered or scaled with (`disturbance.py`). Plans that are close to the fastest run some more rounds.

Where the caller has set other threads than a worker has, the plain model also runs on a worker's: predictions, and what
"one device" means, are for those.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from autopar.analysis.example import Example
from autopar.costs.call_signature import call_signature
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Progress
from autopar.costs.history import Record, remember
from autopar.costs.measured import measurement_cache
from autopar.costs.present_speed import PresentSpeed
from autopar.costs.shared_hardware import one_worker_per_gpu
from autopar.errors import InfeasibleError, InputError, PlanError
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.explain import TUNED
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.search import find_plans, make_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.comparing.contestants import Rounds, priced, runs_as_predicted
from autopar.runtime.comparing.disturbance import Steps, why_unbelievable
from autopar.runtime.comparing.in_turn import PlansInTurn
from autopar.runtime.planning.calibration import at_present_speed
from cost_models import Device, signature_key
from cost_models.hardware.devices import find_device

log = logging.getLogger(__name__)

_STEPS = 5  # of every plan in a pass with tune=n, after one that warms up
_ROUNDS = 3  # that count in a pass with tune="auto", if time allows
_LEAST_SECONDS = 0.05  # that every plan runs in such a pass: shorter steps vary more
# With tune="auto", a pass begins no round after this share of the seconds that measuring operators and searching took,
# or after this many seconds if that is more, the warm-up included. It still has one round that counts, and copies of
# the model are made before it. Rounds of plans that are close to the fastest may take as long once more. So steps take
# about twice that at most on a quiet machine, and four times that on a busy one.
_SHARE = 0.5
_BUDGET = 0.3
_FINALS = 4  # rounds of plans that are close to the fastest
_RULES = 3  # for what is believed; steps that others let pass are not read
_SAME = 0.05  # with tune="auto", plans whose steps differ by less count as equally fast


def tuned(
    example: Example,
    costs: CostGraph,
    options: PlanOptions,
    search: SearchOptions,
    spent: float,
    progress: Progress,
    meshes: MeshChoices | None,
    in_turn: PlansInTurn,
) -> Plan:
    """The plan that ran fastest, with predictions for the machine as it is now (`PresentSpeed`). `spent`: seconds that
    planning has taken so far. `meshes`: that stages may have. `in_turn`: runs the plans.

    Copies of the model run, so that the user's stays as it is. With `options.cache`, the predicted and measured seconds
    go into the history of predictions, and tune="auto" remembers them, so that the same call is planned the same way.
    Raises like `make_plan`.
    """
    auto = options.tune == "auto"
    plans = dict(
        _automatic(costs, search, meshes) if auto else _best_predicted(costs, search, int(options.tune), meshes)
    )
    plans |= options.candidates or {}
    first = next(iter(plans.values()))
    if auto and len(plans) == 1:
        return first
    ready = priced(plans, example, costs, search)
    callers = in_turn.callers_threads
    alone = _as_workers_run(ready, costs.devices, callers)
    racers = ready | {name: plan for name, (plan, _) in alone.items()}
    lacking = in_turn.lacking(racers)
    if auto and lacking:
        return _with_note(first, f"not measured beside other plans: {lacking}")
    devices, how = (
        [(d.kind, d.threads) for d in costs.devices],
        (options.batch_norm, options.compile, options.watch_nan),
    )
    # The plain model runs with as many threads as the caller has set.
    key = signature_key(
        "tuned",
        _RULES,
        call_signature(example, costs.devices),
        devices,
        torch.get_num_threads(),
        how,
        _keys(ready),
        *in_turn.facts,
    )
    believed = {n for n, plan in ready.items() if runs_as_predicted(plan, costs.devices, callers)} | alone.keys()
    with measurement_cache(options.cache) as cache:
        steps: Steps | None = None
        if cache is not None and auto:
            steps = cache.get(key, partial(_from_json, names=racers.keys()))
        if steps is None:
            budget = max(_BUDGET, _SHARE * spent)
            rounds = Rounds(_ROUNDS, _LEAST_SECONDS, budget, _FINALS) if auto else Rounds(_STEPS)
            doubts = partial(why_unbelievable, racers, believed)
            threads = {name: threads for name, (_, threads) in alone.items()}
            found = in_turn.steps(racers, rounds, progress, doubts, threads)
            steps = found.steps
            if found.doubt:
                return _when_busy(plans, racers, steps, found.doubt, auto=auto)
            if cache is not None:
                cache.put(key, steps)
                known = [(racers[n], steps[n]) for n in steps if n in believed and racers[n].predicted_step_time]
                remember([Record.of(p, example.model, costs.devices, s, source="tune") for p, s in known])
    speed = PresentSpeed.of((racers[name], seconds) for name, seconds in steps.items() if name in believed)
    name, best = _fastest(plans, racers, steps, _SAME if auto else 0.0)
    if name in believed:
        return at_present_speed(best, speed, steps[name])
    return at_present_speed(replace(best, measured_threads=callers), speed)


def _as_workers_run(
    plans: Mapping[str, Plan], devices: tuple[Device, ...], callers: int | None
) -> dict[str, tuple[Plan, int]]:
    """Plans that run the model itself, once more: with as many threads as a worker has, which predictions are for."""
    return {
        f"{name} on {threads} thread{'s' if threads > 1 else ''}": (plan, threads)
        for name, plan in plans.items()
        if not runs_as_predicted(plan, devices, callers)
        for threads in [find_device(devices, plan.used_devices[0]).threads]
    }


def _when_busy(plans: Mapping[str, Plan], racers: Mapping[str, Plan], steps: Steps, doubt: str, *, auto: bool) -> Plan:
    """The first plan, as predicted; with `tune=n`, the fastest one. Nothing is scaled."""
    busy = f"the machine was busy: {doubt}"
    if auto:
        first = next(iter(plans.values()))
        return _with_note(first, f"{busy}; the prediction is followed, and these steps are not remembered")
    return _with_note(_fastest(plans, racers, steps, 0.0)[1], f"{busy}; these steps are not remembered")


def _best_predicted(
    costs: CostGraph, search: SearchOptions, most: int, meshes: MeshChoices | None
) -> Iterator[tuple[str, Plan]]:
    for rank, plan in enumerate(find_plans(costs, search, most, meshes), 1):
        yield f"automatic {rank}", plan


def _automatic(costs: CostGraph, search: SearchOptions, meshes: MeshChoices | None) -> Iterator[tuple[str, Plan]]:
    """The plan of the search, and what the search finds with less, as far as the user's options and hints allow it."""
    best = make_plan(costs, search, meshes)
    yield "automatic", best
    seen = [_decision(best)]
    if _runs_the_model(best):
        return
    tries = []
    for device in {device.kind: device for device in reversed(one_worker_per_gpu(costs).devices)}.values():
        alone = replace(costs, devices=(device,))
        where = "" if len({d.kind for d in costs.devices}) == 1 else f" on {device.name}"
        if search.n_microbatches in (None, 1):
            tries.append((f"plain model{where}", alone, _narrowed(search, n_microbatches=1)))
        tries.append((f"one device{where}", alone, search))
    if any(stage.shards > 1 for stage in best.stages):
        tries.append(("without shards", costs, search))
    tries.append(("without replicas", costs, _narrowed(search, max_replicas=1)))
    if len(best.stages) > 1 and not search.constraints.stage_of:
        one_stage = search.constraints.in_one_stage(costs.operators)
        narrowed = search.narrowed | {"pipeline_stage hints"}
        tries.append(("without a pipeline", costs, replace(search, constraints=one_stage, narrowed=narrowed)))
    for name, those, limited in tries:
        try:
            plan = make_plan(those, limited)
        except (InfeasibleError, InputError, PlanError) as error:
            log.info("%s is not measured: %s", name, error)
            continue
        if _decision(plan) not in seen:
            seen.append(_decision(plan))
            yield name, replace(plan, devices=best.devices, device_kinds=best.device_kinds)


def _narrowed(search: SearchOptions, **limits: int) -> SearchOptions:
    """A search with limits, those which the user did not give marked."""
    own = {name for name in limits if getattr(search, name) is None}
    return replace(search, narrowed=search.narrowed | own, **limits)  # type: ignore[arg-type]


def _runs_the_model(plan: Plan) -> bool:
    """Whether the plan is the plain model on one device."""
    return len(plan.used_devices) == 1 and plan.n_microbatches == 1 and not any(s.mode for s in plan.stages)


def _decision(plan: Plan) -> tuple[Any, ...]:
    stages = [(s.devices, s.operators, s.mode, str(_strategies(s))) for s in plan.stages]
    return stages, plan.n_microbatches, plan.schedule, plan.split


def _strategies(stage: Stage) -> tuple[Any, ...]:
    """What a sharded stage decides."""
    one = stage.sharding
    return () if one is None else (one.mesh, one.strategies, one.parameters, one.redistributions)


def _keys(plans: Mapping[str, Plan]) -> list[Any]:
    return [(name, _decision(plan)) for name, plan in plans.items()]


def _from_json(value: Any, names: Any) -> dict[str, tuple[float, ...]]:
    """Cached steps of the plans `names`. Raises ValueError for anything else."""
    steps = {name: tuple(map(float, seconds)) for name, seconds in value.items()}
    if steps.keys() != set(names) or not all(s and all(0 < x < math.inf for x in s) for s in steps.values()):
        raise ValueError("cached steps must be finite seconds > 0 of the plans that are compared")
    return steps


def _fastest(plans: Mapping[str, Plan], ready: Mapping[str, Plan], steps: Steps, same: float) -> tuple[str, Plan]:
    """The name of the plan with the fastest steps, and the plan with a note on all of them. Of plans within `same`, the
    one with fewest devices.

    `ready`: the plans with their predictions.
    """
    measured = {name: median(seconds) for name, seconds in steps.items()}
    least = min(measured[name] for name in plans)
    near = [name for name in measured if name in plans and measured[name] <= least * (1 + same)]
    best = min(near, key=lambda name: (len(ready[name].used_devices), ready[name].n_microbatches, measured[name]))
    # A plan of the search keeps its bounds and its explanation, which pricing drops. A user's plan that names modules
    # is complete only once it is priced.
    plan = ready[best] if plans[best].split else plans[best]
    plan = replace(plan, predicted_step_time=ready[best].predicted_step_time, measured_step_time=measured[best])
    listed = [
        f"{'*' if name == best else ''}{name} {(ready[name].predicted_step_time or 0.0) * 1e3:.4g} / "
        f"{seconds * 1e3:.4g} ms"
        for name, seconds in measured.items()
    ]
    least, most = min(map(len, steps.values())), max(map(len, steps.values()))
    n = f"{least} to {most}" if least < most else str(most)
    note = f"{TUNED} {n} step{'s' if most > 1 else ''} each, predicted / measured: {', '.join(listed)} (* is followed)"
    return best, _with_note(plan, note)


def _with_note(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))
