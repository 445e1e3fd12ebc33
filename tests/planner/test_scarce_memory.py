"""Where memory is scarce: the search finds the fastest of all plans whose rehearsed steps fit, or a faster one."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Cluster, Plan

SAME = 1.001
WIDTH, WORDS = 256, 2048


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (f(y).view(*x.shape[:2], 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(x.shape))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def words() -> tuple[nn.Module, dict[str, Any]]:
    """A layer of attention between an embedding and a head that are larger, and what to plan it with."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Attention(), nn.Linear(WIDTH, WORDS, bias=False))
        tokens = torch.empty(12, 64, dtype=torch.long)
    options = {"example_args": (tokens,), "target": tokens, "loss_fn": loss_of, "optimizer": "sgd"}
    return model, options | {"launch": "compiled", "overlap": "serial"}


def with_faster_links(cluster: Cluster, times: float) -> Cluster:
    return dataclasses.replace(
        cluster, intra_node=dataclasses.replace(cluster.intra_node, line_rate=times * cluster.intra_node.line_rate)
    )


def every_split(model: nn.Module, cluster: Cluster, options: dict[str, Any]) -> list[Plan]:
    """All plans of two stages that are cut between modules, under 1F1B with 12 micro-batches, priced."""
    found = []
    for cut, devices, again in itertools.product(
        ("1.norm", "1.q", "1.o", "2"), itertools.permutations(("0.0:H100", "0.1:T4")), ((), (0,))
    ):
        split = {"0": 0, cut: 1}
        made = Plan.from_split(split, n_microbatches=12, schedule="1f1b", devices=devices, recompute=again)
        found.append(autopar.plan(model, cluster, plan=made, **options))
    return found


def peak(plan: Plan) -> float:
    return max(stage.peak_memory or 0 for stage in plan.stages)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.0, 4.0])
def test_no_plan_that_fits_is_faster_than_the_one_found(times: float) -> None:
    """Such limits are tight: hardly any plan fits, and the formula alone does not tell which."""
    model, options = words()
    cluster = with_faster_links(Cluster.preset("1xH100+1xT4"), times)
    by_hand = every_split(model, cluster, options)
    peaks = sorted({peak(plan) for plan in by_hand})
    for limit in peaks[:2]:
        fastest = min(plan.predicted_step_time for plan in by_hand if peak(plan) <= limit)
        found = autopar.plan(model, cluster, memory_limit=limit, **options)
        assert peak(found) <= limit
        assert found.predicted_step_time <= fastest * SAME
