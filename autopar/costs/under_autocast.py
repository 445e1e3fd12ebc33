"""What torch.autocast changes in the values of a program: their dtypes, and so the bytes that stages send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.batching import Batching
from autopar.analysis.node_values import look
from cost_models.graphs import device_of, tensors_in
from cost_models.measuring.autocast import Autocast
from cost_models.memory.graph_bytes import GraphBytes


def values_under(autocasts: Mapping[str, Autocast], module: fx.GraphModule, inputs: list[Any]) -> dict[str, Any]:
    """By node, its value for `inputs`, on the meta device; nothing where autocast is off.

    `autocasts`: by type of the devices that the module will run on. It runs where `inputs` are.
    """
    dtype = next((one.dtype for one in autocasts.values() if one.dtype is not None), None)
    if dtype is None:
        return {}
    with Autocast(device_of(inputs).type, dtype).applied():
        return {node.name: value for node, value in look(module, inputs).values.items()}


def with_sizes(counted: GraphBytes, values: Mapping[str, Any]) -> GraphBytes:
    """`counted` with the outputs that have these values.

    What operators keep stays as counted without autocast, whose casts of parameters do not grow with the batch.
    """
    sizes = {
        name: sum(t.numel() * t.element_size() for t in tensors_in(values.get(name, ()))) for name in counted.output
    }
    return replace(counted, output={n: sizes[n] if n in values else nbytes for n, nbytes in counted.output.items()})


def with_dtypes(batching: Batching, values: Mapping[str, Any]) -> Batching:
    """`batching` with shapes in the dtypes of these values."""
    dtypes = {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
    shapes = {name: replace(one, dtype=dtypes.get(name, one.dtype)) for name, one in batching.shapes.items()}
    return replace(batching, shapes=shapes)
