"""Convolutions on a CPU hold what oneDNN copies; measured by torch's profiler of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from convolutions import CONVOLUTIONS, WITHOUT_AMX, Convolution, highest, predicted
from torch.profiler import ProfilerActivity, profile

from cost_models.memory.convolution_copies import BACKWARD, CONVOLUTION, kernels

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
CAPABILITY = torch.backends.cpu.get_cpu_capability()


def measured(call: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return highest([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])


def check(convolution: Convolution) -> None:
    copies = partial(kernels, threads=torch.get_num_threads())
    for call in (convolution.forward, convolution.backward):
        # Scratch memory of threads is not predicted.
        found, expected = predicted(call("meta"), copies), measured(call("cpu"))
        assert 0.88 * expected <= found <= 1.03 * expected, call.__name__


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_peak_of_a_convolution_is_that_of_its_copies(name: str) -> None:
    check(CONVOLUTIONS[name])


@pytest.mark.skipif("AVX2" not in CAPABILITY, reason="needs a processor with AVX2 at best")
@pytest.mark.parametrize("name", WITHOUT_AMX)
def test_the_peak_of_a_convolution_in_half_precision_is_that_of_its_copies(name: str) -> None:
    check(WITHOUT_AMX[name])


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a processor with AMX")
@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_in_half_precision_on_amx_copies_its_result_twice(groups: int) -> None:
    call = Convolution(16, 16, 24, 3, 1, 32, groups=groups, dtype=torch.bfloat16).forward
    assert predicted(call("meta"), partial(kernels, threads=2)) == measured(call("cpu"))


@pytest.mark.slow
@pytest.mark.skipif("512" not in CAPABILITY, reason="needs a processor with AVX-512")
def test_the_kernels_for_avx2_are_predicted_as_well() -> None:
    """Those of this file that need AVX2, in a process that is limited to it."""
    names = "test_the_peak_of_a_convolution_is_that_of_its_copies or half_precision_is"
    limited = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names]
    done = subprocess.run(command, env=os.environ | limited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("strided", [False, True])
def test_a_transposed_convolution_has_the_copies_of_its_mirror_image(strided: bool) -> None:
    """Its forward is the backward of the input of a convolution with the same weight."""
    weight = torch.zeros(32, 16, 2, 2, device="meta")
    small, large = (torch.zeros(8, channels, 16, 16, device="meta") for channels in (32, 16))
    if strided:
        large = torch.zeros(8, 16, 32, 32, device="meta")
    else:
        small = torch.zeros(8, 32, 15, 15, device="meta")
    where = [2 if strided else 1] * 2, [0, 0], [1, 1]
    forward = kernels(CONVOLUTION, (small, weight, None, *where, True, [0, 0], 1), large, threads=2)
    backward = kernels(
        BACKWARD, (small, large, weight, None, *where, False, [0, 0], 1, [True, False, False]), None, threads=2
    )
    assert forward == backward
    assert forward[0].before > 0
