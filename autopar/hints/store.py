"""Where a module keeps the user's hints: a plain attribute, so that deep copies and pickles of a model keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from autopar.errors import InputError

# {"stage": int, "recompute": True, "together": (set, ...), "shard": {...}}, whichever were given. Plain types, so that
# such a pickle needs no autopar.
_NAME = "_autopar_hints"


def hints_of(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = module.__dict__.get(_NAME, {})
    return found


def mark(module: nn.Module, hint: str, value: object) -> None:
    # A new dict every time: a shallow copy of the module must not change with it.
    module.__dict__[_NAME] = {**hints_of(module), hint: value}


def unmark(module: nn.Module) -> None:
    module.__dict__.pop(_NAME, None)


def check_modules(function: str, modules: Sequence[object]) -> None:
    """Raises InputError."""
    wrong = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if wrong:
        raise InputError(f"{function} takes torch.nn.Module, got {', '.join(wrong)}")
