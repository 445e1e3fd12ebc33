"""The differences between two plans, as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from autopar.hints.module_paths import few
from autopar.plan.diff import Fact, PlanDiff, Quantity
from autopar.plan.display import shown
from autopar.report.tables import bullet, megabytes, milliseconds, table


@shown.register(PlanDiff)
def diff_text(diff: PlanDiff) -> str:
    """What `print(a.diff(b))` shows."""
    if diff.same:
        return "the plans are the same"
    parts = ["the plans make the same decisions; their predictions differ"] if diff.same_decisions else []
    if diff.settings:
        rows = [[s.name, _shown(s.before), _shown(s.after)] for s in diff.settings]
        parts.append(table(["", "before", "after"], rows, words=3))
    lines = [
        f"{modules} ({_operators(n)}): stage {before} -> {after}"
        for modules, n, (before, after) in _runs((m.module, m.n_operators, (m.before, m.after)) for m in diff.moves)
    ]
    lines += [
        f"{modules} ({_operators(n)}): {'recomputed now' if now else 'no longer recomputed'}"
        for modules, n, now in _runs((r.module, r.n_operators, r.now) for r in diff.recomputed)
    ]
    lines += [
        f"only the {which} plan names {few(names)}"
        for which, names in (("first", diff.only_before), ("second", diff.only_after))
        if names
    ]
    if lines:
        parts.append("\n".join(map(bullet, lines)))
    if diff.quantities:
        rows = [
            [_title(q), _number(q, q.before), _number(q, q.after), "-" if q.ratio is None else f"{q.ratio:.3g}x"]
            for q in diff.quantities
        ]
        parts.append(table(["predicted", "before", "after", "after/before"], rows))
    return "\n\n".join(parts)


def _runs(items: Iterable[tuple[str, int, Any]]) -> list[tuple[str, int, Any]]:
    """Neighbouring modules with the same value as `first .. last`, with the sum of their operators."""
    runs = []
    for value, run in itertools.groupby(items, key=lambda item: item[2]):
        members = list(run)
        names = [module or "the whole model" for module, _, _ in members]
        shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        runs.append((shown, sum(n for _, n, _ in members), value))
    return runs


def _operators(count: int) -> str:
    return f"{count} operator{'s' if count > 1 else ''}"


def _shown(value: Fact) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _title(quantity: Quantity) -> str:
    return quantity.name + {"s": ", ms", "bytes": ", MB", "": ""}[quantity.unit]


def _number(quantity: Quantity, value: float | None) -> str:
    if quantity.unit == "":
        return "-" if value is None else f"{value:.1%}"
    return milliseconds(value) if quantity.unit == "s" else megabytes(value)
