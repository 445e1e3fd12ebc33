"""Values of a sharded graph: the parts of all devices, in the placements that each reader needs.

A value passes one node per step of its redistribution. Behind the steps of a value that may have a gradient stands one
node `gradient`, which holds the steps of its gradient (`lower.collectives`):

    x__0, x__1 -- all_gather --.-- gradient(moves=[reduce_scatter]) -- getitem 0, getitem 1 -- readers
         `---------------------'

A node `kept_as_shards` follows the gathers of what the backward gathers again: parameters that are stored in parts, and
activations where the plan says so (`lower.regather`). Each reader of such a parameter gathers it for itself, so that it
is whole only while that reader runs.

The steps are those of the plan (`TensorRedistribution`), which the search priced. Values that the plan says nothing
about take the steps in which a device sends the fewest bytes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.capture.cleanup import aten
from autopar.lower import collectives
from autopar.lower.regather import kept_as_shards
from autopar.lower.strategy_choices import is_tensor
from autopar.sharding.layouts import Placements, fits
from autopar.sharding.redistribution import RedistributionTable, before_gathers, bytes_sent
from autopar.sharding.stage_sharding import Passage, TensorRedistribution
from cost_models.graphs import may_have_gradient

TRANSFER = "tensor"
"""In `meta` of a node that moves a tensor between devices, or takes a device's part of that: which one."""

DEVICE = "device"
"""In `meta` of a node of one device: its number on the mesh. Transfers, and what one device does for all, lack it."""

PARTS = "parts"
"""In `meta` of a size that one device reads for all: the names of all devices' tensors that it could be read from."""

GROUP = "rerun"
"""In `meta` of an operator that runs again for its backward: the number of its group (`lower.rerun_groups`)."""

KEPT = "kept"
"""In `meta` of an operator of such a group whose result is kept: its kind (`analysis.kept_products`)."""


@dataclass
class DeviceValue:
    """A value of the stage in the new graph."""

    nodes: tuple[fx.Node, ...]  # one a device; one alone: whole, on the first device
    layouts: tuple[Placements, ...] = ()  # of every tensor in it; (): one alone
    wanted: tuple[Placements, ...] = ()  # of their gradients
    floating: bool = False  # may have a gradient
    moved: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # in other layouts; the first of a key says how

    @property
    def alone(self) -> bool:
        return not self.layouts


