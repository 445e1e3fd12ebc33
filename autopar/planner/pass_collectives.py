"""The collectives of a stage's passes: how long they take, and how much of that computing does not hide.

A plan knows the sums, not when each collective runs. Drawings put them at the end of an action:

    computing    |####################|           |   the action
    collectives  |            |=======:===========|   hidden : exposed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.communication import collectives_each, exposed_each, runs_again
from autopar.schedule.clock import Event, Phase
from autopar.schedule.micro_batches import split_sizes
from autopar.sharding.stage_sharding import Exchange


@dataclass(frozen=True)
class PassCollective:
    """Collectives of one kind in a pass."""

    name: str  # "all-reduce along tensor"
    times: int
    nbytes: float
    start: float  # s
    end: float  # s


@dataclass(frozen=True)
class _Kind:
    name: str
    times: int
    nbytes: int
    seconds: float


class PassCollectives:
    """Lays the collectives of a plan's actions out in time."""

    def __init__(self, plan: Plan) -> None:
        back = {link.target for link in plan.transfers if link.backward_bytes}
        self._of = [_stage(stage, plan.training, number in back) for number, stage in enumerate(plan.stages)]
        sizes = split_sizes(plan.batch_size or plan.n_microbatches, plan.n_microbatches)
        self._shares = [size * len(sizes) / sum(sizes) for size in sizes]  # of a micro-batch of the mean size

    def in_stage(self, stage: int) -> bool:
        return any(self._of[stage][0].values())

    def of(self, event: Event) -> tuple[float, list[PassCollective]]:
        """When the action stops computing, and its collectives, one after another until its end.

        They take no longer than the action: a saved plan may contradict itself.
        """
        kinds, exposed_share = self._of[event.action.stage]
        mine, share = kinds.get(event.action.phase, ()), self._shares[event.action.microbatch]
        total = share * sum(one.seconds for one in mine)
        if not total:
            return event.end, []
        fits = min(1.0, (event.end - event.start) / total)
        begin, found = max(event.start, event.end - fits * total), []
        for place, one in enumerate(mine, 1):
            until = event.end if place == len(mine) else begin + fits * share * one.seconds
            found.append(PassCollective(one.name, one.times, share * one.nbytes, begin, until))
            begin = until
        return max(event.start, event.end - fits * total * exposed_share), found


def _stage(stage: Stage, training: bool, sends_gradient: bool) -> tuple[dict[Phase, Sequence[_Kind]], float]:
    """Its collectives by phase, for a micro-batch of the mean size, and the share of their time that is exposed."""
    exchanges = stage.sharding.exchanges if stage.sharding is not None else ()
    each = [one for one in exchanges if not one.once]
    forward = [one for one in each if not one.backward]
    backward = [one for one in each if one.backward]
    backward = [*(one for one in forward if runs_again(one, stage)), *backward] if training else []
    total = collectives_each(stage)
    exposed = exposed_each(stage) / total if total else 0.0
    # Of a divided backward, the part for parameters does everything where no stage waits for gradients of inputs.
    inputs = Phase.INPUT if sends_gradient else Phase.WEIGHT
    kinds = _kinds(backward)
    return {Phase.FORWARD: _kinds(forward), Phase.BACKWARD: kinds, inputs: kinds}, exposed


def _kinds(exchanges: Iterable[Exchange]) -> list[_Kind]:
    alike: dict[str, list[Exchange]] = defaultdict(list)
    for one in exchanges:
        alike[f"{one.collective.replace('_', '-')} along {one.axis}"].append(one)
    return [
        _Kind(name, len(several), sum(one.nbytes for one in several), sum(one.seconds for one in several))
        for name, several in alike.items()
    ]
