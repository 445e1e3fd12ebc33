"""Plans for clusters that are not at hand, whose changes are priced again."""

from __future__ import annotations

from dataclasses import replace

from autopar.analysis.example import Example
from autopar.options import PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.changed_zero import at_zero_ahead
from autopar.planner.other_networks import with_networks
from autopar.planner.plan_ahead import priced_ahead
from autopar.planner.pricers import Pricer, with_pricer
from autopar.report.progress import progress_bar
from cost_models import Cluster


def priced_on_cluster(plan: Plan, example: Example, cluster: Cluster, options: PlanOptions) -> Plan:
    """`plan` with its price on a cluster that is not at hand."""
    with progress_bar() as progress:
        priced = priced_ahead(plan, example, cluster, options, progress)
    return with_pricer(priced, cluster_pricer(example, cluster, options))


def cluster_pricer(example: Example, cluster: Cluster, options: PlanOptions) -> Pricer:
    """For plans on a cluster that is not at hand."""
    return Pricer(
        lambda plan: priced_on_cluster(plan, example, cluster, options),
        lambda plan, zero, m: at_zero_ahead(plan, zero, example, cluster, options, m),
        lambda plan, factor: priced_on_cluster(plan, example, with_networks(cluster, factor), options),
        lambda plan, launch: priced_ahead(plan, example, cluster, replace(options, launch=launch, compile=False)),
    )
