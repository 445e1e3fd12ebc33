"""Random small models, clusters and limits, over which the laws of planning are tested."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Cluster, InfeasibleError, Plan


@dataclass(frozen=True)
class Case:
    """A model, a batch, and a cluster."""

    sizes: tuple[int, ...]  # features between the layers
    batch: int  # samples of `rows` rows each
    rows: int
    node: str
    nodes: int
    memory: float | None  # bytes on each device
    step: bool  # train_step, with the loss in the last stage

    def model(self) -> nn.Module:
        with torch.device("meta"):
            layers = [nn.Linear(a, b) for a, b in itertools.pairwise(self.sizes)]
            return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU()))).train()

    @property
    def cluster(self) -> Cluster:
        return Cluster.preset(self.node, self.nodes)

    def plan(self, cluster: Cluster | None = None, **options: Any) -> Plan | None:
        """None where nothing fits."""
        with torch.device("meta"):
            x, y = torch.empty(self.batch, self.rows, self.sizes[0]), torch.empty(self.batch, self.rows, self.sizes[-1])
        call: dict[str, Any] = {"example_args": (x,), "memory_limit": self.memory, "optimizer": "adamw"}
        if self.step:
            call |= {"target": y, "loss_fn": nn.functional.mse_loss}
        try:
            return autopar.plan(self.model(), cluster or self.cluster, **(call | options))
        except InfeasibleError:
            return None


def step_time(plan: Plan | None) -> float:
    if plan is None:
        return float("inf")
    assert plan.predicted_step_time is not None
    return plan.predicted_step_time


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.sampled_from([256, 1024, 2048, 4096]), min_size=2, max_size=5))
    parameters = sum(a * b for a, b in itertools.pairwise(sizes))
    # Of what the model needs with its gradients and optimizer state on one device.
    share = draw(st.sampled_from([None, None, 0.3, 0.6, 1.2]))
    return Case(
        tuple(sizes),
        draw(st.sampled_from([4, 8, 12, 31])),
        draw(st.sampled_from([16, 128, 1024])),
        draw(st.sampled_from(["2xT4", "3xT4", "4xT4", "5xT4", "2xA100-80", "4xH100"])),
        draw(st.integers(1, 2)),
        None if share is None else share * 16 * parameters,
        draw(st.booleans()),
    )
