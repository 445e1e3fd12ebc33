"""The errors and warnings of autopar.

Each message names the module path, tensor and value that is wrong, and what would be right.
"""

import contextlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import cost_models
from cost_models.errors import AutoparError, DeviceError
from cost_models.measuring.cache import unusable_values_counted

_OTHER_CODE = ("autopar", "torch", "contextlib")  # packages whose lines a warning does not name


_Error = TypeVar("_Error", bound=BaseException)


class CaptureError(AutoparError):
    """The model cannot be captured as one graph. The message names the module path, the source line and the change."""


class InputError(AutoparError, ValueError):
    """An argument of a call does not fit. The message names the argument, its value and what would be right."""


class WrongCallError(CaptureError, InputError):
    """The model itself raises on the call, so it cannot be captured. The message has its error and the source line."""


class PlanError(AutoparError, ValueError):
    """A plan does not fit the model, the devices or the batch. The message lists every violation."""


class InfeasibleError(AutoparError):
    """No plan fits the memory. The message names the stage and the bytes that it lacks."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written, or there is none that can be read. The message names the directory and why."""


class NotANumberError(AutoparError, FloatingPointError):
    """With watch_nan=True: an operator produced a NaN. The message names it, its stage and the micro-batch."""


class AutoparWarning(UserWarning):
    """Something unexpected that changes results or speed. Each warning appears once."""


_given: ContextVar[set[Any] | None] = ContextVar("given", default=None)  # warnings since the outermost context began


@contextlib.contextmanager
def each_warning_once(given: set[Any]) -> Iterator[None]:
    """Inside, `warn` and `issue_again` give each warning once, and caches say once what they cannot use. `given`: those
    that were given before; grows.

    Contexts nest: the outermost one counts, so that a call that captures and plans several times warns once.
    """
    token = _given.set(given if _given.get() is None else _given.get())
    try:
        with unusable_values_counted():
            yield
    finally:
        _given.reset(token)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, `warn` shows nothing, and what it is called with does not count as given."""
    token = _given.set(set())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoparWarning)
            yield
    finally:
        _given.reset(token)


def warn(message: str) -> None:
    """Issue an AutoparWarning for the line in the user's code, the first one outside autopar and torch."""
    if not _is_new(message):
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OTHER_CODE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AutoparWarning, stacklevel=level)


def issue_again(caught: Iterable[warnings.WarningMessage]) -> None:
    """Issue recorded warnings of the user's own code for the lines that they came from."""
    for one in caught:
        if _is_new((str(one.message), one.category, one.filename, one.lineno)):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _is_new(warning: Any) -> bool:
    given = _given.get()
    if given is None:
        return True
    known = warning in given
    given.add(warning)
    return not known


__all__ = [
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "CheckpointError",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "NotANumberError",
    "PlanError",
    "each_warning_once",
    "issue_again",
    "warn",
    "without_warnings",
]


def users_line(error: BaseException) -> str | None:
    """`file:line` of the innermost line in a traceback that is neither autopar's nor an installed package's."""
    if isinstance(error, SyntaxError) and error.filename and not _is_installed(error.filename):
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{short_path(file)}:{line}" for file, line in reversed(frames) if not _is_installed(file)), None)


def is_users_own(error: BaseException) -> bool:
    """Whether code that is neither autopar's nor an installed package's raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and not _is_installed(frames[-1].f_code.co_filename)


def without_frames(error: _Error) -> _Error:
    """The error, which no longer holds what the code around it had."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}".splitlines()[0].removesuffix(": ")


def short_path(file: str) -> str:
    """A path relative to the current directory, if it lies inside."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else file


def _is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to autopar."""
    own = [str(Path(str(module.__file__)).parent) for module in (sys.modules["autopar"], cost_models)]
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")] + own
    return file.startswith("<") or any(Path(file).is_relative_to(folder) for folder in folders)
