"""Showing plans, profiles, runs and comparisons. The imports register what print() shows of values of lower rooms."""

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
