"""Take blocks under a grad mode or an autocast of their own apart into their operators.

    x -> wrap_with_autocast(cpu, bfloat16, block, x, w) -> y            before

    x -> to bfloat16 -,                                                 after
    w -> to bfloat16 -+-> linear -> y

1. Under no_grad, operators read what comes from outside through `detach`.
2. Under autocast, an explicit cast stands for each that autocast makes (`casts`). A parameter is cast once a
   block, as autocast keeps its casts of parameters.
3. An operator whose casts cannot be said so is a block of its own.

A block stays whole if it reads no parameter and no activation, if the call runs under another autocast, if it writes
what may have a gradient under no_grad, or if it holds more than torch's operators. The reason is kept with it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import torch_private
from autopar.capture.autocast_answers import fits_caller, place_of_block
from autopar.capture.call_answers import types_asked
from autopar.capture.cleanup import is_assertion
from autopar.capture.mode_blocks.calls import is_graph
from autopar.capture.mode_blocks.casts import Casts, casts_of
from autopar.capture.mode_blocks.traced_blocks import AUTOCAST, GRAD_MODE, nested_graph, place_of, reads_differentiable
from autopar.capture.mode_blocks.traced_values import in_dtype, set_dtypes, without_values
from autopar.capture.node_names import describe, module_path
from autopar.capture.uncaptured_trace import RefusedError, is_opaque_call
from autopar.errors import first_line
from cost_models.graphs import get_attribute, may_have_gradient
from cost_models.measuring.autocast import Autocast

aten = torch.ops.aten

_META = ("nn_module_stack", "stack_trace")


KEPT = "autopar_kept"  # in the meta of a block's node: why the block stays whole

_UNKNOWN = "the tracer does not say what it takes"
_SEVERAL_MODES = "its parts use the cast of a parameter in several grad modes"
_UNLIKE_CALLER = "the call runs under another autocast; call it without, or under the same one"


class _KeptError(Exception):
    """The block must stay whole, for this reason."""


@dataclass(frozen=True)
class _Modes:
    """What an operator runs under."""

    gradients: bool = True
    autocast: Autocast | None = None


@dataclass
class _Value:
    """The result of a node: where it is in the outer graph, and the same without values."""

    node: Any  # a node of the outer graph, or a constant
    fake: Any


def inline_blocks(module: fx.GraphModule) -> None:
    """Take apart the blocks in the graph of `module`, as torch.export returned it, in place."""
    for node in list(module.graph.nodes):
        if node.target not in (GRAD_MODE, AUTOCAST) or not reads_differentiable(module, node):
            continue
        inlining = _Inlining(module, node)
        try:
            with module.graph.inserting_before(node), inlining.undone_on_failure():
                results = inlining.block(module, node, _Modes(), _outer_values(module, node))
        except _KeptError as reason:
            node.meta[KEPT] = str(reason)
            continue
        if inlining.mistaken is not None and types_asked():
            raise _mistaken_dtype(inlining.mistaken)
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]].node)
            module.graph.erase_node(item)
        module.graph.erase_node(node)


def _mistaken_dtype(node: fx.Node) -> RefusedError:
    """The model's code has asked for dtypes, and this may be one that it got wrong."""
    why = f"{describe(node)} has another dtype under autocast than torch.export says, and the code asks for dtypes"
    return RefusedError(why, module_path(node), why)


def _outer_values(module: fx.GraphModule, node: fx.Node) -> dict[fx.Node, _Value]:
    """What the block takes."""
    values = {}
    for source in node.all_input_nodes:
        if is_graph(module, source):
            continue
        value = source.meta.get("val")
        if value is None and source.op == "get_attr":
            value = get_attribute(module, str(source.target))
        if value is None:
            raise _KeptError(_UNKNOWN)
        values[source] = _Value(source, value)
    return values


@dataclass
class _State:
    """What is known of the operators that were inserted for a block."""

    mistaken: fx.Node | None = None
    names: list[str] = field(default_factory=list)  # that the module got
    without_gradient: set[fx.Node] = field(default_factory=set)  # results of operators under no_grad
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what comes from outside of no_grad -> its detach
    attached: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the other way round
    # (parameter, dtype) -> its cast, and whether gradients were recorded
    cast: dict[tuple[fx.Node, torch.dtype], tuple[fx.Node, bool]] = field(default_factory=dict)

    def copied(self) -> _State:
        return replace(
            self,
            names=list(self.names),
            without_gradient=set(self.without_gradient),
            detached=dict(self.detached),
            attached=dict(self.attached),
            cast=dict(self.cast),
        )


