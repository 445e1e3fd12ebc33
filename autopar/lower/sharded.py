"""A stage's graph -> the graph of all devices of its mesh: every device's operators, and every transfer in between.

```
    x (whole, on the first device) -> spread -> linear__0 --.              .-> gelu__0 -> ...  joined -> output (whole,
                                            `-> linear__1 --+- all_reduce -+-> gelu__1 -> ...            on the first)
```
A tensor that an operator reads in other placements than it was made in passes the steps of the plan, one node each
(`lower.device_values`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from autopar.analysis.operators import is_random, written_arguments
from autopar.capture.cleanup import aten
from autopar.capture.module_hooks import is_hook_point
from autopar.capture.program import is_getitem
from autopar.capture.uncaptured import uncaptured
from autopar.errors import PlanError
from autopar.lower import collectives
from autopar.lower.device_values import DeviceValue, DeviceValues, place_of
from autopar.lower.in_place_writes import operator_name_of, without_writes
from autopar.lower.strategy_choices import (
    StrategyChoice,
    StrategyChoices,
    is_tensor,
    operands_of,
    ordered_kwargs,
    tensors_of,
)
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements, fits, slices
from autopar.sharding.local import local_call, sizes_place, takes_sizes
from autopar.sharding.parallel_operators import operators as special
from autopar.sharding.stage_sharding import StageSharding, TensorRedistribution, layout_text
from autopar.sharding.strategies import Strategy
from cost_models.graphs import get_attribute, may_have_gradient


@dataclass(frozen=True)
class Piece:
    """One device's part of a parameter or buffer."""

    attribute: str  # name in the stage's graph
    name: str  # of the whole one
    device: int  # place in the stage's group
    layout: Placements = ()  # over the mesh; (): all of it
    mesh: tuple[int, ...] = ()
    place: tuple[int, ...] = ()  # of the device on it
    first: bool = True  # of the devices that have the same part

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view, without history, of the device's part."""
        return tensor.detach() if self.whole else tensor.detach()[self.entries(tensor)]

    @cached_property
    def whole(self) -> bool:
        """Whether the device has all of it."""
        return all(code < 0 for code in self.layout)

    def entries(self, tensor: torch.Tensor) -> tuple[slice, ...] | None:
        """The entries of the device's part; None for all of them."""
        if self.whole:
            return None
        return slices(self.layout, tensor.shape, self.mesh, self.place)


@dataclass(frozen=True)
class Sharded:
    """A stage's graph on a mesh."""

    graph: fx.Graph  # of all devices
    pieces: tuple[Piece, ...]  # what they hold of the parameters that the stage's graph reads
    multiple: int = 1  # the number of samples in a micro-batch must be a multiple of this to be cut evenly
    undivided: tuple[str, ...] = ()  # operators that every device does whole: they cannot be cut as planned


def shard(
    graph: fx.Graph,
    source: fx.GraphModule,
    sharding: StageSharding,
    keys: Mapping[str, str],
    storages: Mapping[str, frozenset[int]],
    *,
    of_other_call: bool = False,
) -> Sharded:
    """The stage on all devices of its mesh.

    `source` has the parameters. `keys`: of operators, by name of the node; `storages`: keys of the memory of every
    value, by name. `of_other_call`: see `StrategyChoices`. Raises PlanError for layouts that an operator or a
    parameter cannot have.
    """
    return _Builder(graph, source, sharding, keys, storages, of_other_call).build()


