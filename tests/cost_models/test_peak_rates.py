"""What a device at hand reaches: the dtypes in which it is worth computing."""

from __future__ import annotations

import pytest
import torch

from cost_models import parse_devices
from cost_models.measuring import peak_rates
from cost_models.measuring.peak_rates import measure_spec


def test_large_products_are_timed_only_in_dtypes_that_small_ones_are_fast_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that emulates float16 takes a hundred times as long."""
    small, large = peak_rates._TRIAL, peak_rates._PRODUCT["cpu"]
    rates = {
        (torch.float32, small): 8e9,
        (torch.float32, large): 1e11,
        (torch.float16, small): 1e9,
        (torch.bfloat16, small): 3e9,
        (torch.bfloat16, large): 2e11,
    }
    monkeypatch.setattr(peak_rates, "_product_rate", lambda _, dtype, n: rates[dtype, n])
    (device,) = parse_devices(["cpu"])
    assert measure_spec(device).peak_flops == {"float32": 1e11, "bfloat16": 2e11}
    rates[torch.bfloat16, large] = 0.9e11
    assert measure_spec(device).peak_flops == {"float32": 1e11}
