"""One capture for calls of many sizes: the graph keeps symbols, and is specialised for the sizes of a call.

    input_ids [s0, s1] -> embedding -> view(s0 * s1, 8) -> ...     captured once, in seconds
    input_ids [s0, 16] -> embedding -> view(s0 * 16, 8) -> ...     for calls with 16 tokens, in milliseconds
    input_ids [s0, 40] -> embedding -> view(s0 * 40, 8) -> ...     for calls with 40 tokens

The batch s0 stays a symbol. So everything after the capture sees a program as if captured for one length alone. A
Python int that no shape depends on stays an input of the graph; calls that differ in it alone share one program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from autopar.capture import torch_private
from autopar.capture.attention_masks import settle_masks
from autopar.capture.call_inputs import flattened
from autopar.capture.program import Input, OpenSize, Program, fitting_batch


@dataclass(frozen=True)
class SymbolicProgram:
    """A program whose inputs have symbolic sizes beside the batch; `at` gives programs to work with."""

    program: Program
    sizes: frozenset[OpenSize]  # that may differ
    fixed: frozenset[OpenSize]  # that were requested, but that the model fixes

    def at(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program | None:
        """The program for calls with the sizes of this one; None where the capture does not fit them."""
        leaves, spec = flattened(args, kwargs)
        if spec != self.program.in_spec:
            return None
        batch = fitting_batch(leaves, self.program.inputs, self.sizes)
        if batch is None or (batch != self.program.batch_size and (not self.program.any_batch or batch == 1)):
            return None
        try:
            self.program.guards(*leaves)
        except AssertionError:
            return None
        known = self._values(leaves)
        if known is None:
            return None
        inputs = tuple(self._input_at(place, leaf) for place, leaf in enumerate(leaves))
        module = _specialised(self.program.graph_module, known, frozenset(self._numbers))
        if not self.program.shard_calls:  # whose borders name nodes of the graph as it was captured
            settle_masks(module, [one.batch_dim for one in inputs])
        return replace(self.program, graph_module=module, inputs=inputs, batch_size=batch)

    @cached_property
    def _placeholders(self) -> list[fx.Node]:
        return [node for node in self.program.graph.nodes if node.op == "placeholder"]

    @cached_property
    def _numbers(self) -> dict[sympy.Symbol, int]:
        """The symbols of Python ints that no shape depends on, and their inputs."""
        own = {
            symbol: size.leaf
            for size in self.sizes
            if size.dim is None
            and (symbol := torch_private.symbol_of(self._placeholders[size.leaf].meta["val"])) is not None
        }
        tensors = _tensors(self.program.graph_module)
        in_shapes = {symbol for value in tensors for symbol in torch_private.symbols_in(value)}
        return {symbol: leaf for symbol, leaf in own.items() if symbol not in in_shapes}

    def _input_at(self, place: int, leaf: Any) -> Input:
        one = self.program.inputs[place]
        if isinstance(leaf, torch.Tensor):
            return replace(one, shape=tuple(leaf.shape))
        return replace(one, value=leaf, any_number=place in self._numbers.values())

    def _values(self, leaves: Sequence[Any]) -> dict[sympy.Symbol, int | sympy.Symbol] | None:
        """The value of every symbol except the batch; None where sizes of the call contradict each other.

        The tracer cannot always tell that all inputs have one number of samples (s0 * s1 = s2 * s3). Here they do.
        """
        sizes: list[tuple[Any, int]] = []  # (as traced, of this call)
        batches: dict[sympy.Symbol, None] = {}
        for node, one, leaf in zip(self._placeholders, self.program.inputs, leaves, strict=True):
            traced = node.meta.get("val")
            if isinstance(leaf, torch.Tensor):
                assert isinstance(traced, torch.Tensor)
                pairs = list(zip(traced.shape, leaf.shape, strict=True))
                if one.batch_dim is not None:
                    batches |= dict.fromkeys(torch_private.symbols_in(pairs.pop(one.batch_dim)[0]))
                sizes += pairs
            elif isinstance(traced, torch.SymInt):
                sizes.append((traced, leaf))
        found = {s: size for traced, size in sizes if (s := torch_private.symbol_of(traced)) is not None}
        known: dict[sympy.Symbol, int | sympy.Symbol] = {s: size for s, size in found.items() if s not in batches}
        batch, *others = batches or [None]
        if batch is not None:
            known |= dict.fromkeys(others, batch)
        for traced, size in sizes:
            if isinstance(traced, torch.SymInt) and torch_private.at_sizes(traced, known) != size:
                return None
        return known

    @classmethod
    def of(cls, program: Program, requested: frozenset[OpenSize]) -> SymbolicProgram:
        """`program`, captured with the sizes `requested` as symbols where its model allows them."""
        values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
        kept = {size for size in requested if _is_symbolic(values[size.leaf], size.dim)}
        return cls(program, frozenset(kept), requested - kept)


def _is_symbolic(value: Any, dim: int | None) -> bool:
    if dim is not None:
        value = value.shape[dim] if isinstance(value, torch.Tensor) else None
    return bool(torch_private.symbols_in(value))


def _tensors(module: fx.GraphModule) -> Iterator[torch.Tensor]:
    """All traced tensors of a graph and of the graphs inside it."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                value = node.meta.get("val")
                values = value if isinstance(value, (tuple, list)) else [value]
                yield from (v for v in values if isinstance(v, torch.Tensor))


def _specialised(
    module: fx.GraphModule, known: Mapping[sympy.Symbol, int | sympy.Symbol], numbers: frozenset[sympy.Symbol]
) -> fx.GraphModule:
    """A copy of the graph for the `known` sizes. Sizes that are numbers now become constants of the operators.

    What is computed from the symbols `numbers` stays computed: only its traced value becomes that of this call.
    """
    children = {
        name: _specialised(child, known, numbers)
        for name, child in module.named_children()
        if isinstance(child, fx.GraphModule)
    }
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        traced = node.meta.get("val")
        value = torch_private.at_sizes(traced, known)
        is_size = isinstance(traced, torch.types.py_sym_types) and not isinstance(value, torch.types.py_sym_types)
        if is_size and node.op != "placeholder" and not torch_private.symbols_in(traced) & numbers:
            copies[node] = value
            continue
        copy = graph.node_copy(node, lambda n: copies[n])
        copy.meta = dict(node.meta)
        if "val" in copy.meta:
            copy.meta["val"] = value
        copies[node] = copy
    new = fx.GraphModule(module, graph, class_name=type(module).__name__)
    for name, child in children.items():
        if hasattr(new, name):
            setattr(new, name, child)
    new.meta = dict(module.meta)
    return new
