"""Random operators whose numbers depend on the running micro-batch alone, not on what other threads draw.

Worker threads that share the global generator make a run irreproducible. While a stage computes a micro-batch, its
thread carries a seed made from (step, micro-batch, stage). The functions here take their numbers from it:

    on a CPU    from a generator of the thread, which starts at that seed
    on a GPU    torch's fused kernels draw from the default generator of the GPU. A draw locks that generator, lends
                it the state of the thread's, calls the operator, and puts its own state back. A kernel takes its seed
                and offset when the host launches it: nothing waits for the GPU, and the lock is free after the launch.

A second run of the same micro-batch by the same stage draws the same numbers. The caller's generators of GPUs stay as
they are: a call takes one number from torch's CPU generator, and everything that it draws follows from that.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from autopar.analysis.operators import is_random
from autopar.capture.cleanup import aten
from autopar.capture.uncaptured import uncaptured
from cost_models.kernels.device_kernels import device_type_of

_global_generator = threading.Lock()  # of the CPU
_locks: dict[torch.device, threading.Lock] = {}  # of the default generators of other devices
_FUSED = frozenset({"cuda"})  # device types whose fused kernels are worth their default generator
_MASK64 = (1 << 64) - 1


class _Current(threading.local):
    seed: int | None = None
    generators: dict[torch.device, torch.Generator]

    def __init__(self) -> None:
        self.generators = {}
        self.fresh: set[torch.device] = set()
        self.held: set[threading.Lock] = set()


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
    """Random operators of stages that this thread runs inside draw from generators seeded by `seed`.

    Those of a `seeded` around it go on afterwards where they were.
    """
    before = _current.seed, _current.fresh, _current.generators
    generators = _current.generators if _current.seed is None else {}
    _current.seed, _current.fresh, _current.generators = seed, set(), generators
    try:
        yield
    finally:
        _current.seed, _current.fresh, _current.generators = before


def running_seed() -> int | None:
    """The seed of the micro-batch that this thread runs; None for a stage module called by hand."""
    return _current.seed


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Inside, random operators on the generator's device draw from it, from the beginning of the running micro-batch's
    numbers. Nothing changes where no micro-batch runs."""
    before = _current.fresh, _current.generators
    if _current.seed is not None:
        generator.manual_seed(_current.seed)
        _current.fresh, _current.generators = {generator.device}, {generator.device: generator}
    try:
        yield
    finally:
        _current.fresh, _current.generators = before


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


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def generator_lock(device: torch.device) -> threading.Lock:
    """While a thread holds it, no other thread of a stage draws from the default generator of `device`."""
    return _locks.setdefault(device, threading.Lock())


@contextmanager
def generators_held(device: torch.device) -> Iterator[None]:
    """Inside, no other thread of a stage draws from the global generators of the CPU and of `device`.

    For backwards of uncaptured code: its checkpoints set these generators to the state of their forward, draw the same
    numbers again, and put them back.
    """
    with _holding(_global_generator), _holding(generator_lock(device)) if device.type in _FUSED else nullcontext():
        yield


