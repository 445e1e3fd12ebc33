"""Exact search for a stage partition: `solve(problem)` over plain costs in seconds and bytes."""

from autopar.search.partition import explain_infeasible, solve
from autopar.search.problem import Infeasibility, Kind, Problem, Shared, Solution, StageChoice, Value

__all__ = [
    "Infeasibility",
    "Kind",
    "Problem",
    "Shared",
    "Solution",
    "StageChoice",
    "Value",
    "explain_infeasible",
    "solve",
]
