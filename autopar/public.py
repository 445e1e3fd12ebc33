"""Everything that users import from autopar. `autopar/__init__.py` loads this module when the first name is used."""

from autopar.api import accuracy, compare, parallelize, plan, profile
from autopar.costs.prediction_error import Accuracy
from autopar.costs.profile import Profile
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    CaptureError,
    InfeasibleError,
    InputError,
    NotANumberError,
    PlanError,
)
from autopar.hints.layout import Layout
from autopar.hints.module_hints import clear_hints, keep_together, pipeline_stage, recompute
from autopar.hints.shard import shard
from autopar.plan.diff import PlanDiff
from autopar.plan.plan import Plan
from autopar.runtime.comparison import Comparison
from autopar.runtime.module import PipelinedModule
from autopar.runtime.step_profile import StepProfile
from cost_models import Cluster
from cost_models.errors import DeviceError

__all__ = [
    "Accuracy",
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "Cluster",
    "Comparison",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "Layout",
    "NotANumberError",
    "PipelinedModule",
    "Plan",
    "PlanDiff",
    "PlanError",
    "Profile",
    "StepProfile",
    "accuracy",
    "clear_hints",
    "compare",
    "keep_together",
    "parallelize",
    "pipeline_stage",
    "plan",
    "profile",
    "recompute",
    "shard",
]
