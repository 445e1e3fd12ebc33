"""Random operators that draw from the generator of the running micro-batch instead of torch's global one.

Worker threads that share the global generator make a run irreproducible. While a stage computes a micro-batch, its
thread carries a generator seeded by (step, micro-batch, stage); the functions here take their numbers from it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from autopar.analysis.operators import is_random
from autopar.capture.cleanup import aten
from autopar.capture.uncaptured import uncaptured

_global_generator = threading.Lock()
_MASK64 = (1 << 64) - 1


class _Current(threading.local):
    seed: int | None = None
    generators: dict[torch.device, torch.Generator]

    def __init__(self) -> None:
        self.generators = {}
        self.fresh: set[torch.device] = set()


_current = _Current()


def mix_seed(*parts: int) -> int:
    """One well-mixed 63-bit seed from several numbers (the finalizer of SplitMix64, Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random operators of stages that this thread runs inside draw from generators seeded by `seed`."""
    before = _current.seed
    _current.seed, _current.fresh = seed, set()
    try:
        yield
    finally:
        _current.seed = before


def _generator(device: torch.device) -> torch.Generator | None:
    if _current.seed is None:  # a stage module called by hand
        return None
    if device not in _current.generators:
        _current.generators[device] = torch.Generator(device)
    generator = _current.generators[device]
    if device not in _current.fresh:
        generator.manual_seed(_current.seed)
        _current.fresh.add(device)
    return generator


def dropout(x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    """aten.dropout with the micro-batch's generator."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=_generator(x.device)).div_(1 - p)
    return x * mask


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by its definition, with the micro-batch's dropout. The fused kernels draw from the global generator;
    on the CPU torch itself takes this path when there is dropout."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropout(torch.softmax(scores, -1), dropout_p) @ value


def from_global_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Any other random operator: one thread at a time has the global generator, seeded for it and put back after."""
    if _current.seed is None:
        return function(*args, **kwargs)
    devices = {t.device for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor)} or {torch.device("cpu")}
    cuda = [d.index for d in devices if d.type == "cuda"]
    seeds = torch.randint(1 << 62, (1,), generator=_generator(torch.device("cpu"))).item()
    with _global_generator, torch.random.fork_rng(devices=cuda):
        torch.manual_seed(int(seeds))
        return function(*args, **kwargs)


_OWN: dict[Any, Callable[..., torch.Tensor]] = {
    aten.dropout.default: dropout,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
}


def drawn_apart(number: int, part: int, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A random operator of a sharded stage on one device's `part`: devices with the same part draw the same numbers,
    others different ones. `number`: of the operator in the stage."""
    function = _OWN.get(target) or functools.partial(from_global_generator, target)
    if _current.seed is None:
        return function(*args, **kwargs)
    with seeded(mix_seed(_current.seed, number, part)):
        return function(*args, **kwargs)


def lower_random(graph: fx.Graph, module: fx.GraphModule) -> bool:
    """Make the random operators of a stage's graph draw from the micro-batch's generator; True if there are any."""
    found = False
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module") or not is_random(node, module):
            continue
        found = True
        if node.op != "call_function":
            _through_global_generator(graph, node)
        elif (opaque := uncaptured(node)) is not None:
            draw = node.meta.get("draw")
            node.target = opaque.drawing(functools.partial(drawn_apart, *draw) if draw else from_global_generator)
        elif "draw" in node.meta:  # of one device among several
            node.args = (*node.meta["draw"], node.target, *node.args)
            node.target = drawn_apart
        elif node.target in _OWN:
            node.target = _OWN[node.target]
        else:
            node.args = (node.target, *node.args)
            node.target = from_global_generator
    return found


def keep_from_compiler(module: fx.GraphModule) -> None:
    """Have torch.compile call the functions here rather than look into them: a thread's generator is nothing that it
    could carry along (torch 2.11 drops it without a word)."""
    for node in module.graph.nodes:
        if node.target in (dropout, scaled_dot_product_attention, from_global_generator):
            node.target = _uncompiled(node.target)
    module.recompile()


@functools.cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compiler.disable(function)
    return found


def _through_global_generator(graph: fx.Graph, node: fx.Node) -> None:
    """A call_module or call_method node (only in graphs of symbolic_trace) as a call of from_global_generator."""
    with graph.inserting_before(node):
        if node.op == "call_module":
            function: Any = graph.get_attr(str(node.target))
        else:
            function = getattr(torch.Tensor, str(node.target))
        call = graph.call_function(from_global_generator, (function, *node.args), dict(node.kwargs))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
