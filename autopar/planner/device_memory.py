"""What the fullest device of each place in a pipeline holds at its peak, by owner, and over time.

The peak is that of the plan, which rehearses stages on single devices. Owners come from the search's formula: weights,
gradients and the optimizer's state are exact there, so activations get what a rehearsed peak has more, or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.plan.plan import Plan
from autopar.schedule.timeline import Timeline

OWNERS = ("weights", "gradients", "optimizer", "activations", "workspace")
_IN_TIMELINES = dict(zip(("parameters", "gradients", "optimizer", "activations", "transient"), OWNERS, strict=True))
_GIVING_WAY = ("activations", "workspace", "gradients", "optimizer", "weights")


@dataclass(frozen=True)
class DeviceMemory:
    """The devices of one place in the pipeline. Bytes are those on the fullest of them."""

    devices: tuple[str, ...]
    stages: tuple[int, ...]
    peak: int
    usable: int | None  # None: unknown
    owners: Mapping[str, int]  # of the peak, by `OWNERS`; they add up to it
    resident: Mapping[str, int]  # bytes that are held all the time, by owner
    over_time: tuple[tuple[float, int], ...]  # (s, bytes from then on), by the search's formula


def device_memory(plan: Plan, timeline: Timeline | None) -> tuple[DeviceMemory, ...]:
    """By place in the pipeline; () for a plan that does not know its memory. `timeline`: of the plan's own numbers."""
    if timeline is None or timeline.stage_memory is None or any(s.peak_memory is None for s in plan.stages):
        return ()
    peaks = timeline.peak_memory or ()
    found = []
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        slot = max(timeline.schedule.slots_of(rank), key=lambda one: peaks[one])
        peak = max(plan.stages[stage].peak_memory or 0 for stage in stages)
        parts = {_IN_TIMELINES[name]: nbytes for name, nbytes in timeline.memory_parts(slot).items()}
        usable = [u for stage in stages if (u := plan.stages[stage].usable_memory) is not None]
        resident = {owner: parts[owner] for owner in OWNERS[:3]}
        found.append(
            DeviceMemory(
                plan.stages[rank].devices,
                stages,
                peak,
                min(usable, default=None),
                _adding_up(parts, peak),
                resident,
                tuple(timeline.memory(slot)),
            )
        )
    return tuple(found)


def _adding_up(parts: Mapping[str, int], peak: int) -> dict[str, int]:
    """The parts with activations, and then others, so much larger or smaller that all make the peak."""
    found, excess = dict(parts), sum(parts.values()) - peak
    for owner in _GIVING_WAY:
        less = min(excess, found[owner])
        found[owner] -= less
        excess -= less
    return found
