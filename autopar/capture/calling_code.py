"""The code that makes a call of torch which a TorchFunctionMode sees: the model's own, or torch's."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_PASSING_ON = (__file__, traceback.__file__, *map(inspect.getfile, (nn.Module, torch.Tensor, TorchFunctionMode)))


def torch_calls() -> bool:
    """Whether torch or autopar itself makes the call under way, for a tensor of its own."""
    return next(_callers())[0].startswith(_OWN_FILES)


def line_of_model() -> str:
    """The line that runs, as file:line, outside of torch and autopar."""
    return next(f"{file}:{number}" for file, number in _callers() if not file.startswith(_OWN_FILES))


def _callers() -> Iterator[tuple[str, int]]:
    """File and line of the running code, innermost first, without what passes a call on."""
    for frame, number in traceback.walk_stack(None):
        if frame.f_code.co_name != "__torch_function__" and frame.f_code.co_filename not in _PASSING_ON:
            yield frame.f_code.co_filename, number
