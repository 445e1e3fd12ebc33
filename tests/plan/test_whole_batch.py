"""A plan given for more micro-batches than the model allows runs with one, and its notes say why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        found: torch.Tensor = self.b(hidden - hidden.mean(0))
        return found.relu()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.norm(self.a(x)))
        return found


PLAN = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "samples meet": (Centred, {}, "mixes samples"),
    "exact norms": (Normed, {"batch_norm": "exact"}, "batch_norm='exact' and 'norm' normalises"),
}


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_in_the_plan(case: str, priced: bool) -> None:
    make, options, why = CASES[case]
    model, x = make(), torch.randn(8, 8)
    example = {"example_args": (x,)} if priced else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if priced:
            plan = autopar.plan(model, ["cpu", "cpu"], plan=PLAN, **options, **example)
        else:
            pm = autopar.parallelize(model, ["cpu", "cpu"], plan=PLAN, **options)
            pm(x)
            assert pm.plan is not None
            plan = pm.plan
            pm.close()
    assert plan.n_microbatches == 1
    (note,) = [note for note in plan.notes if note.startswith("one micro-batch: ")]
    assert why in note
    assert not [note for note in plan.with_decision("", n_microbatches=2).notes if "one micro-batch" in note]
