"""Pipelines ordinary PyTorch models over the devices at hand, with the plan chosen by measurement and search."""

from autopar.api import compare, parallelize, plan, profile
from autopar.errors import (
    AutoparError,
    AutoparWarning,
    CaptureError,
    DeviceError,
    InfeasibleError,
    InputError,
    PlanError,
)
from autopar.plan import Plan
from autopar.report.comparison import Comparison
from autopar.report.profile import Profile
from autopar.runtime.module import PipelinedModule

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "Comparison",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "PipelinedModule",
    "Plan",
    "PlanError",
    "Profile",
    "compare",
    "parallelize",
    "plan",
    "profile",
]
