"""A failed rank: its last position, and why it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from autopar.errors import AutoparError

_LOST = re.compile(
    r"Connection (closed|reset|refused|was likely closed)|Broken pipe|pair closure|Socket closed|Timed out waiting"
    r"|ncclRemoteError|remote process exited|NCCL communicator (was|has been) aborted|ncclCommAbort"
)
_LONGEST = 500  # characters of an error's message that travel to other ranks


class LostRankError(AutoparError):
    """Another rank ended, or its connection broke, while this one waited for it."""

    def __init__(self, rank: int, cause: str, due: tuple[str, int, int] | None = None) -> None:
        """`due`: the action of that rank which this one waited for: its name, stage and micro-batch."""
        super().__init__(f"rank {rank} ended or failed while {cause}")
        self.rank, self.cause, self.due = rank, cause, due


@dataclass(frozen=True)
class Position:
    """What a rank is doing."""

    call: int = 0  # calls of pipelined modules that have begun
    what: str = ""  # kind of the call that runs; "" between calls
    action: str = ""  # of a stage; "" outside actions
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        if self.action:
            return f"in the {self.action} of stage {self.stage}, micro-batch {self.microbatch} ({self._call})"
        if self.what:
            return f"in {self._call}"
        return f"after call {self.call}" if self.call else "before its first call"

    @property
    def _call(self) -> str:
        return f"call {self.call}, {self.what}"


UNKNOWN = Position(call=-1)


@dataclass(frozen=True)
class Failure:
    """The first failure of a job."""

    rank: int  # -1: not known
    cause: str
    position: Position = field(default_factory=Position)
    noticed_by: int = -1  # the rank that recorded it
    is_last_beat: bool = False  # the position is that of the rank's last beat: it has gone on since

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank"
        where = "" if self.position == UNKNOWN else f" {self.position}"
        if self.is_last_beat:
            where = f", last heard of{where}"
        return f"{who} failed{where}: {self.cause}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Failure:
        values = json.loads(text)
        return Failure(**(values | {"position": Position(**values["position"])}))


def is_lost_connection(error: BaseException) -> bool:
    """Whether gloo or NCCL lost its connection to another rank, which they say in a RuntimeError's text alone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def connection_error(error: BaseException) -> str:
    """What gloo says of a lost connection, without its file and its advice."""
    text = " ".join(str(error).split())
    found = _LOST.search(text)
    return text[found.start() :].partition(". ")[0] if found else text


_explanations: list[Callable[[BaseException], str]] = []


def explain_errors(explain: Callable[[BaseException], str]) -> None:
    """From now on, `described` adds what `explain` says of an error; "" for none that it knows."""
    _explanations.append(explain)


def described(error: BaseException) -> str:
    """An error's class and message, in one line, as other ranks print it, and what explains it."""
    text = " ".join(str(error).split())
    if is_lost_connection(error):
        return connection_error(error)
    text = "; ".join(filter(None, [text, *(explain(error) for explain in _explanations)]))
    return f"{type(error).__name__}: {text}"[:_LONGEST] if text else type(error).__name__


def names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
