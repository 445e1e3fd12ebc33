"""Peaks on meshes include the gradient of a micro-batch besides the sum over micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import Cluster, Plan
from autopar.costs.operator_cost import Weight
from cost_models import Precision

WEIGHT = Weight(4000, True, (1000,), parts=2)


@pytest.mark.parametrize(
    ("weight", "nbytes"),
    [
        (WEIGHT, 2000),
        (WEIGHT._replace(trained=False), 0),
        (WEIGHT._replace(gradient_parts=2), 2000),
        (WEIGHT._replace(gradient_parts=4), 0),  # scattered: it counts as gathered
        (WEIGHT._replace(precision=Precision(parameter=2, gradient=2, master=4)), 1000),
        (WEIGHT._replace(precision=Precision(parameter=2, gradient=4, master=4)), 0),  # added to in its kernel
    ],
)
def test_it_has_the_bytes_of_what_a_device_adds_up(weight: Weight, nbytes: float) -> None:
    assert weight.fresh_gradient == nbytes


def peak(micro_batch: int, training: bool = True) -> int:
    model, x = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), torch.zeros(8, 2048)
    with torch.set_grad_enabled(training):
        plan = Plan.by_hand(
            model, Cluster.preset("2xH100"), example_args=(x,), optimizer="sgd", tensor=2, micro_batch=micro_batch
        )
    (found,) = (stage.peak_memory for stage in plan.stages)
    assert found is not None
    return found


def test_a_peak_has_it_where_several_micro_batches_train() -> None:
    half = 2048 * 2048 * 4 // 2  # bytes on each device
    assert peak(4) - peak(8) == pytest.approx(half, rel=0.02)  # less of activations, which are small
    assert peak(4, training=False) - peak(8, training=False) < 0.01 * half
