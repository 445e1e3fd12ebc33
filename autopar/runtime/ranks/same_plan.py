"""Whether all ranks have the same plan, and in words what differs if not."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.runtime.ranks.agreement import digest
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.world import World


def compare_plans(world: World, plan: Plan | None) -> None:
    """Raise InputError on all ranks where they have plans of other decisions, or some have none. Collective."""
    text = "" if plan is None else plan.decision.to_json()
    if len(set(world.gathered(digest(text)))) == 1:
        return
    texts = world.gathered(text)
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    raise on_all_ranks(
        InputError(
            "ranks differ in the plan, and all need the same: give parallelize one file's (Plan.load), or that of "
            f"autopar.plan, which all ranks call. {_difference(texts, other)}"
        )
    )


def _difference(texts: Sequence[str], other: int) -> str:
    """Between rank 0's and that of rank `other`. `texts`: by rank, as JSON; "": no plan."""
    if not (texts[0] and texts[other]):
        here, there = ("a plan" if texts[rank] else "no plan" for rank in (0, other))
        return f"Rank 0 has {here}, rank {other} has {there}"
    difference = Plan.from_json(texts[0]).diff(Plan.from_json(texts[other]))
    if difference.same_decisions:
        return f"Those of ranks 0 and {other} differ only in how tensors pass from one placement to another"
    return f"Rank 0 has the first, rank {other} the second:\n{difference}"
