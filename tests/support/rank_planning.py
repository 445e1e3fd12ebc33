"""What ranks do in tests of planning. Each returns what its test compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.runtime.ranks.world import joined
from cost_models.measuring.process_links import measure_process_links, probe_process_links


def plans(options: dict[str, Any] | None = None) -> tuple[str, str, list[str]]:
    """What `autopar.plan` and a first call of `parallelize` plan, as JSON, and the notes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(32, 256)
    given: dict[str, Any] = {"example_args": (x,), "target": x, "loss_fn": functional.mse_loss, **(options or {})}
    made = autopar.plan(model, **given)
    pm = autopar.parallelize(model, **given)
    assert pm.plan is not None
    return made.to_json(), pm.plan.to_json(), list(made.notes)


def links(hosts: list[int]) -> tuple[dict[Any, Any], bool, float]:
    """Measured links, and how far a message is from them right after."""
    world = joined()
    assert world is not None
    found = measure_process_links(hosts, world.control)
    return dict(found.links), found.shared, probe_process_links(hosts, found, world.control)