class DeviceValues:
    """Writes the graph of all devices of a mesh."""

    def __init__(self, mesh: tuple[int, ...], size: int, *, regather: bool = False) -> None:
        """`regather`: activations that are gathered are kept as shards, as parameters are (`lower.regather`)."""
        self.graph, self.mesh, self.size, self.regather = fx.Graph(), mesh, size, regather
        self._tables: dict[tuple[tuple[int, ...], int, bool], RedistributionTable] = {}
        self.places = list(itertools.product(*map(range, mesh)))  # of every device on the mesh
        self.multiple = 1  # sizes that depend on the batch can be cut evenly if they are a multiple of this

    def node(
        self,
        op: str,
        target: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
        device: int | None = None,
        draw: tuple[int, int] | None = None,
    ) -> fx.Node:
        """`device`: whose it is; None: it belongs to no device by itself, and the first one has it. `draw`: what
        `random.drawn_apart` needs to know of a random operator."""
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs or {}), name)
        node.meta = dict(meta or {})
        if device is not None:
            node.meta[DEVICE] = device
        if draw is not None:
            node.meta["draw"] = draw
        return node

    def items(self, parts: fx.Node, like: fx.Node, *, transfer: bool = True) -> tuple[fx.Node, ...]:
        """Every device's of a list. `transfer`: that a transfer of `like` has made, not its operator."""
        meta = _moved_meta(like) if transfer else like.meta
        return tuple(
            self.node("call_function", operator.getitem, (parts, i), meta=meta, device=i) for i in range(self.size)
        )

    def whole_size(self, made: DeviceValue, dim: Any) -> fx.Node:
        """The size of the whole tensor, from what the first device has of it."""
        size = self.node("call_function", aten.sym_size.int, (made.nodes[0], dim))
        if made.alone:
            return size
        size.meta[PARTS] = tuple(node.name for node in made.nodes)
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
                parts = [
                    self.node("call_function", operator.getitem, (part, place), device=i)
                    for i, part in enumerate(parts)
                ]
            kwargs = {"layout": made.layouts[place], "gradient": made.wanted[place], "mesh": self.mesh}
            made.moved["joined", place] = self.node(
                "call_function",
                collectives.joined,
                (parts,),
                kwargs,
                name=f"{node.name}__joined",
                meta=_moved_meta(node),
            )
        found: fx.Node = made.moved["joined", place]
        return found

    def read(self, made: DeviceValue, node: fx.Node, layout: Placements, gradient: Placements) -> tuple[fx.Node, ...]:
        """The parts of a tensor in a reader's placements, whose gradients it gives in others; by the default steps."""
        if made.alone:
            made = self._spread(node, made, layout)
        key = ("read", layout, gradient)
        if key not in made.moved or (node.op == "get_attr" and made.layouts[0] != layout):
            forward = self._default(node, made.layouts[0], layout)
            backward = self._default(node, gradient, made.wanted[0]) if made.floating else ()
            made.moved[key] = self._passed(node, made, forward, backward).nodes
        found: tuple[fx.Node, ...] = made.moved[key]
        return found

    def read_as_planned(
        self, made: DeviceValue, node: fx.Node, plan: TensorRedistribution, gradient: Placements
    ) -> tuple[fx.Node, ...]:
        """The parts of a tensor at the end of the planned steps, where the reader's gradients come as `gradient`.

        Every reader takes its own steps, as the search priced them; the shared ones are taken once.
        """
        shared, own = plan.shared, plan.own
        if made.alone:
            # Each device gets at once what it would otherwise take of the whole tensor by local steps.
            if shared.moves:
                shared = _without_local_start(shared)
            else:
                own = _without_local_start(own)
                shared = Passage(own.forward[:1])
            made = self._spread(node, made, shared.forward[0])
        if shared.moves and own.backward:
            if ("shared", shared) not in made.moved:
                made.moved["shared", shared] = self._passed(node, made, shared.forward, shared.backward)
            made, shared = made.moved["shared", shared], Passage(own.forward[:1])
        key = ("planned", plan, gradient)
        if key not in made.moved:
            backward = own.backward or (self._default(node, gradient, made.wanted[0]) if made.floating else ())
            made.moved[key] = self._passed(node, made, (*shared.forward, *own.forward[1:]), backward).nodes
        found: tuple[fx.Node, ...] = made.moved[key]
        return found

    def can_pass(self, made: DeviceValue, node: fx.Node, plan: TensorRedistribution) -> bool:
        """Whether the planned steps start at this value, and all of them cut it evenly."""
        starts = made.alone or made.layouts[0] == plan.shared.forward[0]
        shape = [n if isinstance(n, int) else self.size for n in node.meta["val"].shape]
        return starts and all(fits(placements, shape, self.mesh) for placements in plan.placements)

    def _passed(
        self, node: fx.Node, made: DeviceValue, forward: Sequence[Placements], backward: Sequence[Placements]
    ) -> DeviceValue:
        """The value after the steps `forward`. Its gradients pass `backward`, and what is left to `made.wanted`."""
        result = self._moved(node, made, tuple(forward))
        moves: list[collectives.Move] = []
        if made.floating and backward:
            # Local: the plan's last placements repeat along an axis what the maker counts once (Replicate -> Partial).
            rest = self._default(node, backward[-1], made.wanted[0])
            moves = [*self._moves(node, backward), *self._moves(node, rest)]
        if made.floating and (result is not None or moves):
            parts = list(made.nodes)
            args = (parts, parts if result is None else result)
            name = f"{node.name}__gradient"
            kwargs = {"moves": tuple(moves), "mesh": self.mesh}
            result = self.node("call_function", collectives.gradient, args, kwargs, name=name, meta=place_of(node))
        nodes = made.nodes if result is None else self.items(result, node)
        return DeviceValue(nodes, (forward[-1],), (backward[0] if backward else made.wanted[0],), made.floating)

    def _spread(self, node: fx.Node, made: DeviceValue, layout: Placements) -> DeviceValue:
        """The parts of a value that is whole on the first device."""
        if ("spread", layout) not in made.moved:
            kwargs = {"layout": layout, "mesh": self.mesh, "devices": ()}
            self.note_cut(node, layout)
            name = f"{node.name}__spread"
            found = self.node("call_function", collectives.spread, made.nodes, kwargs, name=name, meta=place_of(node))
            made.moved["spread", layout] = DeviceValue(
                self.items(found, node), (layout,), (collectives.added_up(layout),), may_have_gradient(node.meta["val"])
            )
        parts: DeviceValue = made.moved["spread", layout]
        return parts

    def _moved(self, node: fx.Node, made: DeviceValue, passed: tuple[Placements, ...]) -> fx.Node | None:
        """The list of parts after steps without gradients; None where there are none."""
        key = ("steps", *passed)
        gathers_parameter = node.op == "get_attr" and before_gathers(passed) < len(passed) - 1
        if key not in made.moved or gathers_parameter:  # each reader gathers a parameter for itself
            moves = self._moves(node, passed)
            # Gathered parameters always count as gathered again, as ZeRO-3 does.
            first = before_gathers(passed) if self.regather or node.op == "get_attr" else len(moves)
            result: Any = None
            shards: Any = None
            for number, (name, axis, dim) in enumerate(moves):
                before = list(made.nodes) if result is None else result
                if number == first:
                    shards = before
                result = self.node(
                    "call_function",
                    collectives.MOVES[name],
                    (before,),
                    {"axis": axis, "dim": dim, "mesh": self.mesh},
                    name=f"{node.name}__{name}",
                    meta=place_of(node),
                )
            if shards is not None:
                result = self.node(
                    "call_function",
                    kept_as_shards,
                    (shards, result),
                    {"moves": tuple(moves[first:]), "mesh": self.mesh},
                    name=f"{node.name}__kept_as_shards",
                    meta=place_of(node),
                )
            made.moved[key] = result
        found: fx.Node | None = made.moved[key]
        return found

    def _moves(self, node: fx.Node, passed: Sequence[Placements]) -> list[collectives.Move]:
        """One move for every step between placements that follow each other."""
        for placements in passed[1:]:
            self.note_cut(node, placements)
        return [collectives.move_between(before, after) for before, after in itertools.pairwise(passed)]

    def _default(self, node: fx.Node, before: Placements, after: Placements) -> tuple[Placements, ...]:
        """The placements from one to another in which a device sends the fewest bytes.

        Sizes that depend on the batch count as the mesh's size, which every mesh axis divides."""
        if before == after:
            return (before,)
        tensor = node.meta["val"]
        shape = tuple(n if isinstance(n, int) else self.size for n in tensor.shape)
        key = (shape, tensor.element_size(), may_have_gradient(tensor))
        if key not in self._tables:
            self._tables[key] = RedistributionTable(*key[:2], self.mesh, bytes_sent(self.mesh), partial=key[2])
        return (before, *(step.after for step in self._tables[key].path(before, after)))

    def note_cut(self, node: fx.Node, layout: Placements) -> None:
        for dim, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                self.multiple = math.lcm(self.multiple, self.count(layout, dim))


def _without_local_start(passage: Passage) -> Passage:
    """The passage from its first collective on; its end if it has none."""
    steps = itertools.pairwise(passage.forward)
    local = itertools.takewhile(lambda step: collectives.move_between(*step)[0] in collectives.LOCAL, steps)
    return Passage(passage.forward[sum(1 for _ in local) :], passage.backward)


def _moved_meta(node: fx.Node) -> dict[str, Any]:
    """Of the same value, made by a transfer."""
    return {key: value for key, value in node.meta.items() if key not in (GROUP, KEPT)} | {TRANSFER: node.name}


def place_of(node: fx.Node) -> dict[str, Any]:
    """The tensor that a transfer moves, and what export recorded of where it is in the model's code."""
    recorded: dict[str, Any] = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}
    return {TRANSFER: node.name} | recorded
