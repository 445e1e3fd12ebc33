"""Predictions for the machine as it is now: a few steps of the whole model are run before a plan is returned.

plain model   plain model on both devices      <- rounds in turn, on copies of the model

Steps on all devices show whether the machine is busy, and scale predictions of replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.analysis.example import Example
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import Progress
from autopar.costs.present_speed import PresentSpeed
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.explainers import Explainer, explainer_of, with_explainer
from autopar.planner.predict import predict_plan
from autopar.planner.search_options import SearchOptions
from autopar.runtime.comparing.contestants import Rounds
from autopar.runtime.comparing.disturbance import why_unbelievable
from autopar.runtime.comparing.in_turn import PlansInTurn
from cost_models.hardware.devices import find_device

_ROUNDS = Rounds(3, 0.05, 10.0)  # the median of few steps, and no more than some seconds


def calibrated(
    plan: Plan, example: Example, costs: CostGraph, search: SearchOptions, progress: Progress, in_turn: PlansInTurn
) -> Plan:
    """`plan` with predictions scaled by measured steps of the whole model on the kinds of devices that it uses.

    `in_turn`: runs the steps. Raises InputError where the model cannot run."""
    used = set(plan.used_devices)
    kinds = dict.fromkeys(device.kind for device in costs.devices if device.name in used)
    by_kind = {kind: [d.name for d in costs.devices if d.kind == kind and d.name in used] for kind in kinds}
    plans = dict(_whole_models(by_kind, example, costs, search))
    threads = {name: find_device(costs.devices, one.used_devices[0]).threads for name, one in plans.items()}
    doubts = partial(why_unbelievable, plans, plans.keys())
    found = in_turn.steps(plans, _ROUNDS, progress, doubts, threads)
    if found.doubt:
        note = f"the machine was busy: {found.doubt}; predictions are not scaled by these steps"
        return with_explainer(replace(plan, notes=(*plan.notes, note)), explainer_of(plan))
    return at_present_speed(plan, PresentSpeed.of((plans[name], steps) for name, steps in found.steps.items()))


def at_present_speed(plan: Plan, speed: PresentSpeed, own: Sequence[float] = ()) -> Plan:
    """`plan` with its predictions scaled, still explained by its search. `own`: seconds of its steps, if it ran."""
    explainer, now = explainer_of(plan), speed.applied(plan, own)
    return with_explainer(now, explainer) if explainer != Explainer() and now is not plan else now


def _whole_models(
    by_kind: Mapping[str, Sequence[str]], example: Example, costs: CostGraph, search: SearchOptions
) -> Iterator[tuple[str, Plan]]:
    """The plain model on the first of these devices of each kind, and replicas of it on all of them where the batch can
    be split."""
    for names in by_kind.values():
        yield f"plain model on {names[0]}", _alone(names[:1], example, costs, search)
        if len(names) > 1 and costs.batch_size >= len(names) and not example.batching.obstacle:
            yield f"plain model on {len(names)} devices", _alone(names, example, costs, search)


def _alone(names: Sequence[str], example: Example, costs: CostGraph, search: SearchOptions) -> Plan:
    """The whole model on each of the devices, which share the batch."""
    plan = Plan((Stage(tuple(names)),), n_microbatches=len(names), schedule="gpipe")
    return predict_plan(plan, example, costs, search.conditions)
