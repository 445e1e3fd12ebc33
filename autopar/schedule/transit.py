"""Values that one GPU sends another, held until their copies are done: how long, counted in actions of a worker.

The sender holds what it sends until the copy has read it, and the receiver holds the copy that landed until it has
taken it over. Hosts run ahead of GPUs and wait for neither; so a worker holds both for the next actions:

    action         n           n + 1        n + 2        n + 3        n + 4
    sends, takes   v           .            .            .            v's memory is free before it begins
                   |------------ COPIES_UNDER_WAY actions -----------|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.schedule.clock import Action, Phase

COPIES_UNDER_WAY = 4  # actions of a worker whose copies may be: a forward and a backward of two micro-batches


@dataclass(frozen=True)
class InTransit:
    """Bytes that a worker sends or takes over in an action."""

    nbytes: int
    action: Action
    # The last action during which these bytes are counted elsewhere, as the stage needs them itself; None: they never
    # are.
    counted: Action | None = None


def in_transit(actions: Sequence[Action], sent: Iterable[InTransit]) -> list[int]:
    """Bytes that a worker with these actions holds during each, besides those that are counted elsewhere.

    The weight part of a backward sends nothing, and frees nothing.
    """
    place = {action: number for number, action in enumerate(actions)}
    starts = [number for number, action in enumerate(actions) if action.phase is not Phase.WEIGHT]
    order = {number: nth for nth, number in enumerate(starts)}
    held = [0] * (len(actions) + 1)
    for one in sent:
        first = place[one.action]
        nth = order[first] + COPIES_UNDER_WAY
        last = starts[nth] if nth < len(starts) else len(actions)  # first action without it
        if one.counted is not None:
            first = place[one.counted] + 1
        if first < last:
            held[first] += one.nbytes
            held[last] -= one.nbytes
    total, found = 0, []
    for change in held[:-1]:
        total += change
        found.append(total)
    return found
