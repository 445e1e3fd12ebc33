"""Seconds of a call of any code, repeated on a device at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from cost_models.hardware.devices import synchronize
from cost_models.measuring.core_waiting import waited_for_core
from cost_models.measuring.repeats import until_two_agree

_FEWEST, _MOST = 3, 20  # calls of a measurement, whatever the budget
_MEASUREMENTS = 4  # at most, until two agree


def call_seconds(call: Callable[[], object], place: torch.device, budget: float = 0.1) -> float:
    """Seconds until the device has done all of `call()`, the median of several, after one that does not count.

    `budget`: s for the calls of one measurement; measurements are repeated until two agree. Time in which the thread
    waited for a core does not count.
    """
    first = _once(call, place)
    n = max(_FEWEST, min(_MOST, round(budget / max(first, 1e-9))))

    def measured() -> float:
        # Disturbances only ever add time: of an even number of calls, the lower of the middle two.
        return statistics.median_low([_once(call, place) for _ in range(n)])

    return until_two_agree(measured(), measured, float, _MEASUREMENTS)[0]


def _once(call: Callable[[], object], place: torch.device) -> float:
    synchronize(place)
    start, waited = time.perf_counter(), waited_for_core()
    call()
    synchronize(place)
    waited = waited_for_core() - waited
    return time.perf_counter() - start - waited
