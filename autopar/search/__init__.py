"""Exact search for a stage partition: `solve(problem)` over plain costs in seconds and bytes."""

from autopar.search.partition import explain_infeasible, relaxed_bound, solve
from autopar.search.problem import Infeasibility, Kind, Problem, Shared, Solution, Space, StageChoice, Value

__all__ = [
    "Infeasibility",
    "Kind",
    "Problem",
    "Shared",
    "Solution",
    "Space",
    "StageChoice",
    "Value",
    "explain_infeasible",
    "relaxed_bound",
    "solve",
]
