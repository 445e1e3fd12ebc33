"""An explanation of a plan, as text."""

from __future__ import annotations

from autopar.plan.display import shown
from autopar.plan.plan import Plan
from autopar.plan.validation import replicas
from autopar.planner.explain import Change, Explanation
from autopar.report.quantities import seconds_text
from autopar.report.tables import bullet, milliseconds, paragraph, table

_BOUNDS = {
    "compute": "its own work: a faster device or a finer split of the model would help most",
    "link": "waiting for what other stages send",
    "memory": "memory: with more of it the search would choose another plan",
    "bubble": "waiting for the pipeline to fill and drain",
}


@shown.register(Explanation)
def explanation_text(explained: Explanation) -> str:
    """What `print(plan.explain())` shows."""
    plan = explained.plan
    parts = [_headline(explained)]
    if plan.optimality:
        parts.append(paragraph(f"How good: {plan.optimality}."))
    if explained.runners_up:
        parts.append(_changes("runner-up", explained.runners_up, plan, "loses"))
    if explained.limits:
        parts.append(_changes("limit or hint", explained.limits, plan, "cost"))
    if explained.helps:
        parts.append(_changes("what would help", explained.helps, plan, "saves"))
    if explained.idle:
        parts.append("\n".join(bullet(f"{name} has nothing to do: {why}") for name, why in explained.idle))
    if explained.partial and plan.predicted_step_time is not None:
        parts.append(
            paragraph(
                "This uses the plan's own numbers; only a new search can tell what limits and more memory change."
            )
        )
    return "\n\n".join(parts)


def _headline(explained: Explanation) -> str:
    bottleneck = explained.bottleneck
    if bottleneck is None and any(stage.sharding for stage in explained.plan.stages):
        return paragraph("The plan does not predict its step; explain(path) explains the strategies in a module.")
    if bottleneck is None:
        return paragraph("The plan has no predictions: it was made by hand, and autopar.compare has not priced it.")
    head, shares = _sentences(explained, f"Its step of {milliseconds(explained.plan.predicted_step_time)} ms")
    return f"{paragraph(head)}\n{paragraph(shares)}"


def bottleneck_text(explained: Explanation) -> str:
    """Where the step's time goes, in one paragraph; for an explanation with a bottleneck."""
    return " ".join(_sentences(explained, f"The predicted step of {seconds_text(explained.plan.predicted_step_time)}"))


def _sentences(explained: Explanation, step: str) -> tuple[str, str]:
    """What the bottleneck is, and what the `step` consists of."""
    bottleneck = explained.bottleneck
    assert bottleneck is not None, "the explanation has a bottleneck"
    shares = ", ".join(f"{what} {share:.0%}" for what, share in bottleneck.shares)
    where = replicas(bottleneck.devices)
    head = f"The bottleneck is stage {bottleneck.stage} on {where}, bound by {_BOUNDS[bottleneck.bound]}."
    return head, f"{step} is {shares}."


def _changes(title: str, changes: tuple[Change, ...], plan: Plan, verb: str) -> str:
    sign = -1 if verb == "loses" else 1
    rows = [[c.what, milliseconds(c.step_time), f"{sign * c.gain(plan):.1%}"] for c in changes]
    return table([title, "step ms", verb], rows, words=1)
