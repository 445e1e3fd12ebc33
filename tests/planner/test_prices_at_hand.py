"""A plan for devices at hand has one price, whether its micro-batches were asked for or found."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar import Plan
from autopar.analysis.example import capture_example
from autopar.costs.measured import measure_costs
from autopar.planner.arrangement import Conditions
from autopar.planner.predict import predict_plan
from cost_models.hardware.devices import parse_devices


@pytest.mark.parametrize("split", [{"0": 0}, {"0": 0, "4": 1}], ids=["one device", "pipeline"])
@pytest.mark.parametrize("m", [2, 3])
def test_a_plan_takes_as_long_whatever_number_of_micro_batches_its_costs_were_measured_for(
    split: dict[str, int], m: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
    x, devices = torch.randn(16, 32), parse_devices(["cpu", "cpu"])
    example = capture_example(model, devices, (x,), {}, loss_fn=functional.mse_loss, target=x)
    plan = Plan.from_split(split, n_microbatches=m)
    prices = [
        predict_plan(plan, example, measure_costs(example, devices, n_microbatches=asked), Conditions())
        for asked in (None, m, 2)
    ]
    seconds = {price.predicted_step_time for price in prices}
    assert len(seconds) == 1