class _Builder:
    def __init__(
        self,
        graph: fx.Graph,
        source: fx.GraphModule,
        sharding: StageSharding,
        keys: Mapping[str, str],
        storages: Mapping[str, frozenset[int]],
        of_other_call: bool,
    ) -> None:
        self.source, self.sharding, self.mesh, self.size = source, sharding, sharding.mesh, sharding.size
        self.old, self.parts = graph, DeviceValues(sharding.mesh, sharding.size, regather=sharding.regather)
        for node in graph.nodes:
            if node.op == "get_attr" and isinstance(t := get_attribute(source, str(node.target)), torch.Tensor):
                node.meta = {"val": t, **node.meta}
        self.made: dict[fx.Node, DeviceValue] = {}
        self.pieces: dict[str, Piece] = {}  # by attribute
        seen = without_writes(graph, storages)
        self.choices = StrategyChoices(sharding, keys, seen, of_other_call=of_other_call)
        self.keys = keys
        # A stage starts from clones of what it overwrites (`lower.stages`). Without writes, the clones are not needed.
        self.spare = {n for n in graph.nodes if n.target is aten.clone.default and n.name not in keys and n not in seen}
        self.buffers = self._written_buffers()
        self.stored = self._stored()
        self.draws = 0

    def build(self) -> Sharded:
        for node in self.old.nodes:
            self._add(node)
        pieces, undivided = tuple(self.pieces.values()), tuple(self.choices.undivided)
        return Sharded(self.parts.graph, pieces, self.parts.multiple, undivided)

    # -- parameters -------------------------------------------------------------------------------------------------

    def _written_buffers(self) -> dict[str, Placements]:
        """Layouts of buffers that operators write: they are stored as they are read."""
        readers: dict[str, list[tuple[fx.Node, Placements]]] = {}
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

    def _stored(self) -> dict[int, Placements]:
        """By id of the tensor: a tensor with two names is stored once."""
        found = {}
        for name, stored in self.sharding.stored.items():
            try:
                tensor = get_attribute(self.source, name)
            except AttributeError:
                continue  # of another stage, or an input
            if PARTIAL in stored.layout or not fits(stored.layout, tensor.shape, self.mesh):
                raise PlanError(
                    f"{name} of shape {tuple(tensor.shape)} cannot be stored as '{layout_text(stored.layout)}' on a "
                    f"mesh of shape {self.mesh}: the numbers of parts must divide its dimensions"
                )
            found[id(tensor)] = stored.layout
        return found

    def _add_parameter(self, node: fx.Node, tensor: torch.Tensor) -> None:
        name, whole = str(node.target), (REPLICATE,) * len(self.mesh)
        layout = self.buffers.get(name) or self.stored.get(id(tensor), whole)
        if any(has_sparse_gradient(user) for user in node.users):
            layout = whole  # which cannot be cut
        nodes = []
        for i in range(self.size):
            key = f"{name}__{i}"
            self.pieces[key] = Piece(key, name, i, layout, self.mesh, self.parts.places[i], self._is_first(layout, i))
            nodes.append(self.parts.node("get_attr", key, name=f"{node.name}__{i}", meta=node.meta, device=i))
        # The whole gradient is what all pieces' gradients add up to, each where the piece belongs.
        wanted = collectives.added_up(layout)
        trained = isinstance(tensor, nn.Parameter) and may_have_gradient(tensor)
        self.made[node] = DeviceValue(tuple(nodes), (layout,), (wanted,), trained)

    def _is_first(self, layout: Placements, device: int) -> bool:
        return all(i == 0 for i, code in zip(self.parts.places[device], layout, strict=True) if code == REPLICATE)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.made[node] = DeviceValue(
                (self.parts.node("placeholder", str(node.target), name=node.name, meta=node.meta),)
            )
        elif node.op == "output":
            self.parts.graph.output(fx.node.map_arg(node.args[0], self._output))
        elif node.op == "get_attr" and isinstance(t := get_attribute(self.source, str(node.target)), torch.Tensor):
            self._add_parameter(node, t)
        elif node.op == "get_attr":
            self.made[node] = DeviceValue(
                (self.parts.node("get_attr", str(node.target), name=node.name, meta=node.meta),)
            )
        elif is_getitem(node) and isinstance(source := node.args[0], fx.Node) and not is_tensor(source):
            self._add_item(node, self.made[source])
        elif node.target is aten.sym_size.int:
            tensor, dim = node.args
            assert isinstance(tensor, fx.Node)
            self.made[node] = DeviceValue((self.parts.whole_size(self.made[tensor], dim),))
        elif node in self.spare:
            self.made[node] = self.made[node.all_input_nodes[0]]
        elif self._is_done_once(node):
            self._add_once(node)
        else:
            self._add_operator(node)

    def _is_done_once(self, node: fx.Node) -> bool:
        """Whether the first device runs a node for all: hooked, whole and opaque modules, nested graphs, numbers."""
        if node.op == "call_module" or is_hook_point(node) or uncaptured(node) or not tensors_of(node):
            return True
        return any(self.made[n].alone and n.op == "get_attr" for n in node.all_input_nodes)

    def _add_once(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._alone)
        draw = self._draw() if is_random(node, self.source) else None
        new = self.parts.node(node.op, node.target, args, kwargs, name=node.name, meta=node.meta, draw=draw)
        self.made[node] = DeviceValue((new,))
        if node.op == "call_module":
            child = self.source.get_submodule(str(node.target))
            names = [f"{node.target}.{name}" for name, _ in [*child.named_parameters(), *child.named_buffers()]]
            self.pieces |= {name: Piece(name, name, 0) for name in names}

    def _add_item(self, node: fx.Node, source: DeviceValue) -> None:
        place: Any = node.args[1]
        nodes = tuple(
            self.parts.node(
                "call_function",
                operator.getitem,
                (whole, place),
                name=node.name if source.alone else f"{node.name}__{i}",
                meta=node.meta,
                device=None if source.alone else i,
            )
            for i, whole in enumerate(source.nodes)
        )
        if source.alone:
            self.made[node] = DeviceValue(nodes)
            return
        assert isinstance(node.args[0], fx.Node)
        before = [v for v in node.args[0].meta["val"][:place] if isinstance(v, torch.Tensor)]
        layout, wanted = source.layouts[len(before)], source.wanted[len(before)]
        self.made[node] = DeviceValue(nodes, (layout,), (wanted,), _is_floating(node))

    def _add_operator(self, node: fx.Node) -> None:
        choice = self.choices.of(node)
        strategy, operands = choice.strategy, operands_of(node)
        read = [
            self._read(n, strategy.inputs[place], strategy.gradient_in(place), self.keys.get(node.name))
            for n, place in zip(operands, choice.operands, strict=True)
        ]
        shape = self._local_shape(node, strategy.outputs[0])
        calls = [self._local(node, [nodes[i] for nodes in read], shape) for i in range(self.size)]
        if strategy.special:
            together = self.parts.node(
                "call_function",
                run_special,
                (strategy.special, calls),
                {"strategy": dataclasses.astuple(strategy), "mesh": self.mesh},
                name=f"{node.name}__together",
                meta={k: v for k, v in node.meta.items() if k != "val"},
            )
            nodes = self.parts.items(together, node, transfer=False)
        else:
            draws = self._draws(node, choice)
            nodes = tuple(
                self.parts.node("call_function", *call, name=f"{node.name}__{i}", meta=node.meta, device=i, draw=draw)
                for i, (call, draw) in enumerate(zip(calls, draws, strict=True))
            )
        if strategy.scale != 1:
            nodes = tuple(
                self.parts.node("call_function", collectives.scaled, (n, strategy.scale), meta=node.meta, device=i)
                for i, n in enumerate(nodes)
            )
        wanted = tuple(strategy.gradient_out(i) for i in range(len(strategy.outputs)))
        self.made[node] = DeviceValue(nodes, strategy.outputs, wanted, _is_floating(node))

    def _read(
        self, tensor: fx.Node, layout: Placements, gradient: Placements, reader: str | None
    ) -> tuple[fx.Node, ...]:
        """A tensor for the operator with key `reader`: by the steps of the plan, which the search priced. Where the
        plan has none, or starts elsewhere (this batch cannot be cut as planned), by the default steps."""
        made = self.made[tensor]
        planned = self._planned(tensor, layout, gradient, reader)
        if planned is not None:
            return self.parts.read_as_planned(made, tensor, planned, gradient)
        return self.parts.read(made, tensor, layout, gradient)

    def _planned(
        self, tensor: fx.Node, layout: Placements, gradient: Placements, reader: str | None
    ) -> TensorRedistribution | None:
        if reader is None:
            return None
        name = str(tensor.target) if tensor.op == "get_attr" else self.keys.get(tensor.name, str(tensor.target))
        for one in self.sharding.redistributions_of.get((name, reader), ()):
            ends = one.own.forward[-1] == layout and (one.own.backward or (gradient,))[0] == gradient
            if ends and self.parts.can_pass(self.made[tensor], tensor, one):
                return one
        return None

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

    def _draws(self, node: fx.Node, choice: StrategyChoice) -> list[tuple[int, int] | None]:
        """(number of the operator, of the part): devices with different parts draw different random numbers."""
        if not is_random(node, self.source):
            return [None] * self.size
        number, _ = self._draw()
        parts: dict[tuple[int, ...], int] = {}
        keys = [tuple(i for i, cut in zip(place, choice.cuts, strict=True) if cut) for place in self.parts.places]
        return [(number, parts.setdefault(key, len(parts))) for key in keys]

    def _draw(self) -> tuple[int, int]:
        self.draws += 1
        return self.draws, 0

    # -- sizes ------------------------------------------------------------------------------------------------------

    def _local_shape(self, node: fx.Node, layout: Placements) -> list[Any]:
        """Sizes of a device's part of the result, where its call needs them: numbers where they do not depend on the
        batch, else computed from what the call itself says."""
        if not isinstance(node.target, torch._ops.OpOverload) or not takes_sizes(node.target):
            return []
        found = []
        self.parts.note_cut(node, layout)
        for d, size in enumerate(tensors_of(node)[0].shape):
            count = self.parts.count(layout, d)
            given: Any = size if isinstance(size, int) else self._given_size(node, d)
            if isinstance(given, fx.Node) and count > 1:
                given = self.parts.node("call_function", collectives.share, (given, count, d), meta=place_of(node))
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
            return self.parts.whole_size(other, dim)
        return self._alone(sizes[dim]) if isinstance(sizes[dim], fx.Node) else sizes[dim]

    # -- layouts ----------------------------------------------------------------------------------------------------

    def _output(self, node: fx.Node) -> Any:
        """A value that leaves the stage, whole. What the model returns takes the planned steps to the caller."""
        whole = (REPLICATE,) * len(self.mesh)
        planned = self._planned(node, whole, whole, "") if is_tensor(node) and not self.made[node].alone else None
        if planned is None:
            return self._alone(node)
        nodes = self.parts.read_as_planned(self.made[node], node, planned, whole)
        return self.parts.joined(DeviceValue(nodes, (whole,), (whole,)), 0, node)

    def _alone(self, node: fx.Node) -> Any:
        """A value on the first device, whole."""
        made = self.made[node]
        if made.alone:
            return made.nodes[0]
        if not is_tensor(node):
            return [self.parts.joined(made, place, node) for place in range(len(made.layouts))]
        return self.parts.joined(made, 0, node)


def run_special(name: str, calls: list[Any], *, strategy: Any, mesh: tuple[int, ...]) -> list[Any]:
    """An operator that the devices do together (`sharding.parallel_operators`)."""
    found: list[Any] = special.run(name, calls, strategy=Strategy(*strategy), mesh=mesh)
    return found


def has_sparse_gradient(node: fx.Node) -> bool:
    """Whether the node makes a sparse gradient, which has only the rows that were read, as embeddings may."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in ("sparse", "sparse_grad"):
            return bool(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
    return False


def _is_floating(node: fx.Node) -> bool:
    return any(map(may_have_gradient, tensors_of(node)))
