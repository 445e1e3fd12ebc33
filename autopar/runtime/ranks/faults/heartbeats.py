"""The signs of life of all ranks, and the first failure, in a store of torch.distributed.

```
   store       beat/0   beat/1   beat/2 ..         failed: the first failure, if any
                  ^        |                          |
   rank 0   writes it     reads its left neighbour's, and the failure
```
A rank that ended in good order says so in its last beat, and its neighbour watches the one before it. Methods that read
or write raise RuntimeError where the store is gone, unless they say otherwise.

Beats also show ranks that wait for each other in different calls, as in `if rank == 0: autopar.save(...)`: every call
is made by all ranks, so that call 7 is the same everywhere. A call that raised may have been made by some ranks alone.
So only ranks are compared that are inside calls of the same number, after as many that raised.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from autopar.runtime.ranks.faults.failure import Failure, Position
from autopar.runtime.ranks.faults.processes import has_gone, own_process

BEAT = 0.5  # s between two beats
ANOTHER_BACKWARD = "another backward of the same outputs"  # what a call is named that goes back again
GONE = 10.0  # s that a call may still take after the process of another rank has ended: it may need nothing more of it
DIFFERENT = 10.0  # s that two ranks may be in different calls: beats are taken while calls begin and end

KILLED = "its process ended: killed, or crashed"

_FAILED = "failed"
_ENDED = "ended"  # in the last beat of a rank that ended in good order
_POSITION = frozenset(field.name for field in fields(Position))


class Heartbeats:
    """As one rank writes and reads them. `failure`: the first of the job, once this rank knows of one."""

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        """`timeout`: seconds without a new beat after which a rank has failed."""
        self.failure: Failure | None = None
        self._rank, self._size, self._store, self._timeout = rank, size, store, timeout
        self._n_beats = 0
        self._process = own_process()
        self._own = (Position(), 0)  # in the last beat: position, calls that raised
        self._different = ("", 0.0)  # the calls that this rank and its neighbour are in, and for how long, in s
        self._ahead = (Position(), 0.0)  # the call that the neighbour has not begun, and for how long, in s
        self._heard: dict[int, tuple[str, float]] = {}  # by rank: its last beat, seconds of ours since it came

    def beat(self, position: Position, n_raised: int = 0) -> None:
        """A sign of life. `position`: what this rank is doing. `n_raised`: calls that have raised an error here."""
        self._n_beats += 1
        self._own = position, n_raised
        self._send({"number": self._n_beats, "raised": n_raised, "process": self._process}, position)

    def end(self, position: Position, error: str = "") -> None:
        """The last beat: this rank ends in good order. `error`: that its last call raised, if it did."""
        self._send({_ENDED: error}, position)

    def _send(self, facts: dict[str, Any], position: Position) -> None:
        self._store.set(f"beat/{self._rank}", json.dumps(facts | asdict(position)))

    def all_ended(self) -> bool:
        """Whether all ranks, with this one, have ended in good order."""
        found = self.of(range(self._size))
        return len(found) == self._size and all(map(has_ended, found.values()))

    def of(self, ranks: Sequence[int]) -> dict[int, str]:
        """The last beats of those that ever had one; none where the store is gone."""
        with contextlib.suppress(RuntimeError):
            return {r: self._store.get(f"beat/{r}").decode() for r in ranks if self._store.check([f"beat/{r}"])}
        return {}

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Those whose processes on this machine have ended, other than in good order."""
        return [r for r, beat in self.of(ranks).items() if not has_ended(beat) and has_gone(process_of(beat))]

    def last(self, rank: int) -> str:
        """The last beat of a rank: where the store is gone, the last that this rank heard; "" if it heard none."""
        return self.of([rank]).get(rank, "") or self._heard.get(rank, ("", 0.0))[0]

    def listen(self, elapsed: float) -> str:
        """Note the beat of the nearest rank before this one that has not ended; record that it failed after `timeout`
        seconds without a new one, or that it is in another call. `elapsed`: seconds since the last call.

        Returns what to say of a rank that lives and has made no call for `timeout` seconds while this one is in one.
        """
        for distance in range(1, self._size):
            rank = (self._rank - distance) % self._size
            beat = self.of([rank]).get(rank, "")
            if has_ended(beat):
                continue
            before, silence = self._heard.get(rank, (beat, 0.0))
            silence = silence + elapsed if beat == before else 0.0
            self._heard[rank] = (beat, silence)
            if silence > self._timeout:
                cause = f"no sign of life for {self._timeout:g} s: it is stopped, or its machine cannot be reached"
                self.record(Failure(rank, cause, position_of(beat), self._rank, is_last_beat=True))
            elif silence > GONE and self._own[0].what and has_gone(process_of(beat)):
                self.record(Failure(rank, KILLED, position_of(beat), self._rank, is_last_beat=True))
            self._compare(rank, beat, elapsed)
            return self._late(rank, beat, elapsed)
        return ""

    def _late(self, rank: int, beat: str, elapsed: float) -> str:
        """What to say of `rank` once this rank has been in a call for `timeout` seconds that `rank` has not begun. A
        call that raised may have been made by one of them alone."""
        (own, own_raised), other = self._own, position_of(beat)
        is_ahead = own.call - own_raised > other.call - raised_until(beat)
        if not own.what or other.what or not is_ahead:
            self._ahead = (Position(), 0.0)
            return ""
        here = Position(own.call, own.what)
        before, seconds = self._ahead
        elapsed = seconds + elapsed if here == before else 0.0
        self._ahead = (here, elapsed)
        if not seconds <= self._timeout < elapsed:
            return ""
        since = f" since call {other.call}" if other.call else ""
        return (
            f"rank {self._rank} has been {here} for {self._timeout:g} s: rank {rank} is alive, and has made no "
            f"call{since}. All ranks must make the same calls in the same order, the script's own collectives "
            "(torch.distributed.barrier()) included"
        )

    def _compare(self, rank: int, beat: str, elapsed: float) -> None:
        """Record that `rank` and this one have been in different calls for `DIFFERENT` seconds."""
        (own, own_raised), other, other_raised = self._own, position_of(beat), raised_until(beat)
        same_place = (own.call, own_raised) == (other.call, other_raised)
        if not (same_place and own.what and other.what and own.what != other.what):
            self._different = ("", 0.0)
            return
        calls = f"{rank} {other.call} {other.what} {own.what}"
        before, seconds = self._different
        self._different = (calls, seconds + elapsed if calls == before else 0.0)
        if self._different[1] > DIFFERENT:
            sides = [(self._rank, own), (rank, other)]
            if other.what == ANOTHER_BACKWARD:  # the call that is too much
                sides.reverse()
            (failing, position), (waiting, there) = sides
            cause = (
                f"rank {waiting} is in another call {there.call}, {there.what}, and both wait: every rank must make "
                "the same calls in the same order"
            )
            self.record(Failure(failing, cause, position, self._rank))

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


def has_ended(beat: str) -> bool:
    """Whether a rank ended in good order with this beat."""
    return bool(beat) and _ENDED in json.loads(beat)


def ending_of(beat: str) -> str:
    """How a rank ended in good order, with this beat."""
    error = json.loads(beat)[_ENDED]
    return f"its script had ended {position_of(beat)}{f', which raised {error}' if error else ''}"


def position_of(beat: str) -> Position:
    """What a rank was doing at a beat, as far as the beat says."""
    values = json.loads(beat) if beat else {}
    return Position(**{key: value for key, value in values.items() if key in _POSITION})


def process_of(beat: str) -> str:
    """`own_process` of the rank; "" if the beat does not say."""
    return str(json.loads(beat).get("process", "")) if beat else ""


def raised_until(beat: str) -> int:
    """How many calls of a rank had raised an error at a beat, before its last one."""
    return int(json.loads(beat).get("raised", 0)) if beat else 0
