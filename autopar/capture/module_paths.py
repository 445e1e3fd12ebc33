"""Which module of a model an object is while a tracer runs the model's code.

torch.export calls a module that the model has under several names through proxies: objects of a class of their own that
share the module's `__dict__`. So a module is identified by this dictionary, not by their identity.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import nn


class ModulePaths:
    """The paths of some modules of a model."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = dict(modules)  # kept: the dictionaries must live as long as their ids are compared
        self._paths = {id(vars(module)): path for path, module in self._modules.items()}

    def of(self, value: Any) -> str | None:
        """The path of a module, or of export's proxy of it; None for anything else."""
        return self._paths.get(id(vars(value))) if isinstance(value, nn.Module) else None

    def of_frame(self, frame: FrameType) -> str | None:
        """The path of the module whose method runs in `frame`."""
        code = frame.f_code
        # The first argument: `self`, whatever its name.
        return self.of(frame.f_locals.get(code.co_varnames[0])) if code.co_argcount else None


def running_module(model: nn.Module) -> str | None:
    """The path of the innermost module of the model whose code runs; None where none does.

    `child.requires_grad_()` is code of the module that calls it.
    """
    paths = ModulePaths(model.named_modules())
    stack = traceback.walk_stack(sys._getframe(1))
    frames = (frame for frame, _ in stack if frame.f_code is not nn.Module.requires_grad_.__code__)
    return next((path for frame in frames if (path := paths.of_frame(frame)) is not None), None)
