"""The loss functions that users give: their names, and what they must take."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from autopar.errors import InputError


def name_of(loss_fn: Any) -> str:
    name: str = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return name


def title_of(loss_fn: Any) -> str:
    """How messages name a loss function: its name, file and line."""
    code = getattr(loss_fn, "__code__", None)
    return f"loss_fn '{name_of(loss_fn)}'" + (
        f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    )


def check_arguments(loss_fn: Callable[[Any, Any], Any]) -> None:
    """Raise InputError for a function that does not take an output and a target."""
    try:
        with contextlib.suppress(ValueError):  # a builtin does not tell what it takes
            inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        called = "is called as loss_fn(output, target), which it does not take"
        raise InputError(f"{title_of(loss_fn)} {called}: {error}") from None
