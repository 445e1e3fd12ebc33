"""Showing plans, profiles, runs and comparisons. The imports register what print() shows of values of lower rooms."""

from autopar.capture.module_state import generators_restored

with generators_restored():  # on import, rich draws a number from the generator that the user may have seeded
    import rich.style  # noqa: F401

from autopar.report import (
    chrome_trace,
    cluster_comparison,
    comparison,
    comparison_figure,
    comparison_report,
    configuration,
    diff,
    explain,
    measured_trace,
    memory_snapshot,
    operator_strategies,
    plan,
    prediction_error,
    profile,
    profile_report,
    progress,
    step,
)
from autopar.report.plan_report import build, module

__all__ = [
    "build",
    "chrome_trace",
    "cluster_comparison",
    "comparison",
    "comparison_figure",
    "comparison_report",
    "configuration",
    "diff",
    "explain",
    "measured_trace",
    "memory_snapshot",
    "module",
    "operator_strategies",
    "plan",
    "prediction_error",
    "profile",
    "profile_report",
    "progress",
    "step",
]
