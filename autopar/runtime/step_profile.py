"""A profiled training step: how long every stage computed and waited, next to what the plan predicted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.errors.names import with_checked_names
from autopar.plan.display import shown, traced
from autopar.plan.files import TRACE, file_to_write


@dataclass(frozen=True)
class StageStep:
    """A stage on one of its devices, over all micro-batches that it ran there."""

    stage: int
    device: str  # name
    microbatches: int
    forward: float  # s, the loss included
    loss: float  # s in the loss function, part of `forward`
    backward: float  # s, recomputed forwards included
    waiting: float  # s for messages of other stages, counted in neither `forward` nor `backward`
    predicted_forward: float | None  # s, the loss included; None where the plan has no prediction for this step
    predicted_backward: float | None  # s; None as above

    @property
    def busy(self) -> float:
        """Seconds of computing."""
        return self.forward + self.backward


@dataclass(frozen=True)
class MeasuredAction:
    """An action of the step, where it did not wait for messages."""

    phase: str  # value of a `Phase`
    stage: int
    microbatch: int
    device: str  # name
    spans: tuple[tuple[float, float], ...]  # s from the start of the first action: start and end; a wait lies between
    allocated: int | None = None  # bytes of tensors on its GPU at its end


@dataclass(frozen=True)
class MeasuredSend:
    """A value, or a gradient, that one stage's action passed to another's."""

    stage: int
    to: int  # stage
    microbatch: int
    gradient: bool
    sent: float  # s from the start of the first action
    received: float  # s, as the receiver went on with it
    device: str  # name of the one that sent it
    to_device: str  # name of the one that received it


@dataclass(frozen=True)
class StepProfile:
    """One training step; `print(profile)` shows a table."""

    seconds: float  # of the whole call
    predicted: float | None  # s; None where the plan has no prediction, or one for another batch
    batch_size: int  # samples
    n_microbatches: int
    schedule: str
    stages: tuple[StageStep, ...]  # by stage, then in the order of its devices in the plan
    one_worker: bool  # one thread did the actions of several devices, one after another
    actions: tuple[MeasuredAction, ...] = ()  # by start
    sends: tuple[MeasuredSend, ...] = ()  # by when they were sent
    clock_error: float = 0.0  # s by which times on two machines may be apart wrongly; 0 on one machine

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to the measured time; above 0 where the step was faster than predicted."""
        return None if self.predicted is None else self.predicted / self.seconds - 1

    def __str__(self) -> str:
        return shown(self)

    @with_checked_names
    def trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write the step as a Chrome trace, as `Plan.trace` does for a predicted one; ranks are devices by their stage.

        Raises InputError for a rank that there is not, and a name that ends in neither .json nor .gz, or where no file
        can be; OSError.
        """
        traced(self, file_to_write(path, TRACE), rank)

    def to_json(self) -> str:
        """All fields and the error; times in seconds."""
        return json.dumps({**asdict(self), "error": self.error}, indent=1)