class _Inlining:
    """One block that becomes operators of the outer graph."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        """`node`: the block, of the graph of `module`."""
        self._module = module
        self._graph = module.graph
        self._node = node
        self._place = place_of(module, node)  # of all tensors
        self._fakes = FakeTensorMode()
        self._state = _State()

    @property
    def mistaken(self) -> fx.Node | None:
        """The first node whose result has another dtype than the tracer says."""
        return self._state.mistaken

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Inside, operators are inserted. If one cannot be, remove them, and raise _KeptError."""
        before, state = self._node.prev, self._state.copied()
        try:
            yield
        except (_KeptError, RuntimeError, TypeError) as error:
            while self._node.prev is not before:
                self._graph.erase_node(self._node.prev)
            for name in self._state.names[len(state.names) :]:
                delattr(self._module, name)
            self._state = state
            if isinstance(error, _KeptError):
                raise
            raise _KeptError(f"torch does not run it without values ({first_line(error)})") from error

    def block(self, owner: fx.GraphModule, node: fx.Node, modes: _Modes, values: dict[fx.Node, _Value]) -> list[_Value]:
        """Insert the operators of the block that `node` of `owner` calls; its results."""
        if any(user.target is not operator.getitem for user in node.users):
            raise _KeptError("its result is used as a whole")
        (child, arguments), inner = nested_graph(owner, node), self._modes_inside(node, modes)
        taken = [values[x] if isinstance(x, fx.Node) else _Value(x, x) for x in arguments]
        known = dict(zip(child.graph.find_nodes(op="placeholder"), taken, strict=True))
        for value in known.values():
            value.fake = self._without_values(value.fake)
        for one in child.graph.nodes:
            if one.op == "output":
                return [known[x] if isinstance(x, fx.Node) else _Value(x, x) for x in one.args[0]]
            if one.op == "get_attr" and not is_graph(child, one):
                known[one] = self._constant(child, one)
            elif one.target in (GRAD_MODE, AUTOCAST):
                known |= self._nested_block(child, one, inner, known)
            elif one.op not in ("placeholder", "get_attr") and one not in known and not is_assertion(one):
                known[one] = self._operator(one, inner, known)
        raise AssertionError("a graph ends with its output")

    def _nested_block(
        self, owner: fx.GraphModule, node: fx.Node, modes: _Modes, known: dict[fx.Node, _Value]
    ) -> dict[fx.Node, _Value]:
        """Insert a block within the block; the values of what is read of it."""
        try:
            with self.undone_on_failure():
                results = self.block(owner, node, modes, known)
        except _KeptError as reason:
            sets_all = node.target is AUTOCAST or modes.autocast is None  # that its operators run under
            if not modes.gradients or not sets_all:
                raise
            return self._whole(owner, node, known, str(reason))
        return {item: results[item.args[1]] for item in node.users}  # type: ignore[index]

    def _whole(
        self, owner: fx.GraphModule, node: fx.Node, known: dict[fx.Node, _Value], reason: str
    ) -> dict[fx.Node, _Value]:
        (nested, _), name = nested_graph(owner, node), self._new_name()
        self._module.add_module(name, nested)
        held = self._graph.get_attr(name)
        args = [held if is_graph(owner, x) else known[x].node if isinstance(x, fx.Node) else x for x in node.args]
        outer = self._graph.call_function(node.target, tuple(args))  # type: ignore[arg-type]
        outer.meta = {**node.meta, KEPT: reason}
        items = {}
        for item in node.users:
            read = self._graph.call_function(operator.getitem, (outer, item.args[1]))
            read.meta = dict(item.meta)
            items[item] = _Value(read, self._without_values(item.meta["val"]))
        return items

    @staticmethod
    def _modes_inside(node: fx.Node, modes: _Modes) -> _Modes:
        if node.target is GRAD_MODE:
            if node.args[0] and not modes.gradients:
                raise _KeptError("it records gradients inside of a block that does not")
            return replace(modes, gradients=modes.gradients and bool(node.args[0]))
        device_type, dtype, enabled, _ = node.args[:4]
        place = place_of_block(str(device_type))
        if place == "":
            return modes
        dtype = (dtype or torch.get_autocast_dtype(str(device_type))) if enabled else None
        assert dtype is None or isinstance(dtype, torch.dtype)
        if place is None or (modes.autocast is not None and modes.autocast.device_type != place):
            raise _KeptError("its devices are of several types")
        if not fits_caller(str(device_type), dtype):
            raise _KeptError(_UNLIKE_CALLER)
        # Also under the caller's own: the graph is studied without it.
        return replace(modes, autocast=None if dtype is None else Autocast(place, dtype))

    def _without_values(self, value: Any) -> Any:
        return without_values(value, self._fakes, self._place)

    def _new_name(self) -> str:
        name = next(name for i in itertools.count() if not hasattr(self._module, name := f"inlined_{i}"))
        self._state.names.append(name)
        return name

    def _constant(self, child: fx.GraphModule, node: fx.Node) -> _Value:
        tensor = get_attribute(child, str(node.target))
        name = self._new_name()
        self._module.register_buffer(name, tensor, persistent=False)
        outer = self._graph.get_attr(name)
        outer.meta = dict(node.meta)
        return _Value(outer, self._without_values(tensor))

    def _operator(self, node: fx.Node, modes: _Modes, known: dict[fx.Node, _Value]) -> _Value:
        """Insert one operator of a block."""
        fakes = fx.map_arg((node.args, node.kwargs), lambda n: known[n].fake)
        if self._place is not None:
            fakes = torch_private.tree_map(lambda x: self._place if isinstance(x, torch.device) else x, fakes)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n].node)
        if node.target is operator.getitem:
            several: Any = fakes[0]
            return self._inserted(node, args, kwargs, operator.getitem(*several), modes)
        if not isinstance(node.target, torch._ops.OpOverload):
            if any(isinstance(leaf, torch.Tensor) for leaf in torch_private.tree_leaves(fakes)):
                raise _KeptError("it holds more than torch's operators")
            return self._inserted(node, args, kwargs, node.target(*fakes[0], **fakes[1]), modes)  # type: ignore[operator]
        if is_opaque_call(node):
            raise _KeptError("a part of it runs uncaptured")
        self._refuse_writes(node, args, kwargs, modes)
        if not modes.gradients:
            args, kwargs = self._read_without_gradient(node, args, kwargs, fakes)
        if node.target.namespace.startswith("autopar"):  # a mark of the tracer's
            return self._inserted(node, args, kwargs, self._without_values(node.meta["val"]), modes)
        casts: Casts | None = Casts()
        with self._fakes, torch.no_grad():
            if modes.autocast is None:
                result = node.target(*fakes[0], **fakes[1])
            else:
                result, casts = casts_of(node.target, *fakes, modes.autocast)
        if (unchanged := self._returned(node, result, known)) is not None:
            return unchanged
        if casts is None:
            return self._alone(node, args, kwargs, result, modes)
        args, kwargs = self._with_casts(node, args, kwargs, casts, modes)
        return self._inserted(node, args, kwargs, result, modes)

    @staticmethod
    def _returned(node: fx.Node, result: Any, known: dict[fx.Node, _Value]) -> _Value | None:
        """The value of an operator that returns what it takes, as `x.float()` may do: it stays the same tensor, with
        its gradient."""
        if node.target._schema.is_mutable:  # type: ignore[union-attr]
            return None
        same = (known[x] for x in node.all_input_nodes if known[x].fake is result)
        return next(same, None) if isinstance(result, torch.Tensor) else None

    def _inserted(self, node: fx.Node, args: Any, kwargs: Any, result: Any, modes: _Modes) -> _Value:
        outer = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        outer.meta = dict(node.meta)
        return self._typed(outer, result, modes)

    def _typed(self, outer: fx.Node, result: Any, modes: _Modes) -> _Value:
        if set_dtypes(outer, result) and modes.autocast is not None and self.mistaken is None:
            self._state.mistaken = outer
        if not modes.gradients:
            self._state.without_gradient.add(outer)
        return _Value(outer, result)

    def _refuse_writes(self, node: fx.Node, args: Any, kwargs: Any, modes: _Modes) -> None:
        """Under no_grad, only buffers may be written, and what was computed under it."""
        for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
            if modes.gradients or argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for one in written if isinstance(written, (list, tuple)) else [written]:
                own = isinstance(one, fx.Node) and (one in self._state.without_gradient or self._is_buffer(one))
                if not own:
                    raise _KeptError("it writes what may have a gradient")

    def _is_buffer(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and not isinstance(get_attribute(self._module, str(node.target)), nn.Parameter)

    def _read_without_gradient(self, node: fx.Node, args: Any, kwargs: Any, fakes: Any) -> tuple[Any, Any]:
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        values = torch_private.tree_leaves(fakes)
        for place, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            if not isinstance(leaf, fx.Node) or not isinstance(value, torch.Tensor):
                continue
            if may_have_gradient(value) and leaf not in self._state.without_gradient and not self._is_buffer(leaf):
                if leaf not in self._state.detached:
                    new = self._made(node, aten.detach.default, (leaf,), leaf.meta.get("val"))
                    self._state.detached[leaf], self._state.attached[new] = new, leaf
                leaves[place] = self._state.detached[leaf]
        result: tuple[Any, Any] = torch_private.tree_unflatten(leaves, spec)
        return result

    def _with_casts(self, node: fx.Node, args: Any, kwargs: Any, casts: Casts, modes: _Modes) -> tuple[Any, Any]:
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        for place, dtype in sorted(casts.dtypes.items()):
            leaves[place] = self._casted(node, leaves[place], dtype, modes)
        args, kwargs = torch_private.tree_unflatten(leaves, spec)
        return args, kwargs if casts.dtype is None else {**kwargs, "dtype": casts.dtype}

    def _casted(self, node: fx.Node, source: fx.Node, dtype: torch.dtype, modes: _Modes) -> fx.Node:
        parameter = self._state.attached.get(source, source)
        keeps = modes.autocast is not None and dtype == modes.autocast.dtype
        if keeps and parameter.op == "get_attr" and not self._is_buffer(parameter):
            cast, gradients = self._state.cast.get((parameter, dtype), (None, modes.gradients))
            if gradients != modes.gradients:
                raise _KeptError(_SEVERAL_MODES)
            if cast is None:
                cast = self._made(node, aten.to.dtype, (source, dtype), source.meta.get("val"), dtype)
                self._state.cast[parameter, dtype] = cast, gradients
            return cast
        return self._made(node, aten.to.dtype, (source, dtype), source.meta.get("val"), dtype)

    def _made(
        self, user: fx.Node, target: Callable[..., Any], args: Any, value: Any, dtype: torch.dtype | None = None
    ) -> fx.Node:
        """A new node for `user`, with the traced value `value`."""
        new = self._graph.call_function(target, args)
        new.meta = {key: user.meta[key] for key in _META if key in user.meta}
        if isinstance(value, torch.Tensor):
            new.meta["val"] = value if dtype is None else in_dtype(value, dtype)
        return new

    def _alone(self, node: fx.Node, args: Any, kwargs: Any, result: Any, modes: _Modes) -> _Value:
        """Insert a block under autocast that holds a single operator."""
        assert modes.autocast is not None
        leaves, spec = torch_private.tree_flatten((args, kwargs))
        graph = fx.Graph()
        taken = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, fx.Node))
        inputs = {outer: graph.placeholder(outer.name) for outer in taken}
        for outer, placeholder in inputs.items():
            placeholder.meta = dict(outer.meta)
        inner_args, inner_kwargs = torch_private.tree_unflatten([inputs.get(x, x) for x in leaves], spec)
        inner = graph.call_function(node.target, inner_args, inner_kwargs)  # type: ignore[arg-type]
        inner.meta = dict(node.meta)
        several = isinstance(result, (tuple, list))
        items = [graph.call_function(operator.getitem, (inner, i)) for i in range(len(result))] if several else [inner]
        graph.output(tuple(items))
        name, autocast = self._new_name(), modes.autocast
        self._module.add_module(name, fx.GraphModule(nn.Module(), graph))
        modes_and_graph = (autocast.device_type, autocast.dtype, True, autocast.cache, self._graph.get_attr(name))
        block = self._graph.call_function(AUTOCAST, (*modes_and_graph, *taken))
        block.meta = dict(node.meta)
        if several:
            outer = block
        else:
            block.meta["val"] = (node.meta.get("val"),)
            outer = self._graph.call_function(operator.getitem, (block, 0))
            outer.meta = dict(node.meta)
        return self._typed(outer, result, modes)
