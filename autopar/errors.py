"""The errors and warnings of autopar.

Each message names the module path, tensor and value that is wrong, and what would be right.
"""

import sys
import warnings

from cost_models.errors import DeviceError

_OTHER_CODE = ("autopar", "torch", "contextlib")  # packages whose lines a warning does not name


class AutoparError(Exception):
    """Base class of autopar's own errors."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph. The message names the module path, the source line and the change."""


class InputError(AutoparError, ValueError):
    """An argument of a call does not fit. The message names the argument, its value and what would be right."""


class PlanError(AutoparError, ValueError):
    """A plan does not fit the model, the devices or the batch. The message lists every violation."""


class InfeasibleError(AutoparError):
    """No plan fits the memory. The message names the stage and the bytes that it lacks."""


class NotANumberError(AutoparError, FloatingPointError):
    """With watch_nan=True: an operator produced a NaN. The message names it, its stage and the micro-batch."""


class AutoparWarning(UserWarning):
    """Something unexpected that changes results or speed. Each warning appears once."""


def warn(message: str) -> None:
    """Issue an AutoparWarning for the line in the user's code, the first one outside autopar and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OTHER_CODE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AutoparWarning, stacklevel=level)


__all__ = [
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "NotANumberError",
    "PlanError",
    "warn",
]
