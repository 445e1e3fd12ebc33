"""Seconds of operators that are given, in place of measured ones."""

from __future__ import annotations

from typing import Any

from cost_models.measuring.operator_times import GraphTimes


class FakeTimes:
    """Every operator takes `per_row` seconds a sample, times the next factor of `disturbed`."""

    def __init__(self, per_row: float = 1e-3, disturbed: list[float] | None = None) -> None:
        self.calls: list[tuple[int, int]] = []  # (workers, rows)
        self.per_row, self.disturbed = per_row, iter(disturbed or [])

    def __call__(self, module: Any, inputs: Any, loss: Any, rows: int, device: Any, **options: Any) -> GraphTimes:
        self.calls.append((options["workers"], rows))
        names = [n.name for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        one = self.per_row * rows * next(self.disturbed, 1.0)
        return GraphTimes(rows, options["workers"], dict.fromkeys(names, one), dict.fromkeys(names, 2 * one))
