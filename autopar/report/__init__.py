"""Showing plans, profiles, runs and comparisons. The imports register what print() shows of values of lower rooms."""

from autopar.report import (
    cluster_comparison,
    comparison,
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
    "cluster_comparison",
    "comparison",
    "configuration",
    "diff",
    "explain",
    "operator_strategies",
    "plan",
    "prediction_error",
    "profile",
    "step",
]
