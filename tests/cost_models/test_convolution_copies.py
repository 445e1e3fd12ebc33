"""Convolutions on a CPU hold what oneDNN copies; measured by torch's profiler of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from convolutions import CONVOLUTIONS, highest, predicted
from torch.profiler import ProfilerActivity, profile

from cost_models.memory.convolution_copies import kernels

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def measured(call: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return highest([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_peak_of_a_convolution_is_that_of_its_copies(name: str) -> None:
    convolution = CONVOLUTIONS[name]
    copies = partial(kernels, threads=torch.get_num_threads())
    for call in (convolution.forward, convolution.backward):
        # Scratch memory of threads is not predicted.
        found = predicted(call("meta"), copies)
        assert 0.88 * measured(call("cpu")) <= found <= 1.03 * measured(call("cpu"))
