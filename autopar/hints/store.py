"""Where a module keeps the user's hints: a plain attribute, which deep copies and pickles of the model keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.errors import InputError
from autopar.hints.layout import ShardHint

_ATTRIBUTE = "_autopar_hints"


@dataclass(frozen=True)
class ModuleHints:
    """The hints on one module."""

    stage: int | None = None  # of `pipeline_stage`
    recompute: bool = False
    # Of `keep_together`: one empty set per group, which all modules of the group share; see `module_hints`.
    groups: tuple[set[object], ...] = ()
    shard: ShardHint | None = None


_NO_HINTS = ModuleHints()


def hints_of(module: nn.Module) -> ModuleHints:
    """The hints on `module` itself."""
    hints: ModuleHints = module.__dict__.get(_ATTRIBUTE, _NO_HINTS)
    return hints


def has_hints(module: nn.Module) -> bool:
    """Whether `module` itself has a hint."""
    return _ATTRIBUTE in module.__dict__


def add_hint(module: nn.Module, **changes: Any) -> None:
    """Set fields of the module's `ModuleHints`."""
    # The value is replaced, never changed: a shallow copy of the module keeps its own hints.
    module.__dict__[_ATTRIBUTE] = replace(hints_of(module), **changes)


def remove_hints(module: nn.Module) -> None:
    """Remove all hints on `module` itself."""
    module.__dict__.pop(_ATTRIBUTE, None)


def check_modules(function: str, modules: Sequence[object]) -> None:
    """Raise InputError, naming the public `function`, unless all of `modules` are modules."""
    wrong = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if wrong:
        raise InputError(f"{function} takes torch.nn.Module, got {', '.join(wrong)}")
