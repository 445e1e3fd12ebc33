"""What a model's code does that every captured graph would lose."""

from __future__ import annotations

import contextlib
import inspect
import os
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.module_paths import running_module
from autopar.capture.uncaptured_trace import RefusedError

_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_PASSING_ON = (__file__, traceback.__file__, *map(inspect.getfile, (nn.Module, torch.Tensor, TorchFunctionMode)))
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
            elif wanted is not None and wanted != args[0].requires_grad and not _torch_calls():
                why = f"sets requires_grad to {wanted} on a tensor"
            path = running_module(model) if why else None
            if path is not None:
                why = f"{why} ({_line_of_model()}), which a captured graph loses"
                raise LostEffectError(f"module '{path or '(root)'}' {why}; do that outside of the model", path, why)
            return func(*args, **(kwargs or {}))

    with EffectWatcher():
        yield


_SET_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _wanted_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """What `tensor.requires_grad_(...)`, or an assignment to `tensor.requires_grad`, sets; None for other calls."""
    if func == _SET_REQUIRES_GRAD:
        return bool(args[1])
    if func is torch.Tensor.requires_grad_:
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return None


def _callers() -> Iterator[tuple[str, int]]:
    """File and line of the running code, innermost first, without what passes a call on."""
    for frame, number in traceback.walk_stack(None):
        if frame.f_code.co_name != "__torch_function__" and frame.f_code.co_filename not in _PASSING_ON:
            yield frame.f_code.co_filename, number


def _torch_calls() -> bool:
    """Whether torch or autopar itself makes the call under way, for a tensor of its own."""
    return next(_callers())[0].startswith(_OWN_FILES)


def _line_of_model() -> str:
    """The line that runs, as file:line, outside of torch and autopar."""
    return next(f"{file}:{number}" for file, number in _callers() if not file.startswith(_OWN_FILES))
