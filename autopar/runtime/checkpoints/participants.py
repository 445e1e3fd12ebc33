"""The processes that save or load a checkpoint together: all ranks, or this process by itself."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import AutoparError, CheckpointError, first_line
from autopar.runtime.checkpoints.saving import wait_for_saving
from autopar.runtime.ranks.faults import leaving
from autopar.runtime.ranks.one_message import on_all_ranks, sendable
from autopar.runtime.ranks.world import joined

T = TypeVar("T")

_groups: dict[Any, Any] = {}  # by torch's default process group: that of checkpoints, which a thread may use meanwhile


@dataclass(frozen=True)
class Participants:
    """All ranks, over a process group of their own."""

    rank: int
    size: int
    group: Any  # process group; None for a process by itself

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [value] * self.size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, what: str, do: Callable[[], T]) -> list[T]:
        """What `do` returns on every rank, by rank.

        Raises on all ranks what it raises on one: CheckpointError, "`what`: the error and its rank", unless it is
        autopar's own.
        """
        if self.group is None:
            return [self.done(what, do)]
        return [pickle.loads(one) for one in self.gathered(self.done(what, lambda: pickle.dumps(do())))]

    def done(self, what: str, do: Callable[[], T]) -> T:
        """What `do` returns here, once it has ended on every rank. Raises as `each`."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = do()
        except AutoparError as error:
            failure = sendable(error)
        except CheckpointException as error:  # a BaseException, the same on all ranks
            failure = CheckpointError(f"{what}: {_causes(error)}")
        except Exception as error:
            place = f" (rank {self.rank})" if self.size > 1 else ""
            failure = CheckpointError(f"{what}: {first_line(error)}{place}")
        failures = [error for error in self.gathered(failure) if error is not None]
        if failures:
            raise on_all_ranks(failures[0])
        return result  # type: ignore[return-value]

    def first(self, what: str, do: Callable[[], T]) -> T:
        """What `do` returns on rank 0, everywhere. Raises as `each`."""
        return self.each(what, do if self.rank == 0 else lambda: None)[0]  # type: ignore[return-value]


def participants(beginning: str = "") -> Participants:
    """Collective. First waits for a save in a thread, which uses the same process group.

    `beginning`: the call that all ranks begin with it, if it does not run inside of another. Raises CheckpointError if
    the save failed and nobody has seen that.
    """
    wait_for_saving()
    world = joined()
    if world is None:
        return Participants(0, 1, None)
    if beginning:
        world.announced(beginning)
    default = dist.group.WORLD
    if default not in _groups:
        _groups.clear()  # of process groups that have ended
        _groups[default] = dist.new_group(backend="gloo")
        leaving.remember_added(_groups[default])
    return Participants(world.rank, world.size, _groups[default])


def _causes(failure: CheckpointException) -> str:
    causes: Sequence[str] = [f"{first_line(error)} (rank {rank})" for rank, (error, _) in failure.failures.items()]
    return "; ".join(causes)
