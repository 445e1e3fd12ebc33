"""How often a device's rates are timed."""

from __future__ import annotations

import pytest
import torch

from cost_models import parse_devices
from cost_models.measuring import peak_rates


@pytest.mark.parametrize(("longest", "runs"), [(0.0, 2), (60.0, 1 + peak_rates.ROUNDS)])
def test_what_takes_too_long_is_not_run_again(longest: float, runs: int) -> None:
    ran: list[None] = []
    assert peak_rates._best(lambda: ran.append(None), torch.device("cpu"), longest) >= 0
    assert len(ran) == runs


@pytest.mark.parametrize(("slower", "kept"), [(100.0, False), (2.0, False), (0.5, True)])
def test_dtypes_slower_than_float32_are_left_out(monkeypatch: pytest.MonkeyPatch, slower: float, kept: bool) -> None:
    """However often their products ran."""
    clock, product = [0.0], torch.mm

    def timed(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        clock[0] += 1.0 if a.dtype == torch.float32 else slower
        return product(a, b, out=out)

    monkeypatch.setattr(peak_rates.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(peak_rates, "_PRODUCT", {"cpu": 4})
    monkeypatch.setattr(peak_rates, "_copy_rate", lambda place: 1.0)
    monkeypatch.setattr(peak_rates, "_launch_seconds", lambda place: 1.0)
    monkeypatch.setattr(torch, "mm", timed)
    (device,) = parse_devices(["cpu"])
    found = peak_rates.measure_spec(device).peak_flops
    assert found["float32"] == 2 * 4**3
    assert ("bfloat16" in found) is kept
