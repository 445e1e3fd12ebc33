"""The same decisions on a cluster whose networks are faster or slower."""

from __future__ import annotations

from dataclasses import replace

from autopar.analysis.example import Example
from autopar.costs.cost_table import SILENT, Progress
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.explain import Change
from autopar.planner.explainers import explainer_of, with_explainer
from autopar.planner.plan_ahead import priced_ahead
from cost_models import Cluster

_FACTORS = ((0.5, "all networks half as fast"), (2.0, "all networks twice as fast"))


def repriceable(plan: Plan, example: Example, cluster: Cluster, options: PlanOptions) -> Plan:
    """The same plan, which remembers how to price it on networks that are faster or slower."""

    def on_networks(plan: Plan, factor: float, progress: Progress = SILENT) -> Plan:
        intra, inter = (
            replace(one, line_rate=one.line_rate * factor) for one in (cluster.intra_node, cluster.inter_node)
        )
        other = replace(cluster, intra_node=intra, inter_node=inter)
        return priced_ahead(plan, example, other, options, progress)

    return with_explainer(plan, replace(explainer_of(plan), on_networks=on_networks))


def network_sensitivity(plan: Plan, progress: Progress = SILENT) -> tuple[Change, ...]:
    """The step of the same decisions on faster and slower networks, collectives included; () for a plan that was not
    priced on a cluster in this process. Each takes about as long as pricing the plan."""
    on_networks = explainer_of(plan).on_networks
    if on_networks is None:
        return ()
    found = []
    for number, (factor, what) in enumerate(_FACTORS):
        progress(what, number / len(_FACTORS))
        found.append(Change(what, on_networks(plan, factor, progress).predicted_step_time or 0.0))
    return tuple(found)
