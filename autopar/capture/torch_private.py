"""The private corners of torch that autopar needs, each wrapped once, with the reason.

`tests/test_torch_private.py` exercises every one of them, so a torch upgrade that moves one fails loudly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._export.passes import _node_metadata_hook
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

from autopar.errors import CaptureError

# torch.export speaks of nested inputs and outputs in these trees; torch has no public module for them.
TreeSpec = _pytree.TreeSpec
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# What export's passes give nodes as their module where they know of none.
NO_MODULE: str = _node_metadata_hook._EMPTY_NN_MODULE_STACK_KEY


def tree_paths(tree: Any) -> list[str]:
    """A readable path for every leaf of `tree`, such as `kwargs['attention_mask']`, in flatten order."""
    return [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(tree)[0]]


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` was made under a FakeTensorMode, which is public only for those who make the mode."""
    return isinstance(tensor, FakeTensor)


def backward_keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to retain the graph (no public query exists)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def no_custom_functions() -> Iterator[None]:
    """Refuse a user's torch.autograd.Function while a model is traced: the tracer would look through its forward and
    lose its backward without a word, and there is no public switch for that."""
    original: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] != "torch":
            raise CaptureError(
                f"torch.autograd.Function '{cls.__qualname__}' has a backward of its own, which a graph cannot carry; "
                "write it with operators, or register it (torch.library.custom_op and register_autograd)"
            )
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = classmethod(original)  # type: ignore[assignment, method-assign]


def run_backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], keep_graph: bool) -> None:
    """torch.autograd.backward for gradients of the roots' own shapes: its checks of them cost as much as the backward
    of a small operator."""
    torch.autograd.graph._engine_run_backward(
        tuple(roots), tuple(gradients), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def profiler_is_on() -> bool:
    """Whether a torch.profiler records anything in this process: naming a range costs as much as a small operator, and
    torch.autograd._profiler_enabled() answers for its own thread alone."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


SavedTensorsHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The innermost pair of torch.autograd.graph.saved_tensors_hooks in force in this thread (no public query exists),
    which another thread has to be told of."""
    found: SavedTensorsHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Hooks that were registered for all modules are off (torch.nn.modules.module has no public switch)."""
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


def _unknown_output(error: BaseException) -> type | None:
    """The class that `error` speaks of. torch 2.11 looks for the returned object itself in a table of classes, and
    stumbles over one that cannot be hashed, as dataclasses cannot."""
    found = re.search(r"<class '([\w.]+)'> in output", str(error))
    if found:
        module_name, _, class_name = found[1].rpartition(".")
        cls = getattr(sys.modules.get(module_name), class_name, None)
        return cls if isinstance(cls, type) else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    asked = [f.f_locals["cls"] for f in frames if f.f_code.co_name == "is_opaque_type" and "cls" in f.f_locals]
    return type(asked[-1]) if asked and isinstance(error, TypeError) else None


def compile_for_threads(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """torch.compile for functions that several threads call. torch 2.11 knows only for the whole process whether
    anything is being traced, and refuses calls of compiled functions while another thread compiles one: from here on
    such a call runs the function as it is."""
    torch._dynamo.config.error_on_nested_fx_trace = False
    compiled: Callable[..., Any] = torch.compile(function, backend=backend)
    return compiled


def register_output_type(error: BaseException, model: nn.Module) -> bool:
    """Teach torch's trees the output class that `error` (of torch.export) calls unknown; False if we cannot.

    Dataclasses are registered by their fields. Caches of transformers models are registered by transformers' own
    functions, whose place depends on its version.
    """
    cls = _unknown_output(error)
    if cls is None:
        return False
    module_name = cls.__module__
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        torch.export.register_dataclass(cls)
        return True
    if module_name.startswith("transformers."):
        for place, function, args in (
            ("transformers.exporters.exporter_dynamo", "register_cache_pytrees_for_model", (model,)),
            ("transformers.integrations.executorch", "register_dynamic_cache_export_support", ()),
        ):
            try:
                register = getattr(importlib.import_module(place), function)
            except (ImportError, AttributeError):
                continue
            register(*args)
            if cls in _pytree.SUPPORTED_NODES:
                return True
    return False
