"""Every error and warning that autopar raises on purpose.

Each message names what was wrong (module path, tensor, value) and what would be right.
"""

import sys
import warnings

from cost_models.errors import DeviceError

_NOT_THE_USERS = ("autopar", "torch", "contextlib")


class AutoparError(Exception):
    """Base class of autopar's own errors."""


class CaptureError(AutoparError):
    """The model cannot be captured as one graph; names the module path, the source line and what to change."""


class InputError(AutoparError, ValueError):
    """An argument of a call does not fit: names the argument, its value and what would be right."""


class PlanError(AutoparError, ValueError):
    """A plan does not fit the model, the devices or the batch; lists every violation."""


class InfeasibleError(AutoparError):
    """No plan fits the memory limit; says by how much and which stage."""


class NotANumberError(AutoparError, FloatingPointError):
    """A stage made a NaN (looked for with watch_nan=True); names the operator, the stage and the micro-batch."""


class AutoparWarning(UserWarning):
    """Something that changes the numbers or the speed that a user may not expect, said once."""


def warn(message: str) -> None:
    """An AutoparWarning that names the user's line: the first outside autopar and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
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
