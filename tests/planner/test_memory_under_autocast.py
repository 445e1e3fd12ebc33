"""The peak that a plan states is what its workers hold under the caller's autocast, in whose dtypes they compute."""

from __future__ import annotations

import pytest
import torch
from test_rehearsed_memory import FAMILIES, MAKERS, plan_named

from benchmarks.plan_memory import peaks

# Backwards under autocast cast what they multiply in float32 for a moment; that is not rehearsed.
UNDER = 0.97
OVER = 1.01


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_states_the_peak_of_its_workers_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    make, *cut = FAMILIES[name]
    with torch.autocast("cpu", torch.bfloat16):
        subject = make()
        found = peaks(subject, plan_named("gpipe", *cut), optimizer="adamw", maker=MAKERS["adamw"])
    usual = make()
    in_float32 = peaks(usual, plan_named("gpipe", *cut), optimizer="adamw", maker=MAKERS["adamw"])
    for peak, wider in zip(found, in_float32, strict=True):
        assert UNDER <= peak.ratio <= OVER, f"{name}: {peak}"
        assert peak.stated < wider.stated
