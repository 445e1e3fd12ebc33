"""Errors that all ranks raise for one reason: rank 0 shows them, the others end with a line."""

from __future__ import annotations

import pickle
import sys
import time
from types import TracebackType
from typing import Any, TypeVar

from autopar.errors import AutoparError

_Error = TypeVar("_Error", bound=BaseException)
_HEAD_START = 1.0  # s that rank 0 has to show the error: torchrun ends all ranks as soon as one has ended

_installed: list[int] = []  # the rank whose errors are shown so, if any


def on_all_ranks(error: _Error) -> _Error:
    """Mark an error that every rank raises, so that only rank 0 shows it."""
    error.__dict__["on_all_ranks"] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    return bool(getattr(error, "on_all_ranks", False))


def sendable(error: Exception) -> Exception:
    """An error that other ranks can raise: itself, or an AutoparError with its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AutoparError(f"{type(error).__name__}: {error}")
    return error


def shown_once(rank: int) -> None:
    """From now on, this process shows errors that all ranks raise only if it is rank 0."""
    first = not _installed
    _installed[:] = [rank]
    if not first:
        return
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        if not _installed[0] or not is_on_all_ranks(error):
            return before(kind, error, traceback)
        time.sleep(_HEAD_START)
        print(f"rank {_installed[0]} ends for the reason that rank 0 gives", file=sys.stderr, flush=True)
        return None

    sys.excepthook = show
