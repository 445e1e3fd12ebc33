"""An explanation of a plan, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.plan.display import shown
from autopar.plan.plan import Plan
from autopar.plan.validation import replicas
from autopar.planner.change import Change
from autopar.planner.explain import PER_HALF, Bottleneck, Explanation
from autopar.planner.other_launches import untried_launch
from autopar.report.quantities import percent, seconds_text
from autopar.report.tables import bullet, milliseconds, paragraph, table

_BOUNDS = {
    "compute": "its own work",
    "collectives": "collectives among its devices",
    "link": "waiting for what other stages send",
    "whole batch": "what it does once on the whole batch: the end of the model, or the loss",
    "wait for whole batch": "waiting for what another device does on the whole batch",
    "memory": "memory: with more of it the search would choose another plan",
    "bubble": "waiting for the pipeline to fill and drain",
}
_SPENT = {
    "compute": "computing",
    "collectives": "in collectives",
    "link": "waiting for what other stages send",
    "whole batch": "on the whole batch, with the end of the model or the loss",
    "wait for whole batch": "waiting for what another device does on the whole batch",
    "bubble": "waiting for the pipeline to fill and drain",
}
_SEEN = 0.005  # a smaller share of the step is not mentioned
_ALIKE = 0.1  # shares of the step that differ by less bind alike
_HELPS = 0.005  # gains below this share of the step help nobody


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
    helps = tuple(change for change in explained.helps if change.gain(plan) >= 0)
    if helps:
        parts.append(_changes("what would help", helps, plan, "saves"))
    if explained.idle:
        parts.append("\n".join(map(bullet, idle_lines(explained))))
    if explained.partial and plan.predicted_step_time is not None:
        parts.append(
            paragraph(
                "This uses the plan's own numbers; only a new search can tell what limits and more memory change."
            )
        )
    return "\n\n".join(parts)


def idle_lines(explained: Explanation) -> Iterator[str]:
    """Devices without work, one sentence for each reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, why in explained.idle:
        names[why].append(name)
    for why, several in names.items():
        yield f"{replicas(several)} {'has' if len(several) == 1 else 'have'} nothing to do: {why}"


def _headline(explained: Explanation) -> str:
    bottleneck = explained.bottleneck
    if bottleneck is None and any(stage.sharding for stage in explained.plan.stages):
        return paragraph("The plan does not predict its step; explain(path) explains the strategies in a module.")
    if bottleneck is None:
        return paragraph("The plan has no predictions: it was made by hand, and autopar.compare has not priced it.")
    head = _head(explained, bottleneck)
    shares = ", ".join(f"{what} {share:.0%}" for what, share in bottleneck.shares)
    step = f"Its step of {milliseconds(explained.plan.predicted_step_time)} ms is {shares}."
    return f"{paragraph(head)}\n{paragraph(step)}"


def bottleneck_text(explained: Explanation) -> str:
    """Where the step's time goes, in one paragraph; for an explanation with a bottleneck."""
    bottleneck = explained.bottleneck
    assert bottleneck is not None, "the explanation has a bottleneck"
    parts = [f"{share:.0%} {_SPENT[what]}" for what, share in bottleneck.shares if share >= _SEEN]
    spent = f"{', '.join(parts[:-1])}{' and ' if parts[:-1] else ''}{parts[-1]}"
    step = seconds_text(explained.plan.predicted_step_time)
    return f"{_head(explained, bottleneck)} Of the predicted step of {step}, it spends {spent}."


def _head(explained: Explanation, bottleneck: Bottleneck) -> str:
    where = replicas(bottleneck.devices)
    bound, *others = [_BOUNDS[bottleneck.bound], *_beside(bottleneck)]
    alike = f"about equally by {bound} and by {others[0]}" if others else f"by {bound}"
    return f"The bottleneck is stage {bottleneck.stage} on {where}, bound {alike}.{_most_helps(explained, bottleneck)}"


def _beside(bottleneck: Bottleneck) -> list[str]:
    """What binds about as much as the bound itself."""
    shares = dict(bottleneck.shares)
    most = shares.pop(bottleneck.bound, None)
    if most is None:  # memory is no share of the step
        return []
    return [_BOUNDS[name] for name, share in shares.items() if share > most - _ALIKE]


def _most_helps(explained: Explanation, bottleneck: Bottleneck) -> str:
    """Sentences, behind a blank: the change that saves most of those that are shown, and what was not tried."""
    plan = explained.plan
    best = max(explained.helps, key=lambda change: change.gain(plan), default=None)
    finer = plan.ranks > 1 and bottleneck.bound == "compute" and not plan.one_worker
    less = " A finer split of the model may take work off this stage." if finer else ""
    if untried_launch(plan):
        less += " launch='compiled' was not tried, which needs the model: Plan.load(path, model, devices, ...)."
    if best is None or best.gain(plan) <= _HELPS:
        return less
    what, gain = best.what.removesuffix(PER_HALF), percent(best.gain(plan))
    gain += " for equally many samples" * (what != best.what)
    return f" Of the changes that were tried, {what} would save most: {gain}.{less}"


def _changes(title: str, changes: tuple[Change, ...], plan: Plan, verb: str) -> str:
    sign = -1 if verb == "loses" else 1
    rows = [[c.what, milliseconds(c.step_time), percent(sign * c.gain(plan))] for c in changes]
    return table([title, "step ms", verb], rows, words=1)
