"""Blocks as torch.export returns them: what they hold, what they read, and on which devices they change something."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.capture.autocast_answers import place_of_block
from autopar.capture.mode_blocks.calls import called_graph
from cost_models.graphs import get_attribute, may_have_gradient

GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def nested_graph(owner: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """The graph of a block, and what it takes."""
    found = called_graph(owner, node)
    assert found is not None
    return found


def reads_differentiable(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a block reads parameters or activations. Others compute little, such as the angles of rotary embeddings,
    and every layer reads what they return: as one operator, they leave the search for shards a smaller problem."""
    return any(_is_differentiable(module, source) for source in node.all_input_nodes)


def _is_differentiable(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(get_attribute(module, str(node.target)), nn.Parameter)
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and may_have_gradient(value)


def place_of(owner: fx.GraphModule, node: fx.Node) -> torch.device | None:
    """Where the first autocast in a block applies; None if it has none."""
    if node.target is AUTOCAST and (place := place_of_block(str(node.args[0]))):
        return torch.device(place)
    nested, _ = nested_graph(owner, node)
    places = (place_of(nested, one) for one in nested.graph.nodes if one.target in (GRAD_MODE, AUTOCAST))
    return next((place for place in places if place is not None), None)
