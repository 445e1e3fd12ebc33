"""How far predicted step times were from measured ones, as text."""

from __future__ import annotations

import textwrap

from autopar.costs.prediction_error import Accuracy, Distribution
from autopar.plan.display import shown
from autopar.report.tables import WIDTH, table

_HOW = "run `autopar compare MODULE:FACTORY` or a module's train_step(..., profile=True)"
_FOOT = (
    "error: |predicted - measured| / measured, of step times; signed median: of predicted / measured - 1, above 0 "
    "where steps were faster than predicted"
)


@shown.register
def _accuracy(accuracy: Accuracy) -> str:
    chosen = "".join(
        [
            f" on {accuracy.kind}" if accuracy.kind is not None else "",
            f" since {accuracy.since:%Y-%m-%d %H:%M}" if accuracy.since is not None else "",
        ]
    )
    whole = accuracy.overall
    if whole is None:
        return textwrap.fill(f"No prediction{chosen} has been measured yet: {_HOW}.", WIDTH)
    first, last = accuracy.records[0].time, accuracy.records[-1].time
    head = f"Predicted against measured steps{chosen}, from {first:%Y-%m-%d} to {last:%Y-%m-%d}"
    rows = [["all", "", *_cells(whole)]]
    for what, groups in accuracy.groups.items():
        rows += [[what, name, *_cells(one)] for name, one in groups.items()]
    columns = ["by", "", "n", "median\nerror", "p95\nerror", "worst\nerror", "signed\nmedian"]
    return "\n\n".join([textwrap.fill(head, WIDTH), table(columns, rows, words=2), textwrap.fill(_FOOT, WIDTH)])


def _cells(one: Distribution) -> list[str]:
    errors = [_percent(one.median), _percent(one.p95), _percent(one.worst), _percent(one.signed_median, "+")]
    return [str(one.n), *errors]


def _percent(fraction: float, sign: str = "") -> str:
    """Without the many digits of errors by a factor of a hundred and more, for which the table has no room."""
    return f"{fraction:{sign}.1%}" if abs(fraction) < 100 else f"{fraction * 100:{sign}.0e}%"
