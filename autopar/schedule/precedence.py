"""Which actions of other slots have ended before an action starts, whatever each takes.

A slot does its actions in the order of its table and waits for what other stages send it. So before an action starts,
some actions of every other slot must have ended, and after it has ended others may start: those follow from the tables
alone (vector clocks: Mattern, Virtual Time and Global States of Distributed Systems, 1989).

```
   slot 0   F0 F1 .. B0 F2 B1          before B1 of slot 1:  F0 F1 of slot 0 have ended
   slot 1      F0 B0 F1 B1 ...         B0 and F2 of slot 0 may have ended, or not even have started
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.schedule.clock import Action, Phase
from autopar.schedule.table import Schedule

_BACKWARDS = (Phase.BACKWARD, Phase.INPUT)


class Precedence:
    """The order that the tables of a schedule force on its actions."""

    def __init__(self, schedule: Schedule, sources: Sequence[Sequence[int]], *, barrier: bool) -> None:
        """`sources`: for each stage the stages that send to it, and that it sends gradients back to. `barrier`: no
        backward starts before all forwards of all slots have ended."""
        self._tables = schedule.actions
        self._sources = sources
        self._targets: list[list[int]] = [[] for _ in sources]
        for target, mine in enumerate(sources):
            for source in mine:
                self._targets[source].append(target)
        self.place = {a: (slot, n) for slot, table in enumerate(self._tables) for n, a in enumerate(table)}
        self._backward = {(a.stage, a.microbatch): a for a in self.place if a.phase in _BACKWARDS}
        self._last_forwards = [
            [a for a in table if a.phase is Phase.FORWARD][-1:] if barrier else [] for table in self._tables
        ]
        # By slot: [actions, slots] of every slot, how many actions have ended when this one starts.
        self.ended = [np.zeros((len(table), len(self._tables)), dtype=np.int32) for table in self._tables]
        self._fill()

    def _fill(self) -> None:
        done, progressing = [0] * len(self._tables), True
        while progressing:
            progressing = False
            for slot, table in enumerate(self._tables):
                while done[slot] < len(table) and self._take(slot, done):
                    done[slot] += 1
                    progressing = True

    def _take(self, slot: int, done: Sequence[int]) -> bool:
        """Fill the row of a slot's next action, unless it needs an action that is not done."""
        number = done[slot]
        needed = [self.place[a] for a in self._needed(slot, number)]
        if any(n >= done[other] for other, n in needed):
            return False
        row = self.ended[slot][number]
        if number:
            row[:] = self.ended[slot][number - 1]
            row[slot] = number
        for other, n in needed:
            np.maximum(row, self.ended[other][n], out=row)
            row[other] = max(row[other], n + 1)
        return True

    def _needed(self, slot: int, number: int) -> Iterator[Action]:
        """The actions of other slots whose results an action waits for."""
        action = self._tables[slot][number]
        if action.phase is Phase.FORWARD:
            for source in self._sources[action.stage]:
                yield action._replace(stage=source)
            return
        before = self._tables[slot][number - 1] if number else None
        if before is None or before.phase is Phase.FORWARD:
            for last in self._last_forwards:
                yield from last
        if action.phase in _BACKWARDS:
            for target in self._targets[action.stage]:
                if (target, action.microbatch) in self._backward:
                    yield self._backward[target, action.microbatch]
