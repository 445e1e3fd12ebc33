"""What the optimizer's step adds to the end of a step, in seconds and bytes, on devices that are not at hand.

    parameter --Weight.step--> StepShare --sum over a stage--> OptimizerRates.seconds --> s once a step

The objective and the simulator add up the same shares. On devices at hand the step is measured without the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.costs.cost_graph import CostGraph
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.stage_bytes import Stepped
from cost_models.memory.optimizer_step import NO_STEP, OptimizerRates, StepShare


def stepped(costs: CostGraph, atoms: Atoms, optimizer: str) -> tuple[Stepped, ...]:
    """What each parameter adds; nothing where no optimizer runs or its step is not priced."""
    if costs.recipe is None or costs.cluster is None or not costs.training or optimizer == "none":
        return ()
    how = costs.recipe.implementation(costs.cluster)
    return atoms.stepped(optimizer, how)


def optimizer_rates(costs: CostGraph, kind: str, optimizer: str) -> OptimizerRates | None:
    """How fast devices of `kind` step; None where no optimizer runs or its step is not priced."""
    if costs.recipe is None or costs.cluster is None or not costs.training or optimizer == "none":
        return None
    rates: OptimizerRates = costs.recipe.optimizer_rates(costs.cluster, kind, optimizer)
    return rates


class StageOptimizerStep(NamedTuple):
    """The optimizer's step of one stage."""

    seconds: float
    held: int  # bytes of temporaries on each device


def stage_steps(costs: CostGraph, atoms: Atoms, arrangement: Arrangement, optimizer: str) -> list[StageOptimizerStep]:
    """Of each stage."""
    found = []
    for stage, name in enumerate(arrangement.cost_names):
        inside, kind = set(arrangement.stages[stage]), arrangement.groups[stage][0].kind
        rates = optimizer_rates(costs, kind, optimizer)
        mine = sum_of([s.share for s in stepped(costs, atoms.of(name), optimizer) if not inside.isdisjoint(s.atoms)])
        found.append(StageOptimizerStep(0.0 if rates is None else rates.seconds(mine), int(mine.held)))
    return found


def sum_of(shares: Sequence[StepShare]) -> StepShare:
    return StepShare(*map(sum, zip(NO_STEP, *shares, strict=True)))
