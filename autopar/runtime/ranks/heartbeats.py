"""The signs of life of all ranks, and the first failure, in a store of torch.distributed.

```
   store       beat/0   beat/1   beat/2 ..         failed: the first failure, if any
                  ^        |                          |
   rank 0   writes it     reads its left neighbour's, and the failure
```
A rank that ended in good order says so in its last beat, and its neighbour watches the one before it. Methods that read
or write raise RuntimeError where the store is gone, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.runtime.ranks.failure import Failure, Position

BEAT = 0.5  # s between two beats
ENDED = "ended"  # the last beat of a rank that ended in good order

_FAILED = "failed"


class Heartbeats:
    """As one rank writes and reads them. `failure`: the first of the job, once this rank knows of one."""

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        """`timeout`: seconds without a new beat after which a rank has failed."""
        self.failure: Failure | None = None
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._n_beats = 0
        self._heard: dict[int, tuple[str, float]] = {}  # by rank: its last beat, seconds of ours since it came

    def beat(self, position: Position) -> None:
        """A sign of life. `position`: what this rank is doing."""
        self._n_beats += 1
        self._store.set(f"beat/{self._rank}", json.dumps({"number": self._n_beats} | asdict(position)))

    def end(self) -> None:
        """This rank ends in good order."""
        self._store.set(f"beat/{self._rank}", ENDED)

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """The last beats of those that ever had one; none where the store is gone."""
        with contextlib.suppress(RuntimeError):
            return {r: self._store.get(f"beat/{r}").decode() for r in ranks if self._store.check([f"beat/{r}"])}
        return {}

    def listen(self, elapsed: float) -> None:
        """Note the beat of the nearest rank before this one that has not ended; record that it failed after `timeout`
        seconds without a new one. `elapsed`: seconds since the last call."""
        for distance in range(1, self._size):
            rank = (self._rank - distance) % self._size
            beat = self.of([rank]).get(rank, "")
            if beat == ENDED:
                continue
            before, silence = self._heard.get(rank, (beat, 0.0))
            silence = silence + elapsed if beat == before else 0.0
            self._heard[rank] = (beat, silence)
            if silence > self._timeout:
                cause = f"no sign of life for {self._timeout:g} s: it is stopped, or its machine cannot be reached"
                self.record(Failure(rank, cause, position_of(beat), self._rank, is_last_beat=True))
            return

    def record(self, failure: Failure) -> Failure:
        """The first failure of the job, which is this one if none is known yet. Works without a store."""
        if self.failure is None:
            try:
                text = self._store.compare_set(_FAILED, "", failure.to_json())
                failure = Failure.from_json(text.decode())
            except RuntimeError:  # the store is gone, with the rank that has it
                pass
            self.failure = failure
        return self.failure

    def known(self) -> Failure | None:
        """The first failure of the job, if there is one. Works without a store."""
        if self.failure is None:
            with contextlib.suppress(RuntimeError):
                if self._store.check([_FAILED]):
                    self.failure = Failure.from_json(self._store.get(_FAILED).decode())
        return self.failure

    def store_answers(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self._store.check([_FAILED])
            return True
        return False


def position_of(beat: str) -> Position:
    """What a rank was doing at a beat, as far as the beat says."""
    if not beat or beat == ENDED:
        return Position()
    values = json.loads(beat)
    values.pop("number")
    return Position(**values)
