"""A comparison of plans as text."""

from __future__ import annotations

from autopar.plan.display import shown
from autopar.report.tables import megabytes, milliseconds, paragraph, table
from autopar.runtime.comparison import Comparison, Row


@shown.register
def _comparison(comparison: Comparison) -> str:
    step = "training step" if comparison.training else "forward pass"
    head = paragraph(
        f"One {step} of {comparison.batch_size} samples on {', '.join(comparison.devices)}, "
        f"median of {len(comparison.single.steps)} steps, plans in turn"
    )
    columns = ["plan", "stages", "micro-\nbatches", "schedule", "predic-\nted ms", "meas-\nured ms", "range\nms"]
    columns += ["error", "speed-up", "peak MB\npredic-\nted", "peak MB\nmeas-\nured"]
    foot = "error: predicted / measured - 1. peak MB: of the device with the highest peak, without optimizer state."
    rows = [_cells(comparison, row) for row in comparison.rows]
    shown_table = table(columns, rows, words=2, first_to_go=["schedule", "range\nms"])
    return "\n\n".join([head, shown_table, paragraph(foot)])


def _cells(comparison: Comparison, row: Row) -> list[str]:
    single = row is comparison.single
    return [
        row.name,
        row.plan.places,
        "-" if single else str(row.plan.n_microbatches),
        "-" if single else row.plan.schedule,
        milliseconds(row.predicted),
        milliseconds(row.measured),
        f"{milliseconds(min(row.steps))}-{milliseconds(max(row.steps))}",
        "-" if row.error is None else f"{row.error:+.1%}",
        f"{comparison.speed_up(row):.2f}x",
        megabytes(max(row.predicted_memory.values(), default=None)),
        megabytes(max(row.measured_memory.values(), default=None)),
    ]
