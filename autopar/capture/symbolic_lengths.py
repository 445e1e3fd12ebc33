"""`len(tensor)` in a model's code while it is traced.

Python makes the result of `Tensor.__len__` an int, so that a tracer takes the number of samples of one call for a
constant: `x.view(len(x), -1)` runs at one batch size only. So a model that takes such a length is traced once more,
with a `len` that returns what `x.shape[0]` does:

    plain trace       view(x, [4, -1])                      for 4 samples
    symbolic trace    view(x, [s0, -1])                     for any number, and the same at 4

Code may treat such a symbol in another way than an int (as `isinstance(n, int)`, an f-string or a dictionary does). So
the symbolic trace counts only if both traces compute the same.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from autopar.capture import torch_private
from autopar.capture.cleanup import aten, is_assertion

_len = builtins.len
_lock = threading.Lock()
_n_inside = 0


class _Traced(Protocol):
    @property
    def module(self) -> fx.GraphModule: ...

    @property
    def out_spec(self) -> Any: ...


_Trace = TypeVar("_Trace", bound=_Traced)


class _Tracing(threading.local):
    """What `len` does in a thread that traces."""

    symbolic: bool | None = None  # None: it does not trace
    met: bool = False  # whether a length was a symbol


_tracing = _Tracing()


def with_lengths(trace: Callable[[], _Trace]) -> _Trace:
    """What `trace()` returns, with symbols for lengths of tensors where that computes the same. It may run thrice."""
    plain, met = _traced(trace, symbolic=False)
    if not met:
        return plain
    with contextlib.suppress(Exception):  # of code that needs an int
        symbolic, _ = _traced(trace, symbolic=True)
        if plain.out_spec == symbolic.out_spec and _compute_the_same(plain.module, symbolic.module):
            return symbolic
    return trace()  # what a trace notes elsewhere is of the last one


def met_a_symbol() -> bool:
    """Whether the code that is traced in this thread has taken a length that is a symbol."""
    return _tracing.met


def _traced(trace: Callable[[], _Trace], *, symbolic: bool) -> tuple[_Trace, bool]:
    """The trace, and whether its code took a length that is a symbol."""
    global _n_inside
    before = _tracing.symbolic, _tracing.met
    with _lock:
        _n_inside += 1
        builtins.len = _length
    try:
        _tracing.symbolic, _tracing.met = symbolic, False
        return trace(), met_a_symbol()
    finally:
        _tracing.symbolic, _tracing.met = before
        with _lock:
            _n_inside -= 1
            if not _n_inside:
                builtins.len = _len


def _length(value: Any, /) -> Any:
    if _tracing.symbolic is None or not isinstance(value, torch.Tensor) or not value.dim():
        return _len(value)
    size = value.shape[0]
    if not isinstance(size, torch.SymInt) or type(value).__len__ is not torch.Tensor.__len__:
        return _len(value)
    _tracing.met = True
    return size if _tracing.symbolic else _len(value)


def _compute_the_same(plain: fx.GraphModule, symbolic: fx.GraphModule) -> bool:
    """Whether two traces of one call have the same operators, with the same arguments for the sizes of this call."""
    sides: list[list[tuple[Any, ...]]] = []
    for module in (plain, symbolic):
        places: dict[fx.Node, int] = {}
        points: dict[str, int] = {}
        described: list[tuple[Any, ...]] = []
        for node in module.graph.nodes:
            if node.op == "call_module" or is_assertion(node) or _is_number(node):
                continue
            if node.target is aten.slice.Tensor and node.args[2:] == (0, sys.maxsize):  # of a symbolic size: all of it
                places[node] = places[node.args[0]]
                continue
            places[node] = _len(described)
            arguments = (node.args, node.kwargs)
            if str(getattr(node.target, "namespace", "")).startswith("autopar"):
                arguments = torch_private.tree_map(partial(_numbered_anew, points=points), arguments)
            described.append((node.op, node.target, _described(arguments, places)))
        sides.append(described)
    if sides[0] != sides[1]:
        return False
    inner: list[dict[str, fx.GraphModule]] = [
        {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
        for module in (plain, symbolic)
    ]
    inner = [{name: child for name, child in found.items() if name != "_guards_fn"} for found in inner]
    return inner[0].keys() == inner[1].keys() and all(
        _compute_the_same(child, inner[1][name]) for name, child in inner[0].items()
    )


def _numbered_anew(argument: Any, points: dict[str, int]) -> Any:
    """What a mark says, such as "enter layers.0#3", by a number of this trace: marks are counted over all traces."""
    if not isinstance(argument, str):
        return argument
    side, _, name = argument.rpartition(" ")
    return side, name.rstrip("0123456789"), points.setdefault(name, _len(points))


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, (int, float, *torch.types.py_sym_types))


def _described(argument: Any, places: dict[fx.Node, int]) -> Any:
    """An argument with the places of its nodes, and with the numbers of this call for sizes."""
    if isinstance(argument, fx.Node):
        if argument in places:
            return ("node", places[argument])
        return torch_private.hint_of(argument.meta["val"])
    if isinstance(argument, (list, tuple)):
        return tuple(_described(item, places) for item in argument)
    if isinstance(argument, dict):
        return {key: _described(item, places) for key, item in argument.items()}
    if isinstance(argument, slice):
        return _described((argument.start, argument.stop, argument.step), places)
    return argument
