"""Values of a sharded graph: every device's part, in whatever layout a reader wants it.

A value that is read in another layout than it was made in passes one node a move. Behind the moves of one that may have
a gradient stands one node `gradient`, which says how its gradients come back (`lower.collectives`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.cleanup import aten
from autopar.lower import collectives
from autopar.lower.strategy_choices import is_tensor
from autopar.sharding.layouts import Placements
from autopar.sharding.mesh import make_mesh
from autopar.sharding.redistribution import Redistribution
from cost_models import Cluster


@dataclass
class DeviceValue:
    """A value of the stage in the new graph."""

    nodes: tuple[fx.Node, ...]  # one a device; one alone: whole, on the first device
    layouts: tuple[Placements, ...] = ()  # of every tensor in it; (): one alone
    wanted: tuple[Placements, ...] = ()  # of their gradients
    floating: bool = False  # may have a gradient
    moved: dict[Any, Any] = field(default_factory=dict)  # what was made of it in other layouts

    @property
    def alone(self) -> bool:
        return not self.layouts


class DeviceValues:
    """Writes the graph of all devices of a mesh."""

    def __init__(self, mesh: tuple[int, ...], size: int) -> None:
        self.graph, self.mesh, self.size = fx.Graph(), mesh, size
        self._cluster = Cluster.preset(f"{size}xH100")  # any will do: the plan has chosen layouts, not ways
        self._grid = make_mesh(mesh, [device.name for device in self._cluster.devices])
        self._ways: dict[tuple[tuple[int, ...], int, bool], Redistribution] = {}
        self.places = [self._grid.place(i) for i in range(size)]
        self.multiple = 1  # sizes that depend on the batch come apart if that is a multiple of this

    def node(
        self,
        op: str,
        target: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
        device: int = 0,
        draw: tuple[int, int] | None = None,
    ) -> fx.Node:
        """`device`: whose it is; `draw`: what `random.drawn_apart` needs to know of a random operator."""
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs or {}), name)
        node.meta = {**(meta or {}), "device": device}
        if draw is not None:
            node.meta["draw"] = draw
        return node

    def items(self, parts: fx.Node, like: fx.Node) -> tuple[fx.Node, ...]:
        """Every device's of a list."""
        return tuple(
            self.node("call_function", operator.getitem, (parts, i), meta=like.meta, device=i) for i in range(self.size)
        )

    def whole_size(self, made: DeviceValue, dim: Any) -> fx.Node:
        """The size of the whole tensor, from what the first device has of it."""
        size = self.node("call_function", aten.sym_size.int, (made.nodes[0], dim))
        if made.alone:
            return size
        rank = made.nodes[0].meta["val"].dim()
        count = self.count(made.layouts[0], dim % rank)
        return size if count == 1 else self.node("call_function", operator.mul, (size, count))

    def count(self, layout: Placements, dim: int) -> int:
        """In how many parts a dimension is."""
        count = 1
        for n, code in zip(self.mesh, layout, strict=True):
            count *= n if code == dim else 1
        return count

    def joined(self, made: DeviceValue, place: int, node: fx.Node) -> fx.Node:
        if ("joined", place) not in made.moved:
            parts = list(made.nodes)
            if not is_tensor(node):
                parts = [self.node("call_function", operator.getitem, (part, place)) for part in parts]
            kwargs = {"layout": made.layouts[place], "gradient": made.wanted[place], "mesh": self.mesh}
            made.moved["joined", place] = self.node(
                "call_function", collectives.joined, (parts,), kwargs, name=f"{node.name}__joined", meta=node.meta
            )
        found: fx.Node = made.moved["joined", place]
        return found

    def read(self, made: DeviceValue, node: fx.Node, layout: Placements, gradient: Placements) -> tuple[fx.Node, ...]:
        """The parts of a tensor in a reader's layout, whose gradients it gives in another."""
        if (layout, gradient) not in made.moved:
            made.moved[layout, gradient] = self._changed(node, made, layout, gradient)
        found: tuple[fx.Node, ...] = made.moved[layout, gradient]
        return found

    def _changed(
        self, node: fx.Node, made: DeviceValue, layout: Placements, gradient: Placements
    ) -> tuple[fx.Node, ...]:
        if made.alone:
            return self.read(self._spread(node, made, layout), node, layout, gradient)
        parts: Any = list(made.nodes)
        result = self._moved(node, made, layout)
        back = self._path(node, gradient, made.wanted[0]) if made.floating else ()
        if made.floating and (result is not None or back):
            given = parts if result is None else result
            ways = {"moves": back, "mesh": self.mesh}
            result = self.node(
                "call_function",
                collectives.gradient,
                (parts, given),
                ways,
                name=f"{node.name}__gradient",
                meta=place_of(node),
            )
        return made.nodes if result is None else self.items(result, node)

    def _spread(self, node: fx.Node, made: DeviceValue, layout: Placements) -> DeviceValue:
        """What is whole on the first device, handed out."""
        if ("spread", layout) not in made.moved:
            kwargs = {"layout": layout, "mesh": self.mesh, "devices": ()}
            self.note_cut(node, layout)
            found = self.node(
                "call_function",
                collectives.spread,
                made.nodes,
                kwargs,
                name=f"{node.name}__spread",
                meta=place_of(node),
            )
            made.moved["spread", layout] = DeviceValue(
                self.items(found, node), (layout,), (collectives.added_up(layout),), may_have_gradient(node.meta["val"])
            )
        parts: DeviceValue = made.moved["spread", layout]
        return parts

    def _moved(self, node: fx.Node, made: DeviceValue, layout: Placements) -> fx.Node | None:
        """The list of parts in another layout, without gradients; None where it is the same."""
        if layout not in made.moved:
            result: Any = None
            for name, axis, dim in self._path(node, made.layouts[0], layout):
                result = self.node(
                    "call_function",
                    collectives.MOVES[name],
                    (list(made.nodes) if result is None else result,),
                    {"axis": axis, "dim": dim, "mesh": self.mesh},
                    name=f"{node.name}__{name}",
                    meta=place_of(node),
                )
            made.moved[layout] = result
        found: fx.Node | None = made.moved[layout]
        return found

    def _path(self, node: fx.Node, before: Placements, after: Placements) -> tuple[collectives.Move, ...]:
        """The moves from a layout to another. Sizes that depend on the batch are taken to come apart."""
        if before == after:
            return ()
        tensor = node.meta["val"]
        shape = tuple(n if isinstance(n, int) else self.size for n in tensor.shape)
        key = (shape, tensor.element_size(), may_have_gradient(tensor))
        if key not in self._ways:
            self._ways[key] = Redistribution(*key[:2], self._grid, self._cluster, partial=key[2])
        way = self._ways[key].path(before, after)
        for move in way:
            self.note_cut(node, move.after)
        return tuple(collectives.move_of(m.axis, m.before, m.after) for m in way)

    def note_cut(self, node: fx.Node, layout: Placements) -> None:
        for dim, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                self.multiple = math.lcm(self.multiple, self.count(layout, dim))


def may_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def place_of(node: fx.Node) -> dict[str, Any]:
    """What export recorded of where a node is in the model's code."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