@contextmanager
def _holding(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock, unless this thread does already: checkpoints run again within a backward that holds it."""
    if lock in _current.held:
        yield
        return
    with lock:
        _current.held.add(lock)
        try:
            yield
        finally:
            _current.held.discard(lock)


@contextmanager
def _own_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Operators inside draw from the micro-batch's generators where they would from the default ones of `devices`.

    A default generator takes on the state of the micro-batch's, and advances it; afterwards it has its own again. No
    other thread of a stage draws from it meanwhile. torch runs random operators of compiled graphs the same way
    (`graphsafe_run_with_rng_state`), so that a CUDA graph may be captured in here.
    """
    with ExitStack() as stack:
        for device in sorted(devices, key=str):  # one order for all threads, so that none waits for another in a circle
            stack.enter_context(_holding(generator_lock(device)))
            own, default = _generator(device), _default_generator(device)
            assert own is not None, "a micro-batch runs"
            stack.callback(default.graphsafe_set_state, default.graphsafe_get_state())
            default.graphsafe_set_state(own)
        yield


def _fused(operator: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`operator(x, ...)` by the kernel of torch for the device of `x`, with the micro-batch's numbers."""
    if _current.seed is None or x.is_meta:  # a stage module called by hand, or without values
        return operator(x, *args, **kwargs)
    with _own_numbers([x.device]):
        return operator(x, *args, **kwargs)


def dropout(x: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    """aten.dropout with the micro-batch's numbers."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    if device_type_of(x) in _FUSED:
        return _fused(aten.dropout.default, x, p, True)
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
    """Attention with the micro-batch's dropout. On a GPU torch's kernels compute it and keep no matrix of scores; on a
    CPU it is computed by its definition, as torch does there with dropout."""
    if device_type_of(query) in _FUSED:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return _fused(_attention, query, key, value, attn_mask, dropout_p, is_causal, **options)
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
    """Any other random operator: one thread at a time has the global generators, seeded for it and put back after."""
    if _current.seed is None:
        return function(*args, **kwargs)
    others = {device for device in _devices(args, kwargs) if device.type in _FUSED - {"cpu"}}
    # All say "cpu": the caller's default device may be another one.
    seed = int(torch.randint(1 << 62, (), generator=_generator(torch.device("cpu")), device="cpu").item())
    with _holding(_global_generator), torch.random.fork_rng(devices=[]), _own_numbers(others):
        # Not `torch.manual_seed`: it seeds every GPU of the machine, and only those named above are put back.
        torch.default_generator.manual_seed(seed)
        return function(*args, **kwargs)


@functools.cache
def _python_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`from_global_generator` of a function that generated code cannot name as an argument."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        return from_global_generator(function, *args, **kwargs)

    drawn.__name__ = drawn.__qualname__ = f"{function.__name__}_from_global_generator"
    _PYTHON_FUNCTIONS.add(drawn)
    return drawn


_PYTHON_FUNCTIONS: set[Callable[..., Any]] = set()


def uses_global_generator(target: Any) -> bool:
    """Whether what a node calls draws numbers from the global generator."""
    return target is from_global_generator or target in _PYTHON_FUNCTIONS


def _devices(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.device]:
    """Devices on which a call may draw: those of its tensors, and those that its arguments name."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value.device
        elif isinstance(value, torch.device):
            yield torch.device(value.type, torch.cuda.current_device()) if value == torch.device("cuda") else value


_attention = aten.scaled_dot_product_attention.default

_OWN: dict[Any, Callable[..., torch.Tensor]] = {
    aten.dropout.default: dropout,
    _attention: scaled_dot_product_attention,
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
        elif isinstance(node.target, torch._ops.OpOverload):
            node.args = (node.target, *node.args)
            node.target = from_global_generator
        else:
            node.target = _python_function(node.target)
    return found


def draws_numbers(graph: fx.Graph) -> bool:
    """Whether a graph that `lower_random` has changed draws random numbers."""
    functions = (*_OWN.values(), drawn_apart)
    opaque = (uncaptured(node) for node in graph.nodes)
    return any(n.target in functions or uses_global_generator(n.target) for n in graph.nodes) or any(
        o is not None and o.through for o in opaque
    )


def keep_from_compiler(module: fx.GraphModule) -> None:
    """Have torch.compile call the functions here rather than look into them: a thread's generator is nothing that it
    could carry along (torch 2.11 drops it without a word)."""
    for node in module.graph.nodes:
        if node.target in (dropout, scaled_dot_product_attention) or uses_global_generator(node.target):
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
            module = graph.get_attr(str(node.target))
            call = graph.call_function(from_global_generator, (module, *node.args), dict(node.kwargs))
        else:
            method = _python_function(getattr(torch.Tensor, str(node.target)))
            call = graph.call_function(method, node.args, dict(node.kwargs))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
