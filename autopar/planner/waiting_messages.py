"""What stages have sent each other and nobody has used yet, in the memory of one slot, besides its own actions.

CPU workers pass on the tensor itself, which counts on both ends until the last of them has released it. A device with
a memory of its own receives a copy, which waits there for its action:

                     tensor passed on                                copied
    sender           from its own release to the receiver's          -
    receiver         from its own release to the sender's            from the sending action to its own
    its gradient     on the receiver, until the sender has used it   on the sender, as the value on the receiver
                     on the sender, as long as the weight part of
                     the receiver's backward needs it

How long a message waits for another slot differs from run to run. The order of actions (`schedule/precedence.py`)
tells which messages wait during an action in every run, and which may wait in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autopar.schedule.clock import Action, Phase
from autopar.schedule.precedence import Precedence


@dataclass(frozen=True)
class WaitingMessage:
    """What one stage sends another for a micro-batch, as seen by one of their slots."""

    source: int
    target: int
    microbatch: int
    sends: bool  # the slot has the source, not the target
    nbytes: int
    gradient: int  # bytes of what comes back
    recomputed: bool  # the source keeps no outputs
    keeps_gradients: bool  # the weight part of the source's backward needs the gradient that came back
    keeps_sent: int = 0  # bytes of `gradient` that the weight part of the target's backward needs, too
    in_one: tuple[bool, bool] = (False, False)  # source, target: the input part is the whole backward


@dataclass(frozen=True)
class Waiting:
    """Bytes during each action of a slot."""

    certain: list[int]  # in every run
    possible: list[int]  # in some run


@dataclass(frozen=True)
class _Wait:
    """Bytes that are there from the end of one action until another ends or, if `until_start`, starts."""

    nbytes: int
    begin: Action
    end: Action
    until_start: bool = False


def waiting(slot: int, order: Precedence, messages: Iterable[WaitingMessage], *, shared: bool) -> Waiting:
    """What waits in the memory of `slot`. `shared`: slots pass tensors on without a copy. O(messages log(actions))."""
    n = len(order.ended[slot])
    certain, possible = np.zeros(n + 1, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    for message in messages:
        for wait in _waits(message, order, shared=shared):
            (earliest, begin), (end, latest) = _begin(slot, order, wait), _end(slot, order, wait)
            for changes, first, last in ((certain, begin, end), (possible, earliest, latest)):
                if first < last:
                    changes[first] += wait.nbytes
                    changes[last] -= wait.nbytes
    return Waiting(certain.cumsum()[:n].tolist(), possible.cumsum()[:n].tolist())


def _begin(slot: int, order: Precedence, wait: _Wait) -> tuple[int, int]:
    """The first action of `slot` during which the bytes may be there, and the first during which they must be unless
    they are gone."""
    other, number = order.place[wait.begin]
    if other == slot:
        return number + 1, number + 1
    earliest = int(order.ended[other][number][slot])  # actions that have ended before
    return earliest, int(np.searchsorted(order.ended[slot][:, other], number, side="right"))


def _end(slot: int, order: Precedence, wait: _Wait) -> tuple[int, int]:
    """The first action of `slot` during which the bytes may be gone, and the first during which they are."""
    other, number = order.place[wait.end]
    if other == slot:
        last = number if wait.until_start else number + 1
        return last, last
    return int(order.ended[other][number][slot]), int(
        np.searchsorted(order.ended[slot][:, other], number, side="right")
    )


def _waits(message: WaitingMessage, order: Precedence, *, shared: bool) -> Iterator[_Wait]:
    source, target = (_Actions.of(stage, message.microbatch, order) for stage in (message.source, message.target))
    if not shared and not message.sends:
        yield _Wait(message.nbytes, source.forward, target.forward, until_start=True)
        return
    if source.backward is None or target.backward is None:  # forwards only
        if shared and message.sends:
            yield _Wait(message.nbytes, source.forward, target.forward)
        return
    if not shared:
        yield _Wait(message.gradient, target.backward, source.backward, until_start=True)
        return
    own = source.backward if message.in_one[0] else source.last
    other = target.backward if message.in_one[1] else target.last
    used = own if message.keeps_gradients else source.backward
    if message.sends:
        yield _Wait(message.nbytes, source.forward if message.recomputed else own, other)
        yield _Wait(message.keeps_sent, used, target.last)
    else:
        yield _Wait(message.gradient, target.backward, used)
        yield _Wait(message.nbytes, other, source.forward if message.recomputed else own)


@dataclass(frozen=True)
class _Actions:
    """Of a stage and micro-batch."""

    forward: Action
    backward: Action | None  # the whole, or its input part
    last: Action

    @classmethod
    def of(cls, stage: int, microbatch: int, order: Precedence) -> _Actions:
        forward, *others = (Action(phase, stage, microbatch) for phase in Phase)
        whole, inputs, weights = (action if action in order.place else None for action in others)
        backward = whole or inputs
        return cls(forward, backward, weights or backward or forward)
