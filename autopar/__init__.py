"""Pipelines ordinary PyTorch models over the devices at hand, with the plan chosen by measurement and search."""

from autopar.api import parallelize, plan
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
from autopar.runtime.module import PipelinedModule

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "AutoparWarning",
    "CaptureError",
    "DeviceError",
    "InfeasibleError",
    "InputError",
    "PipelinedModule",
    "Plan",
    "PlanError",
    "parallelize",
    "plan",
]
