"""The same decisions on a cluster whose networks are faster or slower."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.pricers import pricer_of
from cost_models import Cluster

_FACTORS = ((0.5, "all networks half as fast"), (2.0, "all networks twice as fast"))


def with_networks(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with line rates that are `factor` times as high, inside of nodes and between them."""
    intra, inter = (replace(one, line_rate=one.line_rate * factor) for one in (cluster.intra_node, cluster.inter_node))
    return replace(cluster, intra_node=intra, inter_node=inter)


def network_sensitivity(plan: Plan) -> tuple[Change, ...]:
    """The step of the same decisions on faster and slower networks, collectives included; () for a plan that was not
    priced on a cluster in this process. Each takes about as long as pricing the plan."""
    pricer = pricer_of(plan)
    if pricer is None or pricer.on_networks is None:
        return ()
    return tuple(Change(what, pricer.on_networks(plan, factor).predicted_step_time or 0.0) for factor, what in _FACTORS)
