"""What a plan itself says of its sharded stages: whole operators' costs, as measured, say nothing of them."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.plan import Plan


def with_sharded(priced: Plan, given: Plan) -> Plan:
    """`priced`, but its sharded stages, and what they send, as `given` says, and no step.

    Where `given` says nothing of them, they have no costs.
    """
    sharded = {number for number, stage in enumerate(given.stages) if stage.sharding is not None}
    stages = tuple(
        replace(given.stages[number], operators=stage.operators) if number in sharded else stage
        for number, stage in enumerate(priced.stages)
    )
    sent = {(link.source, link.target): link for link in given.transfers}
    links = [
        sent.get((link.source, link.target)) if {link.source, link.target} & sharded else link
        for link in priced.transfers
    ]
    transfers = tuple(link for link in links if link is not None)
    return replace(priced, stages=stages, transfers=transfers, predicted_step_time=None, bubble=None)
