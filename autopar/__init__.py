"""Pipeline and shard ordinary PyTorch models over several devices by a plan that measurement and search choose.

The first use of a public name loads its module: `import autopar` and `autopar --version` do not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopar.version import __version__

if TYPE_CHECKING:
    from autopar.api import accuracy, compare, parallelize, plan, profile
    from autopar.costs.prediction_error import Accuracy
    from autopar.costs.profile import Profile
    from autopar.errors import (
        AutoparError,
        AutoparWarning,
        CaptureError,
        CheckpointError,
        InfeasibleError,
        InputError,
        NotANumberError,
        PlanError,
        WrongCallError,
    )
    from autopar.hints.layout import Layout
    from autopar.hints.module_hints import clear_hints, keep_together, pipeline_stage, recompute
    from autopar.hints.shard import shard
    from autopar.plan.diff import PlanDiff
    from autopar.plan.plan import Plan
    from autopar.planner.cluster_comparison import ClusterComparison
    from autopar.report.document import Report
    from autopar.runtime.checkpoints.load import Checkpoint, load
    from autopar.runtime.checkpoints.save import save
    from autopar.runtime.checkpoints.saving import Saving
    from autopar.runtime.comparing.comparison import Comparison
    from autopar.runtime.grad_scaler import GradScaler
    from autopar.runtime.gradient_norm import clip_grad_norm_
    from autopar.runtime.host_memory import keep_freed_memory
    from autopar.runtime.module import PipelinedModule
    from autopar.runtime.step_profile import StepProfile
    from cost_models import Cluster
    from cost_models.errors import DeviceError

__all__ = [
    "Accuracy",
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "Cluster",
    "ClusterComparison",
    "Comparison",
    "DeviceError",
    "GradScaler",
    "InfeasibleError",
    "InputError",
    "Layout",
    "NotANumberError",
    "PipelinedModule",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Profile",
    "Report",
    "Saving",
    "StepProfile",
    "WrongCallError",
    "__version__",
    "accuracy",
    "clear_hints",
    "clip_grad_norm_",
    "compare",
    "keep_freed_memory",
    "keep_together",
    "load",
    "parallelize",
    "pipeline_stage",
    "plan",
    "profile",
    "recompute",
    "save",
    "shard",
]

_HOMES = {  # public names whose module is not autopar.api or autopar.errors
    "Accuracy": "autopar.costs.prediction_error",
    "Checkpoint": "autopar.runtime.checkpoints.load",
    "Cluster": "cost_models",
    "ClusterComparison": "autopar.planner.cluster_comparison",
    "Comparison": "autopar.runtime.comparing.comparison",
    "DeviceError": "cost_models.errors",
    "GradScaler": "autopar.runtime.grad_scaler",
    "Layout": "autopar.hints.layout",
    "PipelinedModule": "autopar.runtime.module",
    "Plan": "autopar.plan.plan",
    "PlanDiff": "autopar.plan.diff",
    "Profile": "autopar.costs.profile",
    "Report": "autopar.report.document",
    "Saving": "autopar.runtime.checkpoints.saving",
    "StepProfile": "autopar.runtime.step_profile",
    "clear_hints": "autopar.hints.module_hints",
    "clip_grad_norm_": "autopar.runtime.gradient_norm",
    "keep_freed_memory": "autopar.runtime.host_memory",
    "keep_together": "autopar.hints.module_hints",
    "load": "autopar.runtime.checkpoints.load",
    "pipeline_stage": "autopar.hints.module_hints",
    "recompute": "autopar.hints.module_hints",
    "save": "autopar.runtime.checkpoints.save",
    "shard": "autopar.hints.shard",
}


class _Package(ModuleType):
    """This package. The names `plan` and `shard` are the calls, not folders or files of that name."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'autopar' has no attribute {name!r}")
        importlib.import_module("autopar.api")  # the texts of plans and reports are registered with it
        home = _HOMES.get(name, "autopar.errors" if name.endswith(("Error", "Warning")) else "autopar.api")
        self.__dict__[name] = getattr(importlib.import_module(home), name)
        return self.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            return  # Python stores an imported subpackage as an attribute of its package
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *__all__})


sys.modules[__name__].__class__ = _Package
