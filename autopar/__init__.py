"""Pipelines ordinary PyTorch models over devices, at hand or to come, by a plan that measurement and search chose."""

from autopar.annotations import clear_hints, keep_together, pipeline_stage, recompute
from autopar.api import accuracy, compare, parallelize, plan, profile
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    CaptureError,
    DeviceError,
    InfeasibleError,
    InputError,
    NotANumberError,
    PlanError,
)
from autopar.plan import Plan
from autopar.plandiff import PlanDiff
from autopar.report.accuracy import Accuracy
from autopar.report.comparison import Comparison
from autopar.report.profile import Profile
from autopar.report.step import StepProfile
from autopar.runtime.module import PipelinedModule
from autopar.sharding_asked import Layout
from autopar.sharding_hints import shard
from autopar.version import __version__
from cost_models import Cluster

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
    "__version__",
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
