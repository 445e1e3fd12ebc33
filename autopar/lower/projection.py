"""A stage on a mesh -> what one of the mesh's devices does of it, as the program of a process of its own (a rank).

```
   the graph of all devices (sharded.py)                      device 1's projection
   x -> spread -> linear__0 --.              .-> gelu__0      x -> spread -> linear__1 -> all_reduce -> gelu__1
               `-> linear__1 --+- all_reduce -+-> gelu__1
```
The projection keeps the device's own operators. A transfer takes the device's own tensor in the place of the list of
all, and becomes a collective over the device's line of the mesh (rank_transfers.py). What the first device does for all
(sizes, operators that stay whole) every rank does for itself, from the same values.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import fx

from autopar.analysis.operators import written_arguments
from autopar.errors import PlanError
from autopar.lower import collectives, rank_transfers
from autopar.lower.device_values import DEVICE, PARTS
from autopar.lower.regather import kept_as_shards
from autopar.lower.sharded import run_special
from autopar.lower.stages import StageProgram
from cost_models.graphs import get_attribute

_LISTS = {*collectives.MOVES.values(), collectives.gradient, collectives.spread, kept_as_shards, run_special}


def project(stage: StageProgram, device: int, mesh: Sequence[int], groups: Sequence[str]) -> StageProgram:
    """The part of `stage` that device number `device` of its mesh (of this shape) does, with that device's pieces.

    `groups`: names of the process groups of the device's lines, one per mesh axis. Raises PlanError for a module that
    runs as a whole inside the mesh.
    """
    place = tuple(int(i) for i in np.unravel_index(device, mesh))
    where = {"mesh": tuple(mesh), "place": place, "groups": tuple(groups)}
    pieces = tuple(dataclasses.replace(piece, device=0) for piece in stage.pieces if piece.device == device)
    graph = _Projection(stage, device, where).build()
    root = {str(n.target): get_attribute(stage.module, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    module = fx.GraphModule(root, graph, class_name=f"Stage{stage.index}Device{device}")
    return dataclasses.replace(stage, module=module, pieces=pieces)


class _Projection:
    def __init__(self, stage: StageProgram, device: int, where: dict[str, Any]) -> None:
        self.stage, self.device, self.where = stage, device, where
        self.graph, self.new = fx.Graph(), dict[fx.Node, fx.Node]()  # a list of all devices' tensors -> the own one
        self.by_name = {node.name: node for node in stage.module.graph.nodes}

    def build(self) -> fx.Graph:
        for node in self.stage.module.graph.nodes:
            if self._is_own(node):
                self.new[node] = self._projected(node)
        self._remove_unused()
        return self.graph

    def _is_own(self, node: fx.Node) -> bool:
        return node.meta.get(DEVICE, self.device) == self.device

    def _projected(self, node: fx.Node) -> fx.Node:
        if node.op == "call_module":
            raise PlanError(
                f"stage {self.stage.index} runs module '{node.target}' as a whole inside a mesh, which one process a "
                "device does not do; give the stage one device, or max_shards=1"
            )
        target: Any = node.target
        if target in collectives.MOVES.values():
            move = (target.__name__, node.kwargs["axis"], node.kwargs["dim"])
            return self._call(rank_transfers.moved, node, (self._own(node.args[0]),), move=move)
        if target is kept_as_shards:
            parts, result = map(self._own, node.args)
            return self._call(rank_transfers.kept_as_shards, node, (parts, result), moves=node.kwargs["moves"])
        if target is collectives.gradient:
            parts, result = map(self._own, node.args)
            return self._call(rank_transfers.gradient, node, (parts, result), moves=node.kwargs["moves"])
        if target is collectives.spread:
            return self._call(rank_transfers.spread, node, (self._own(node.args[0]),), layout=node.kwargs["layout"])
        if target is collectives.joined:
            layouts = {name: node.kwargs[name] for name in ("layout", "gradient")}
            return self._call(rank_transfers.joined, node, (self._own(node.args[0]),), **layouts)
        if target is run_special:
            name, calls = node.args
            call = self._mapped(calls[self.device])  # type: ignore[index]
            return self._call(rank_transfers.together, node, (call,), name=name, strategy=node.kwargs["strategy"])
        if target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in _LISTS:
            return self._own(node.args[0])
        if PARTS in node.meta:
            own = self.by_name[node.meta[PARTS][self.device]]
            copied = self.graph.node_copy(node, lambda _: self.new[own])
        else:
            copied = self.graph.node_copy(node, lambda n: self.new[n])
        copied.meta.pop(DEVICE, None)
        return copied

    def _own(self, parts: Any) -> fx.Node:
        """This device's of a list of all devices' tensors, or of a node that gives such a list."""
        return self.new[parts if isinstance(parts, fx.Node) else parts[self.device]]

    def _mapped(self, values: Any) -> Any:
        return fx.node.map_arg(values, lambda n: self.new[n])

    def _call(self, function: Any, node: fx.Node, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        new = self.graph.create_node("call_function", function, args, {**kwargs, **self.where}, node.name)
        new.meta = {key: value for key, value in node.meta.items() if key != DEVICE}
        return new

    def _remove_unused(self) -> None:
        """Sizes that only other devices need. Writes stay, and so do the stage's inputs."""
        for node in reversed(self.graph.nodes):
            if not node.users and node.op in ("call_function", "get_attr") and not written_arguments(node):
                self.graph.erase_node(node)
