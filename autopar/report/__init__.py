"""Showing plans, profiles, runs and comparisons. The imports register what print() shows of values of lower rooms."""

from autopar.report import (
    chrome_trace,
    cluster_comparison,
    comparison,
    comparison_figure,
    configuration,
    diff,
    explain,
    operator_strategies,
    plan,
    prediction_error,
    profile,
    step,
)

__all__ = [
    "chrome_trace",
    "cluster_comparison",
    "comparison",
    "comparison_figure",
    "configuration",
    "diff",
    "explain",
    "operator_strategies",
    "plan",
    "prediction_error",
    "profile",
    "step",
]
