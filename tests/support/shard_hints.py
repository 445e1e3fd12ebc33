"""Models with shard hints, planned on one mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar import Layout, PlanError
from autopar.capture.program import Program, capture
from autopar.planner.hint_constraints.shard_hints import microbatch_on_meta, resolve_sharding
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, choose
from autopar.sharding.mesh import make_mesh
from cost_models import Cluster

MESH = Layout((2, 2, 2), ("dp", "sp", "mp"))


class Calling(nn.Module):
    """What a function makes of the input, and of a weight."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape or (8, 8)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def chosen(model: nn.Module, x: torch.Tensor, n_devices: int = 4) -> tuple[Program, Sharding]:
    program = capture(model, (x,), {})
    resolved = resolve_sharding(program, model, n_devices)
    module, inputs, rows = microbatch_on_meta(program, 1)
    cluster = Cluster.preset(f"{n_devices}xH100")
    names = [cluster.devices[i].name for i in resolved.order]
    mesh = make_mesh(resolved.shape, names, resolved.names)
    return program, choose(ShardingTask(module, inputs, rows, cluster), mesh, constraints=resolved.constraints)


def refusal(model: nn.Module, x: torch.Tensor, n_devices: int = 4, n_microbatches: int = 1) -> str:
    with pytest.raises(PlanError) as raised:
        resolve_sharding(capture(model, (x,), {}), model, n_devices, n_microbatches)
    return str(raised.value)


def cut_into(layout: tuple[int, ...], found: Sharding, dims: int) -> tuple[int, ...]:
    pairs = list(zip(layout, found.mesh.shape, strict=True))
    return tuple(math.prod(n for code, n in pairs if code == d) for d in range(dims))
