"""The sentence of a plan says what the devices of its meshes share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Cluster, Plan
from autopar.plan.stage import Stage
from autopar.report.plan_report.axis_words import Axis, axes_of, words
from autopar.report.plan_report.verdict import verdict
from autopar.sharding.stage_sharding import StageSharding
from autopar.sharding.strategies import OperatorPlacements

ENCODER = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


class Recurrent(nn.Module):
    """A GRU and an attention, which have the samples in the second dimension of some tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(x)
        return y + self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "degrees", "said"),
    [
        pytest.param(
            ENCODER,
            {"data": 8},
            "Data parallel 8, 1 micro-batch of 2 samples on each replica.",
            marks=pytest.mark.exhaustive,
        ),
        (ENCODER, {"data": 8, "zero": 3}, "Data parallel 8, ZeRO-3, 1 micro-batch"),
        (ENCODER, {"tensor": 2, "data": 4, "zero": 1}, "Data parallel 4 x tensor parallel 2, ZeRO-1, 1 micro-batch"),
        (Recurrent(), {"data": 8}, "Data parallel 8, 1 micro-batch of 2 samples on each replica."),
        pytest.param(
            Recurrent(), {"data": 8, "zero": 1}, "Data parallel 8, ZeRO-1, 1 micro-batch", marks=pytest.mark.exhaustive
        ),
        (
            nn.LSTM(32, 32, batch_first=True),
            {"tensor": 2, "data": 4},
            "Data parallel 4 x 2 devices that all do the same, 1 micro-batch of 4 samples on each replica.",
        ),
        (
            nn.TransformerEncoder(ENCODER, 2, enable_nested_tensor=False),
            {"pipeline": 2, "data": 4, "micro_batch": 2},
            "Data parallel 4 x pipeline parallel 2 (1f1b), 2 micro-batches of 2 samples on each replica.",
        ),
    ],
)
def test_a_plan_by_hand_is_called_what_it_was_made_as(model: nn.Module, degrees: dict[str, Any], said: str) -> None:
    call = (torch.randn(16, 8, 32),)
    plan = Plan.by_hand(model, Cluster.preset("8xH100"), example_args=call, **degrees)
    assert verdict(plan).startswith(said)


def staged(*operators: tuple[str, OperatorPlacements | None], replicas: int = 1, **more: Any) -> Plan:
    keys = tuple(f"net/{name}#{i}" for i, (name, _) in enumerate(operators))
    cut = tuple((key, one) for key, (_, one) in zip(keys, operators, strict=True) if one is not None)
    devices = tuple(f"cuda:{i}" for i in range(2 * replicas))
    stage = Stage(devices, keys, 0.01, 0.02, sharding=StageSharding((2,), ("x",), cut))
    return Plan((stage,), more.pop("n_microbatches", replicas), "1f1b", more.pop("batch_size", 8), devices, **more)


SAMPLES = OperatorPlacements(((0,), (-1,)), ((0,),))
COLUMNS = OperatorPlacements(((-1,), (0,)), ((2,),))
TABLE = OperatorPlacements(((-1,), (0,)), ((0,),))
ROWS = OperatorPlacements(((2,), (1,)), ((-2,),))
SECOND = OperatorPlacements(((1,), (-1,)), ((1,),))
TO_SECOND = OperatorPlacements(((0,),), ((1,),))


@pytest.mark.parametrize(
    ("operators", "axis", "said"),
    [
        ([("linear", SAMPLES)] * 4, Axis(2, 4, 0, 0, 0), "data parallel 2"),
        ([("linear", COLUMNS), ("linear", ROWS)], Axis(2, 0, 2, 0, 0), "tensor parallel 2"),
        ([("linear", SECOND)], Axis(2, 0, 0, 1, 0), "sequence parallel 2"),
        ([("transpose", TO_SECOND), ("linear", SECOND)], Axis(2, 1, 0, 0, 0), "data parallel 2"),
        ([("linear", None), ("relu", SAMPLES)], Axis(2, 0, 0, 0, 1), "2 devices that all do the same"),
        (
            [("linear", SAMPLES)] * 2 + [("linear", COLUMNS)],
            Axis(2, 2, 1, 0, 0),
            "mostly data parallel 2 (tensor parallel in 33% of the matrix products)",
        ),
        (
            [("linear", SAMPLES), ("embedding", TABLE), ("linear", SECOND)],
            Axis(2, 2, 0, 1, 0),
            "mostly data parallel 2 (sequence parallel in 33% of the matrix products)",
        ),
    ],
)
def test_products_decide_what_an_axis_is_called(operators: list[Any], axis: Axis, said: str) -> None:
    assert axes_of(staged(*operators).stages) == [axis]
    assert words(axis) == said


def test_products_that_every_replica_does_are_named() -> None:
    moved = [("transpose", TO_SECOND), ("linear", SECOND), ("linear", SAMPLES), ("linear", SAMPLES)]
    assert "every replica does" not in verdict(staged(*moved))
    whole = staged(*moved, ("linear", None))
    stage = whole.stages[0]
    assert stage.sharding is not None
    gathered = dataclasses.replace(stage.sharding, mesh=(2, 1), axes=("x", "y"), strategies=())
    assert axes_of([stage, dataclasses.replace(stage, sharding=gathered)]) is None, "two meshes share no words"
    assert axes_of(whole.stages) == [Axis(2, 3, 0, 0, 1)]


@pytest.mark.parametrize(
    ("microbatches", "batch", "said"),
    [
        (6, 12, "2 micro-batches of 1 sample on each replica"),
        (5, 10, "5 micro-batches in all"),
    ],
)
def test_micro_batches_are_those_of_a_replica_where_they_are_even(microbatches: int, batch: int, said: str) -> None:
    plan = staged(
        *[("linear", SAMPLES), ("linear", SAMPLES), ("linear", COLUMNS)],
        replicas=3,
        n_microbatches=microbatches,
        batch_size=batch,
    )
    assert verdict(plan).endswith(f"{said}.")
