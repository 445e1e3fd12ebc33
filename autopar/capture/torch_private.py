"""All uses of torch's private API, each in one function, with the reason why no public API does it.

Those that ranks need are in `torch_private_ranks.py`, those of backwards in `torch_private_autograd.py`.

`tests/capture/test_torch_private.py` covers each of them, so a torch upgrade that changes one fails a test.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._export.passes import _node_metadata_hook, replace_set_grad_with_hop_pass
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaConverter
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction

# torch.export describes nested inputs and outputs by these trees; torch has no public module for them.
TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# The module that export's passes record for nodes that belong to none.
NO_MODULE: str = _node_metadata_hook._EMPTY_NN_MODULE_STACK_KEY


def tree_paths(tree: Any) -> list[str]:
    """A readable path for every leaf of `tree`, such as `kwargs['attention_mask']`, in flatten order."""
    return [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(tree)[0]]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was created under a FakeTensorMode (public only for code that creates the mode itself)."""
    return isinstance(tensor, FakeTensor)


def has_dispatch_mode() -> bool:
    """Whether this thread has a dispatch mode, as it has inside torch.export. `torch.compiler.is_exporting` is true in
    all threads while one of them exports."""
    return torch._C._len_torch_dispatch_stack() > 0


@contextlib.contextmanager
def fakes_on(place: torch.device) -> Iterator[None]:
    """Inside, in this thread, the fake copies that a tracer makes of real tensors are on `place`, whatever the device
    of the original. The originals stay where they are.

    torch.export takes the devices of a model as they are, and refuses a model or a call that is on several.
    """
    original = MetaConverter.__call__
    thread = threading.get_ident()

    def convert(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        callback = kwargs.get("callback")
        if callback is not None and threading.get_ident() == thread:
            kwargs["callback"] = lambda make_meta, device=None: callback(make_meta, device=place)
        return original(self, tensor, *args, **kwargs)

    MetaConverter.__call__ = convert  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        MetaConverter.__call__ = original  # type: ignore[method-assign]


def symbol_of(size: Any) -> sympy.Symbol | None:
    """The symbol that a size of a traced tensor is; None for numbers and for sizes computed from symbols.

    The public torch.SymInt does not show its expression.
    """
    expression = size.node.expr if isinstance(size, torch.types.py_sym_types) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def hint_of(value: Any) -> Any:
    """The number that a traced size has in the traced call; other values as they are. (int() would fix the size.)"""
    return value.node.hint if isinstance(value, torch.types.py_sym_types) else value


def symbols_in(value: Any) -> set[sympy.Symbol]:
    """All symbols in the sizes and strides of a traced value (a tensor, a number, or a list of them)."""
    if isinstance(value, torch.types.py_sym_types):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        value = [*value.shape, *value.stride()] if value.layout is torch.strided else list(value.shape)
    if isinstance(value, (tuple, list)):
        return set().union(*map(symbols_in, value))
    return set()


def at_sizes(value: Any, known: Mapping[sympy.Symbol, int | sympy.Symbol]) -> Any:
    """A traced value with numbers, or other symbols, in the place of the `known` symbols.

    Tensors become new fake tensors. A size that still has a symbol becomes a new SymInt; only the tracer's own ShapeEnv
    can make one. Symbols of sizes that depend on values stay, and have no value in the traced call either.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(at_sizes(item, known) for item in value)
    if not symbols_in(value) & known.keys():
        return value
    if isinstance(value, torch.types.py_sym_types):
        expression = value.node.expr.xreplace({symbol: sympy.sympify(size) for symbol, size in known.items()})
        if not expression.free_symbols:
            number = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
            return number(expression)
        env = value.node.shape_env
        traced = expression.xreplace(env.backed_var_to_val)
        return env.create_symintnode(expression, hint=None if traced.free_symbols else int(traced))
    shape, stride = (at_sizes(list(part), known) for part in (value.shape, value.stride()))
    with value.fake_mode:
        new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return new.requires_grad_(value.requires_grad) if value.requires_grad else new


def backward_keeps_graph() -> bool:
    """Whether the running backward retains the graph (no public query exists)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread (no public query exists)."""
    return bool(torch._C._current_graph_task_id() >= 0)


FunctionCall = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def custom_functions_through(call: FunctionCall, checkpoint: FunctionCall | None = None) -> Iterator[None]:
    """Inside, in this thread, `Custom.apply(...)` of a user's torch.autograd.Function is `call(Custom, apply, ...)`.

    A tracer would trace its forward and silently lose its backward; torch has no public switch against that. torch's
    own Functions are called as ever, but for that of reentrant checkpoints, if `checkpoint` is given.
    """
    original: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    thread = threading.get_ident()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        through: FunctionCall | None = call
        if cls.__module__.partition(".")[0] == "torch":
            through = checkpoint if cls is CheckpointFunction else None
        if threading.get_ident() != thread or through is None:
            return original(cls, *args, **kwargs)
        return through(cls, functools.partial(original, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = classmethod(original)  # type: ignore[assignment, method-assign]


FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which recurrent modules list their parameters; a forward lists them anew if they are others."""


def refresh_flat_weights(modules: Sequence[nn.Module]) -> None:
    """Let recurrent modules use the parameters in their tables: they keep a private list of them besides."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, name, None) for name in names]


def functional_binding(name: str) -> Callable[..., Any] | None:
    """torch's binding of an operator of torch.nn.functional; None where this version has none of that name.

    The public function is sometimes this binding, and sometimes a Python function around it.
    """
    found: Callable[..., Any] | None = getattr(torch._C._nn, name, None)
    return found


def profiler_is_on() -> bool:
    """Whether a torch.profiler records in this process; if not, callers skip naming ranges, which costs time.

    torch.autograd._profiler_enabled() answers for the current thread only.
    """
    return bool(torch.autograd.profiler._is_profiler_enabled)


SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The innermost saved_tensors_hooks of this thread, which other threads do not inherit (no public query exists)."""
    hooks: SavedTensorsHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def of_checkpoint(hooks: SavedTensorsHooks) -> bool:
    """Whether torch.utils.checkpoint put these hooks there, to run its function again (their classes are private)."""
    return getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__


def have_gradient_hooks(tensors: Sequence[torch.Tensor], *, besides: tuple[type, ...] = ()) -> bool:
    """Whether hooks run when one of the tensors gets a gradient, or after that (their tables have no public name).
    Hooks of the classes `besides` do not count."""
    for tensor in tensors:  # a generator would cost every step a call a parameter
        if tensor._post_accumulate_grad_hooks:
            return True
        hooks = tensor._backward_hooks
        if hooks and not (besides and all(isinstance(hook, besides) for hook in hooks.values())):
            return True
    return False


def keep_hooks_and_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `new`, which takes the place of the leaf `old`, its hooks on gradients and its attributes.

    Handles of the hooks go on to remove them: the tables themselves are handed on, for which torch has no public way.
    """
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    for name, value in vars(old).items():
        if name not in vars(new):
            vars(new)[name] = value


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Inside, global module hooks are off (torch.nn.modules.module has no public switch)."""
    module = nn.modules.module
    tables: list[dict[int, Any]] = [
        module._global_forward_pre_hooks,
        module._global_forward_hooks,
        module._global_backward_pre_hooks,
        module._global_backward_hooks,
    ]
    saved = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def drop_buffer_hooks_of_export() -> None:
    """Remove the hooks by which torch.export, once it traces, follows assignments to buffers of the root. The writes
    that it adds for them change a buffer's type or shape, or fail; no option of it turns them off.

    The handles of the hooks, which torch.export removes later, have nothing left to remove.
    """
    table: dict[int, Any] = nn.modules.module._global_buffer_registration_hooks
    for number, hook in list(table.items()):
        if hook.__module__.startswith("torch."):
            del table[number]


@contextlib.contextmanager
def grad_modes_kept() -> Iterator[None]:
    """Inside, torch.export keeps the grad modes of blocks within a block under autocast.

    It splits the operators of an autocast at each change of the grad mode, and copies the entry of the autocast to the
    front of every part. There it looks for the grad mode, finds none, and drops it: what ran under no_grad would get
    gradients.
    """
    module, original = replace_set_grad_with_hop_pass, replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod

    def is_block(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        owner = node.graph.owning_module
        if node.op != "call_module" or owner is None:
            return False
        skipped = ("placeholder", torch.amp.autocast_mode._enter_autocast)
        inner = getattr(owner, str(node.target)).graph.nodes
        first = next((one for one in inner if one.op not in skipped and one.target not in skipped), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    module._is_set_grad_enabled_sub_mod = is_block
    try:
        yield
    finally:
        module._is_set_grad_enabled_sub_mod = original


def unknown_output(error: BaseException) -> type | None:
    """The output class that `error` of torch.export does not know; None for other errors.

    torch 2.11 looks up the returned object itself in a table of classes, and raises TypeError if it is not hashable, as
    dataclasses are not.
    """
    named = re.search(r"<class '([\w.]+)'> in output", str(error))
    if named:
        module_name, _, class_name = named[1].rpartition(".")
        cls = getattr(sys.modules.get(module_name), class_name, None)
        return cls if isinstance(cls, type) else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    looked_up = [f.f_locals["cls"] for f in frames if f.f_code.co_name == "is_opaque_type" and "cls" in f.f_locals]
    return type(looked_up[-1]) if looked_up and isinstance(error, TypeError) else None


def compile_for_threads(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """torch.compile for functions that several threads call.

    torch 2.11 tracks for the whole process whether anything is being traced, and refuses calls of compiled functions
    while another thread compiles one. From here on such a call runs the function without compiling it.
    """
    torch._dynamo.config.error_on_nested_fx_trace = False
    compiled: Callable[..., Any] = torch.compile(function, backend=backend)
    return compiled


class _CompileClock:
    """Seconds in which torch.compile has compiled anything in this process, backwards included."""

    def __init__(self) -> None:
        self._before = 0.0
        self._started: float | None = None

    def listen(self) -> None:
        """torch.compiler.reset() forgets all listeners."""
        handler = torch._dynamo.callback.callback_handler
        if self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)

    @property
    def seconds(self) -> float:
        started = self._started
        return self._before + (0.0 if started is None else time.perf_counter() - started)

    def _start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self._before, self._started = self.seconds, None


_compile_clock = _CompileClock()


def compile_seconds() -> float:
    """Seconds that this process has spent compiling since the first call of this function (torch has no public query).

    A backward is compiled when it first runs, so that calls of compiled functions do not show it.
    """
    _compile_clock.listen()
    return _compile_clock.seconds


def inside_function_transform() -> bool:
    """Whether the caller is inside torch.func.grad, vmap, jvp ... (no public query exists)."""
    return torch._C._functorch.maybe_current_level() is not None


def inside_forward_mode() -> bool:
    """Whether the caller is inside torch.autograd.forward_ad.dual_level (no public query exists)."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def register_output_type(error: BaseException, model: nn.Module) -> bool:
    """Register the output class that torch.export does not know according to `error`. Returns whether it succeeded."""
    cls = unknown_output(error)
    return cls is not None and register_type(cls, model)


def register_type(cls: type, model: nn.Module | None = None) -> bool:
    """Let torch take apart the objects of a class that holds tensors. Returns whether it succeeded.

    Dataclasses are registered by their fields, and caches of transformers models by transformers' own functions, whose
    module depends on its version.
    """
    if "__dataclass_fields__" in vars(cls):  # not of a class that only inherits them
        try:
            torch.export.register_dataclass(cls)
        except ValueError:  # such as fields that its constructor does not take
            return False
        return True
    if cls.__module__.startswith("transformers."):
        registering: list[tuple[str, str, tuple[Any, ...]]] = [
            ("transformers.integrations.executorch", "register_dynamic_cache_export_support", ())
        ]
        if model is not None:
            registering.insert(
                0, ("transformers.exporters.exporter_dynamo", "register_cache_pytrees_for_model", (model,))
            )
        for place, function, args in registering:
            try:
                register = getattr(importlib.import_module(place), function)
            except (ImportError, AttributeError):
                continue
            register(*args)
            if cls in _pytree.SUPPORTED_NODES:
                return True
    return False


def shapes_tree(spec: TreeSpec, shapes: Sequence[Any]) -> Any:
    """The dynamic shapes of a call's leaves as torch.export takes them: containers of classes that are not Python's own
    as lists."""
    if spec.is_leaf():
        return shapes[0]
    remaining = iter(shapes)
    parts = [shapes_tree(child, list(itertools.islice(remaining, child.num_leaves))) for child in spec.children()]
    if spec.type not in _pytree.BUILTIN_TYPES:
        return parts
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(parts, spec.context)
