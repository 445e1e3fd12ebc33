"""A small graph beside the pipeline, in the caller's thread: what a loss divides by, or the end of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.analysis.operators import on_device
from autopar.capture.direct_calls import with_direct_calls
from cost_models.graphs import get_attribute


@dataclass(frozen=True)
class PlacedGraph:
    """A graph that runs wherever its inputs are."""

    module: fx.GraphModule
    captured: torch.device  # where its constants are made, and what it copies to the capture's device goes

    def code(self, place: torch.device) -> Callable[..., Any]:
        """The graph's own code (`nn.Module.__call__` takes as long as a small graph) for inputs on `place`."""
        if place not in self._codes:
            self._codes[place] = with_direct_calls(self.on(place)).forward
        return self._codes[place]

    def on(self, place: torch.device) -> fx.GraphModule:
        """The graph for inputs on `place`, to be run operator by operator."""
        return _with_tensors_on(place, on_device(self.module, self.captured, place))

    @cached_property
    def _codes(self) -> dict[torch.device, Callable[..., Any]]:
        return {}


def placeholders_first(graph: fx.Graph) -> None:
    """Put the placeholders of a graph, which were copied among other nodes, before those."""
    placeholders = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in placeholders:
        first.prepend(node)


def _with_tensors_on(place: torch.device, module: fx.GraphModule) -> fx.GraphModule:
    """The graph over tensors of its own, such as weights of classes, that are copied to `place`."""
    attributes = module.graph.find_nodes(op="get_attr")
    values = {node: get_attribute(module, str(node.target)) for node in attributes}
    elsewhere = [node for node, value in values.items() if isinstance(value, torch.Tensor) and value.device != place]
    if not elsewhere:
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, copies)
    for node in elsewhere:
        own, dtype = copies[node], get_attribute(module, str(node.target)).dtype
        readers = list(own.users)
        with graph.inserting_after(own):
            moved = graph.call_function(torch.ops.aten.to.device, (own, place, dtype))
        for reader in readers:
            reader.replace_input_with(own, moved)
    graph.output(result)
    return fx.GraphModule(module, graph)
