"""A stage's graph -> the graph of all devices of its mesh: every device's operators, and every transfer in between.

```
    x (whole, on the first device) -> spread -> linear__0 --.              .-> gelu__0 -> ...  joined -> output (whole,
                                            `-> linear__1 --+- all_reduce -+-> gelu__1 -> ...            on the first)
```
What an operator reads in another layout than it was made in passes one node a move. Behind the moves of a value that
may have a gradient stands one node `gradient`, which says how its gradients come back (`lower.collectives`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import is_getitem
from autopar.errors import PlanError
from autopar.hooks import is_hook_point
from autopar.lower import collectives
from autopar.lower.choices import Choice, Choices, is_tensor, operands_of, ordered_kwargs, tensors_of
from autopar.lower.writes import operator_name_of, without_writes
from autopar.operators import get_attribute, is_random, written_arguments
from autopar.sharding import special
from autopar.sharding.assignment import StageSharding, layout_text
from autopar.sharding.layouts import PARTIAL, REPLICATE, Layout, fits
from autopar.sharding.local import local_call, sizes_place, takes_sizes
from autopar.sharding.mesh import make_mesh
from autopar.sharding.redistribution import Redistribution
from autopar.sharding.strategies import Strategy
from autopar.tidy import aten
from cost_models import Cluster


@dataclass(frozen=True)
class Piece:
    """What one device has of a parameter or buffer."""

    attribute: str  # name in the stage's graph
    name: str  # of the whole one
    device: int  # place in the stage's group
    layout: Layout = ()  # over the mesh; (): all of it
    mesh: tuple[int, ...] = ()
    place: tuple[int, ...] = ()  # of the device on it
    first: bool = True  # of those who have the same


@dataclass
class _Made:
    """A value of the stage in the new graph."""

    nodes: tuple[fx.Node, ...]  # one a device; one alone: whole, on the first device
    layouts: tuple[Layout, ...] = ()  # of every tensor in it; (): one alone
    wanted: tuple[Layout, ...] = ()  # of their gradients
    floating: bool = False  # may have a gradient
    moved: dict[Any, Any] = field(default_factory=dict)  # what was made of it in other layouts

    @property
    def alone(self) -> bool:
        return not self.layouts


def shard(
    graph: fx.Graph,
    source: fx.GraphModule,
    sharding: StageSharding,
    keys: Mapping[str, str],
    storages: Mapping[str, frozenset[int]],
) -> tuple[fx.Graph, tuple[Piece, ...]]:
    """The graph of all devices, and what they hold of the parameters that the stage's graph reads.

    `source` has the parameters. `keys`: of operators, by name of the node; `storages`: keys of the memory of every
    value, by name. Raises PlanError for layouts that an operator or a parameter cannot have.
    """
    return _Builder(graph, source, sharding, keys, storages).build()


class _Builder:
    def __init__(
        self,
        graph: fx.Graph,
        source: fx.GraphModule,
        sharding: StageSharding,
        keys: Mapping[str, str],
        storages: Mapping[str, frozenset[int]],
    ) -> None:
        self.source, self.sharding, self.mesh, self.size = source, sharding, sharding.mesh, sharding.size
        self.old, self.new = graph, fx.Graph()
        for node in graph.nodes:
            if node.op == "get_attr" and isinstance(t := get_attribute(source, str(node.target)), torch.Tensor):
                node.meta = {"val": t, **node.meta}
        self.made: dict[fx.Node, _Made] = {}
        self.pieces: list[Piece] = []
        whole = without_writes(graph, storages)
        self.choices = Choices(sharding, keys, whole)
        self.buffers = self._written_buffers(whole)
        self.stored = self._stored()
        self.draws = 0
        self.cluster = Cluster.preset(f"{self.size}xH100")  # any will do: the plan has chosen layouts, not ways
        self.grid = make_mesh(self.mesh, [device.name for device in self.cluster.devices])
        self.places = [self.grid.place(i) for i in range(self.size)]

    def build(self) -> tuple[fx.Graph, tuple[Piece, ...]]:
        for node in self.old.nodes:
            self._add(node)
        return self.new, tuple(self.pieces)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _written_buffers(self, whole: set[fx.Node]) -> dict[str, Layout]:
        """Layouts of buffers that operators write: their readers', so that what is written is what is stored."""
        readers: dict[str, list[tuple[fx.Node, Layout]]] = {}
        written = set()
        for node in self.old.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            written |= {str(a.target) for a in written_arguments(node) if a.op == "get_attr"}
            choice = self.choices.of(node)
            for operand, place in zip(operands_of(node), choice.operands, strict=True):
                if operand.op == "get_attr":
                    readers.setdefault(str(operand.target), []).append((node, choice.strategy.inputs[place]))
        layouts = {}
        for name in written:
            found = {layout for _, layout in readers[name]}
            kept = found.pop() if len(found) == 1 else None
            if kept is None or PARTIAL in kept:
                kept = (REPLICATE,) * len(self.mesh)
                self.choices.leave({node for node, _ in readers[name]})
            layouts[name] = kept
        return layouts

    def _stored(self) -> dict[int, Layout]:
        """By the id of the tensor: one that has two names is stored in one way."""
        found = {}
        for name, stored in self.sharding.stored.items():
            try:
                tensor = get_attribute(self.source, name)
            except AttributeError:
                continue  # of another stage, or an input
            if PARTIAL in stored.layout or not fits(stored.layout, tensor.shape, self.mesh):
                raise PlanError(
                    f"{name} of shape {tuple(tensor.shape)} cannot be stored as '{layout_text(stored.layout)}' on a "
                    f"mesh of shape {self.mesh}: its dimensions must come apart evenly"
                )
            found[id(tensor)] = stored.layout
        return found

    def _add_parameter(self, node: fx.Node, tensor: torch.Tensor) -> None:
        name, whole = str(node.target), (REPLICATE,) * len(self.mesh)
        layout = self.buffers.get(name) or self.stored.get(id(tensor), whole)
        nodes = []
        for i in range(self.size):
            piece = Piece(f"{name}__{i}", name, i, layout, self.mesh, self.places[i], self._is_first(layout, i))
            if piece not in self.pieces:
                self.pieces.append(piece)
            nodes.append(self._node("get_attr", piece.attribute, name=f"{node.name}__{i}", meta=node.meta, device=i))
        # The whole gradient is what all pieces' gradients add up to, each where the piece belongs.
        wanted = tuple(PARTIAL if code == REPLICATE else code for code in layout)
        trained = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        self.made[node] = _Made(tuple(nodes), (layout,), (wanted,), trained)

    def _is_first(self, layout: Layout, device: int) -> bool:
        return all(i == 0 for i, code in zip(self.places[device], layout, strict=True) if code == REPLICATE)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.made[node] = _Made((self._node("placeholder", str(node.target), name=node.name, meta=node.meta),))
        elif node.op == "output":
            self.new.output(fx.node.map_arg(node.args[0], self._alone))
        elif node.op == "get_attr" and isinstance(t := get_attribute(self.source, str(node.target)), torch.Tensor):
            self._add_parameter(node, t)
        elif node.op == "get_attr":
            self.made[node] = _Made((self._node("get_attr", str(node.target), name=node.name, meta=node.meta),))
        elif is_getitem(node) and isinstance(source := node.args[0], fx.Node) and not is_tensor(source):
            self._add_item(node, self.made[source])
        elif node.target is aten.sym_size.int:
            tensor, dim = node.args
            assert isinstance(tensor, fx.Node)
            self.made[node] = _Made((self._whole_size(self.made[tensor], dim),))
        elif self._is_done_once(node):
            self._add_once(node)
        else:
            self._add_operator(node)

    def _is_done_once(self, node: fx.Node) -> bool:
        """Numbers, and what is more than an operator: a hooked module's call, a module, a block of its own."""
        if node.op == "call_module" or is_hook_point(node) or not tensors_of(node):
            return True
        return any(self.made[n].alone and n.op == "get_attr" for n in node.all_input_nodes)

    def _add_once(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._alone)
        draw = self._draw() if is_random(node, self.source) else None
        new = self._node(node.op, node.target, args, kwargs, name=node.name, meta=node.meta, draw=draw)
        self.made[node] = _Made((new,))
        if node.op == "call_module":
            child = self.source.get_submodule(str(node.target))
            names = [f"{node.target}.{name}" for name, _ in [*child.named_parameters(), *child.named_buffers()]]
            self.pieces += [Piece(name, name, 0) for name in names]

    def _add_item(self, node: fx.Node, source: _Made) -> None:
        place: Any = node.args[1]
        nodes = tuple(
            self._node(
                "call_function",
                operator.getitem,
                (whole, place),
                name=self._name(node, i, source.alone),
                meta=node.meta,
                device=i,
            )
            for i, whole in enumerate(source.nodes)
        )
        if source.alone:
            self.made[node] = _Made(nodes)
            return
        assert isinstance(node.args[0], fx.Node)
        before = [v for v in node.args[0].meta["val"][:place] if isinstance(v, torch.Tensor)]
        layout, wanted = source.layouts[len(before)], source.wanted[len(before)]
        self.made[node] = _Made(nodes, (layout,), (wanted,), _is_floating(node))

    def _add_operator(self, node: fx.Node) -> None:
        choice = self.choices.of(node)
        strategy, operands = choice.strategy, operands_of(node)
        read = [
            self._read(n, strategy.inputs[place], strategy.gradient_in(place))
            for n, place in zip(operands, choice.operands, strict=True)
        ]
        shape = self._local_shape(node, strategy.outputs[0])
        calls = [self._local(node, [nodes[i] for nodes in read], shape) for i in range(self.size)]
        if strategy.special:
            together = self._node(
                "call_function",
                run_special,
                (strategy.special, calls),
                {"strategy": dataclasses.astuple(strategy), "mesh": self.mesh},
                name=f"{node.name}__together",
            )
            nodes = self._items(together, node)
        else:
            draws = self._draws(node, choice)
            nodes = tuple(
                self._node("call_function", *call, name=f"{node.name}__{i}", meta=node.meta, device=i, draw=draw)
                for i, (call, draw) in enumerate(zip(calls, draws, strict=True))
            )
        if strategy.scale != 1:
            nodes = tuple(
                self._node("call_function", collectives.scaled, (n, strategy.scale), meta=node.meta, device=i)
                for i, n in enumerate(nodes)
            )
        wanted = tuple(strategy.gradient_out(i) for i in range(len(strategy.outputs)))
        self.made[node] = _Made(nodes, strategy.outputs, wanted, _is_floating(node))

    def _local(
        self, node: fx.Node, operands: Sequence[fx.Node], shape: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """One device's call."""
        following = iter(operands)
        args, kwargs = fx.node.map_arg(
            (node.args, ordered_kwargs(node)), lambda n: next(following) if is_tensor(n) else self._alone(n)
        )
        if shape:
            return local_call(node.target, args, kwargs, shape)
        return node.target, args, kwargs

    def _draws(self, node: fx.Node, choice: Choice) -> list[tuple[int, int] | None]:
        """(number of the operator, of the part): devices with different parts draw different random numbers."""
        if not is_random(node, self.source):
            return [None] * self.size
        number, _ = self._draw()
        parts: dict[tuple[int, ...], int] = {}
        keys = [tuple(i for i, cut in zip(place, choice.cuts, strict=True) if cut) for place in self.places]
        return [(number, parts.setdefault(key, len(parts))) for key in keys]

    def _draw(self) -> tuple[int, int]:
        self.draws += 1
        return self.draws, 0

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _whole_size(self, made: _Made, dim: Any) -> fx.Node:
        """The size of the whole tensor, from what the first device has of it."""
        size = self._node("call_function", aten.sym_size.int, (made.nodes[0], dim))
        if made.alone:
            return size
        rank = made.nodes[0].meta["val"].dim()
        count = self._count(made.layouts[0], dim % rank)
        return size if count == 1 else self._node("call_function", operator.mul, (size, count))

    def _count(self, layout: Layout, dim: int) -> int:
        """In how many parts a dimension is."""
        count = 1
        for n, code in zip(self.mesh, layout, strict=True):
            count *= n if code == dim else 1
        return count

    def _local_shape(self, node: fx.Node, layout: Layout) -> list[Any]:
        """Sizes of a device's part of the result, where its call needs them: numbers where they do not depend on the
        batch, else computed from what the call itself says."""
        if not isinstance(node.target, torch._ops.OpOverload) or not takes_sizes(node.target):
            return []
        found = []
        for d, size in enumerate(tensors_of(node)[0].shape):
            count = self._count(layout, d)
            given: Any = size if isinstance(size, int) else self._given_size(node, d)
            if isinstance(given, fx.Node) and count > 1:
                given = self._node("call_function", collectives.share, (given, count))
            elif isinstance(given, int) and given > 0:
                given //= count
            found.append(given)
        return found

    def _given_size(self, node: fx.Node, dim: int) -> Any:
        """The whole size along a dimension as a call says it: a node, -1, or None where it says nothing."""
        place, rank = sizes_place(node.target), tensors_of(node)[0].dim()
        sizes: Any = node.args[place] if place is not None else None
        if sizes is not None:
            sizes = [None] * (rank - len(sizes)) + list(sizes)
        elif operator_name_of(node) == "unflatten":
            start, inner = node.args[1] % (rank - len(node.args[2]) + 1), list(node.args[2])  # type: ignore[operator, arg-type]
            sizes = [None] * start + inner + [None] * (rank - start - len(inner))
        elif operator_name_of(node) == "narrow":
            sizes = [node.args[3]] * rank
        else:  # like another tensor
            other = self.made[node.args[1]]  # type: ignore[index]
            return self._whole_size(other, dim)
        return self._alone(sizes[dim]) if isinstance(sizes[dim], fx.Node) else sizes[dim]

    # -- layouts ----------------------------------------------------------------------------------------------------

    def _alone(self, node: fx.Node) -> Any:
        """A value on the first device, whole."""
        made = self.made[node]
        if made.alone:
            return made.nodes[0]
        if not is_tensor(node):
            return [self._joined(made, place, node) for place in range(len(made.layouts))]
        return self._joined(made, 0, node)

    def _joined(self, made: _Made, place: int, node: fx.Node) -> fx.Node:
        if ("joined", place) not in made.moved:
            parts = list(made.nodes)
            if not is_tensor(node):
                parts = [self._node("call_function", operator.getitem, (part, place)) for part in parts]
            kwargs = {"layout": made.layouts[place], "gradient": made.wanted[place], "mesh": self.mesh}
            made.moved["joined", place] = self._node(
                "call_function", collectives.joined, (parts,), kwargs, name=f"{node.name}__joined", meta=node.meta
            )
        found: fx.Node = made.moved["joined", place]
        return found

    def _read(self, node: fx.Node, layout: Layout, gradient: Layout) -> tuple[fx.Node, ...]:
        """The parts of a tensor in a reader's layout, whose gradients it gives in another."""
        made = self.made[node]
        if (layout, gradient) not in made.moved:
            made.moved[layout, gradient] = self._changed(node, made, layout, gradient)
        found: tuple[fx.Node, ...] = made.moved[layout, gradient]
        return found

    def _changed(self, node: fx.Node, made: _Made, layout: Layout, gradient: Layout) -> tuple[fx.Node, ...]:
        if made.alone:
            kwargs = {"layout": layout, "gradient": gradient, "mesh": self.mesh, "devices": ()}
            found = self._node(
                "call_function", collectives.spread, (made.nodes[0],), kwargs, name=f"{node.name}__spread"
            )
            return self._items(found, node)
        parts: Any = list(made.nodes)
        result = self._moved(node, made, layout)
        back = self._path(node, gradient, made.wanted[0]) if made.floating else ()
        if made.floating and (result is not None or back):
            given = parts if result is None else result
            ways = {"moves": back, "mesh": self.mesh}
            result = self._node(
                "call_function", collectives.gradient, (parts, given), ways, name=f"{node.name}__gradient"
            )
        return made.nodes if result is None else self._items(result, node)

    def _moved(self, node: fx.Node, made: _Made, layout: Layout) -> fx.Node | None:
        """The list of parts in another layout, without gradients; None where it is the same."""
        if layout not in made.moved:
            result: Any = None
            for name, axis, dim in self._path(node, made.layouts[0], layout):
                result = self._node(
                    "call_function",
                    collectives.MOVES[name],
                    (list(made.nodes) if result is None else result,),
                    {"axis": axis, "dim": dim, "mesh": self.mesh},
                    name=f"{node.name}__{name}",
                )
            made.moved[layout] = result
        found: fx.Node | None = made.moved[layout]
        return found

    def _path(self, node: fx.Node, before: Layout, after: Layout) -> tuple[collectives.Move, ...]:
        """The moves from a layout to another. Sizes that depend on the batch are taken to come apart."""
        if before == after:
            return ()
        tensor = node.meta["val"]
        shape = tuple(n if isinstance(n, int) else self.size for n in tensor.shape)
        ways = self._redistribution(shape, tensor.element_size(), tensor.is_floating_point())
        return tuple(collectives.move_of(m.axis, m.before, m.after) for m in ways.path(before, after))

    @cache  # noqa: B019 - a builder lives as long as its stage is lowered
    def _redistribution(self, shape: tuple[int, ...], itemsize: int, floating: bool) -> Redistribution:
        return Redistribution(shape, itemsize, self.grid, self.cluster, partial=floating)

    # -- graph ------------------------------------------------------------------------------------------------------

    def _items(self, parts: fx.Node, like: fx.Node) -> tuple[fx.Node, ...]:
        """Every device's of a list."""
        return tuple(
            self._node("call_function", operator.getitem, (parts, i), meta=like.meta, device=i)
            for i in range(self.size)
        )

    def _node(
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
        """`device`: whose it is; `draw`: see `_draws`."""
        node = self.new.create_node(op, target, tuple(args), dict(kwargs or {}), name)
        node.meta = {**(meta or {}), "device": device}
        if draw is not None:
            node.meta["draw"] = draw
        return node

    def _name(self, node: fx.Node, device: int, alone: bool) -> str:
        return node.name if alone else f"{node.name}__{device}"


def run_special(name: str, calls: list[Any], *, strategy: Any, mesh: tuple[int, ...]) -> list[Any]:
    """An operator that the devices do together (`sharding.special`)."""
    found: list[Any] = special.run(name, calls, strategy=Strategy(*strategy), mesh=mesh)
    return found


def _is_floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() or t.is_complex() for t in tensors_of(node))
