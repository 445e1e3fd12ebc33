"""Pipeline and shard ordinary PyTorch models over several devices by a plan that measurement and search choose.

The first use of a public name loads everything: `import autopar` and `autopar --version` do not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.public import *  # noqa: F403

_PUBLIC = (
    *("Accuracy", "AutoparError", "AutoparWarning", "CaptureError", "Cluster", "Comparison", "DeviceError"),
    *("InfeasibleError", "InputError", "Layout", "NotANumberError", "PipelinedModule", "Plan", "PlanDiff", "PlanError"),
    *("Profile", "StepProfile", "accuracy", "clear_hints", "compare", "keep_together", "parallelize"),
    *("pipeline_stage", "plan", "profile", "recompute", "shard"),
)

__all__ = ["__version__", *_PUBLIC]


class _Package(ModuleType):
    """This package. The name `plan` is the call, not the folder of that name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, such as `__wrapped__`
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        public = importlib.import_module("autopar.public")
        for own in _PUBLIC:
            self.__dict__[own] = getattr(public, own)
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PUBLIC and isinstance(value, ModuleType):
            return  # Python stores an imported subpackage as an attribute of its package
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *_PUBLIC})


sys.modules[__name__].__class__ = _Package
