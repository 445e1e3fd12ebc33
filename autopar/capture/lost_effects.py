"""What a model's code does that a captured graph would lose: refused, or warned of."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.calling_code import line_of_model, torch_calls
from autopar.capture.module_paths import ModulePaths, running_module
from autopar.capture.module_state import CONTAINERS, TORCHS_OWN, Generators, unchanged
from autopar.capture.uncaptured_trace import RefusedError
from autopar.errors import warn

# Modules whose code notes on a model what it has done to it. (The models of transformers are in transformers.models.)
_LIBRARIES = ("torch.", "transformers.utils.")
_TENSOR_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class LostEffectError(RefusedError):
    """A module does what every graph would lose, one of symbolic_trace, too."""


@contextlib.contextmanager
def refused_effects(model: nn.Module) -> Iterator[None]:
    """Inside, LostEffectError where the model's code does what a graph would lose: a hook on a tensor, random numbers
    of a generator of its own, or a change of what requires grad."""

    class EffectWatcher(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            why, wanted = "", _wanted_grad(func, args, kwargs or {})
            if func in _TENSOR_HOOKS:
                why = f"calls {func.__name__}() on a tensor"
            elif kwargs and kwargs.get("generator") is not None:
                why = f"draws with {func.__name__}(generator=...)"
            elif wanted is not None and wanted != args[0].requires_grad and not torch_calls():
                why = f"sets requires_grad to {wanted} on a tensor"
            path = running_module(model) if why else None
            if path is not None:
                why = f"{why} ({line_of_model()}), which a captured graph loses"
                raise LostEffectError(f"module '{path or '(root)'}' {why}; do that outside of the model", path, why)
            return func(*args, **(kwargs or {}))

    with EffectWatcher():
        yield


@contextlib.contextmanager
def warn_of_assignments(model: nn.Module) -> Iterator[set[str]]:
    """Inside, watch the model being traced; on leaving, warn of plain attributes that its code assigns, and of lists,
    dicts and sets that it changes: the captured graph does not do that again. Yields their paths.

    What libraries note for themselves on a user's module is among the paths, but no reason to warn. Nor is a dtype or a
    device: it follows from the inputs, and all calls of a graph agree in those of their inputs.
    """
    # Skip torch's own modules: they keep private lists of their parameters, which export swaps.
    users = [(name, m) for name, m in model.named_modules() if not type(m).__module__.startswith("torch.nn.")]
    paths = ModulePaths(users)
    assigned: set[str] = set()
    reported: set[str] = set()
    original = nn.Module.__setattr__
    containers = [
        (f"{path}.{name}".lstrip("."), value, value.copy())
        for path, module in users
        for name, value in vars(module).items()
        if type(value) in CONTAINERS and name not in TORCHS_OWN
    ]

    def recording_setattr(self: nn.Module, name: str, value: Any) -> None:
        path, own = paths.of(self), vars(self)
        known = (
            path is None
            or isinstance(value, (nn.Module, nn.Parameter))  # registered, not assigned
            or any(name in own[table] for table in ("_parameters", "_buffers", "_modules"))
        )
        if not known and not _same(own.get(name, self), value):
            assigned.add(f"{path}.{name}".lstrip("."))
            library = sys._getframe(1).f_globals.get("__name__", "").startswith(_LIBRARIES)
            if not library and not isinstance(value, (torch.dtype, torch.device)):
                reported.add(f"{path}.{name}".lstrip("."))
        original(self, name, value)

    nn.Module.__setattr__ = recording_setattr  # type: ignore[method-assign]
    try:
        yield assigned
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]
        for path, value, before in containers:
            if not unchanged((value, before), value):
                assigned.add(path)
                reported.add(path)
    if reported:
        warn(
            f"forward assigns {', '.join(sorted(reported))}, but a captured model does not change attributes; "
            "return the value, or keep it in a buffer"
        )


@contextlib.contextmanager
def calls_with_out(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the list gets the path of the module that runs for every call with `out=`."""
    callers: list[str] = []

    class OutWatcher(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and kwargs.get("out") is not None:
                module = running_module(model)
                callers.extend([module or "(root)"] if module is not None else [])
            return func(*args, **(kwargs or {}))

    with OutWatcher():
        yield callers


def warn_of_lost_out(module: fx.GraphModule, callers: list[str]) -> None:
    """Warn if a graph has fewer operators that write to `out` than there were calls (`calls_with_out`), with those in
    its blocks under no_grad or autocast.

    A tracer that decomposes such a call may leave the tensor named by `out` as it is.
    """

    def writes_to_out(node: fx.Node) -> bool:
        if isinstance(node.target, torch._ops.OpOverload):
            written = (a for a in node.target._schema.arguments if a.kwarg_only and a.alias_info is not None)
            return any(argument.name in node.kwargs for argument in written)
        return node.kwargs.get("out") is not None

    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    if len(callers) > sum(writes_to_out(node) for graph in graphs for node in graph.nodes):
        warn(
            f"module '{callers[0]}' writes into a tensor with out=, which the captured model does not do; use copy_() "
            "to write a buffer"
        )


@contextlib.contextmanager
def warn_of_other_generators() -> Iterator[None]:
    """On leaving, warn if the code inside drew random numbers that are not torch's: a graph repeats what it was traced
    with."""
    generators = Generators()
    yield
    moved = generators.others_moved()
    if moved:
        generators.restore_others()
        warn(
            f"forward draws random numbers from {moved}, and a captured model repeats for ever what followed from the "
            "first ones; draw them with torch, or outside of the model"
        )


def _same(old: Any, new: Any) -> bool:
    """Whether an assignment keeps the value; export itself replaces containers by equal ones."""
    if old is new or callable(new):
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, (tuple, list)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    return isinstance(old, (int, float, str, set)) and bool(old == new)


_SET_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _wanted_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """What `tensor.requires_grad_(...)`, or an assignment to `tensor.requires_grad`, sets; None for other calls."""
    if func == _SET_REQUIRES_GRAD:
        return bool(args[1])
    if func is torch.Tensor.requires_grad_:
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return None
