"""Showing plans, profiles, runs and comparisons. The imports register what print() shows of values of lower rooms."""

from autopar.report import diff, explain, inside, text

__all__ = ["diff", "explain", "inside", "text"]
