"""What one step of a model does, whatever the plan: the base of throughput and of model FLOPs utilisation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepWork:
    """The work of a step on the planned batch."""

    tokens: int | None = None  # entries of the token inputs; None: the model has no such inputs
    flops: float | None = None  # that the model needs, without recomputation; None: not counted
    # s: all devices offered at the peaks of their data sheets; None: a device without one, as every CPU at hand
    least_time: float | None = None

    def utilisation(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step that takes `seconds`; None where the peaks of devices are unknown."""
        return self.least_time / seconds if self.least_time is not None and seconds else None
