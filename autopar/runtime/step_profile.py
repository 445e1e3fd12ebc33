"""One training step as it went: what every stage took and waited for, next to what the plan predicted."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from autopar.plan.display import shown


@dataclass(frozen=True)
class StageStep:
    """A stage on one of its devices, over all micro-batches that it ran there."""

    stage: int
    device: str  # name
    microbatches: int
    forward: float  # s, the loss included
    loss: float  # s, of the forward: in the loss function
    backward: float  # s, with what is computed again for it
    waiting: float  # s, for messages of other stages, in neither of them
    predicted_forward: float | None  # s, the loss included; None where the plan predicts nothing for this step
    predicted_backward: float | None  # s, the same

    @property
    def busy(self) -> float:
        """Seconds."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepProfile:
    """One training step; `print(profile)` shows a table."""

    seconds: float  # of the whole call
    predicted: float | None  # s; None where the plan has no prediction, or one for another batch
    batch_size: int  # samples
    n_microbatches: int
    schedule: str
    stages: tuple[StageStep, ...]  # by stage, then as its devices are named in the plan
    one_worker: bool  # one thread did the actions of several devices in turn
    synchronized: bool  # GPUs were waited for after every action

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to the measured time: above 0 where the step was faster than predicted."""
        return None if self.predicted is None else self.predicted / self.seconds - 1

    def __str__(self) -> str:
        return shown(self)

    def to_json(self) -> str:
        """All of it in seconds."""
        return json.dumps({**asdict(self), "error": self.error}, indent=1)
