"""The differences between two plans, as text: what a person would say first, then the numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autopar.errors.names import few
from autopar.plan.diff import Fact, PlanDiff, Quantity, Setting, StageMode
from autopar.plan.display import shown
from autopar.plan.recompute import RECOMPUTE, WHAT_RUNS_AGAIN, Recompute
from autopar.planner import step_parts  # noqa: F401  registers the parts of a predicted step
from autopar.report.tables import bullet, megabytes, milliseconds, paragraph, table

_EQUALLY_FAST = 0.005  # share of a step
_A_REASON = 0.1  # share of the difference between two steps that a part must make up to be named
_MOST_REASONS = 3
_STEP = "step"


@shown.register(PlanDiff)
def diff_text(diff: PlanDiff) -> str:
    """What `print(a.diff(b))` shows."""
    if diff.same:
        return "the plans are the same"
    parts = ["the plans make the same decisions; their predictions differ"] if diff.same_decisions else []
    speed = _speed(diff)
    if speed:
        parts.append(paragraph(speed))
    lines = [*_settings(diff), *_recomputed(diff), *_moves(diff)]
    lines += [
        f"only the {which} plan names {few(names)}"
        for which, names in (("first", diff.only_before), ("second", diff.only_after))
        if names
    ]
    if lines:
        parts.append("\n".join(map(bullet, lines)))
    one_sided = _only_one_is_priced(diff)
    if one_sided:
        parts.append(paragraph(one_sided))
    rows = [
        [_title(q), _number(q, q.before), _number(q, q.after), "-" if q.ratio is None else f"{q.ratio:.3g}x"]
        for q in diff.quantities
        if not q.same and not one_sided
    ]
    if rows:
        parts.append(table(["predicted", "before", "after", "after/before"], rows))
    return "\n\n".join(parts)


def _only_one_is_priced(diff: PlanDiff) -> str:
    """Which plan has predictions, where the other has none, and how to get them."""
    step = next((q for q in diff.quantities if q.name == _STEP), None)
    if step is None or (step.before is None) == (step.after is None):
        return ""
    which, other = ("first", "second") if step.after is None else ("second", "first")
    return (
        f"Only the {which} plan has predictions. `Plan.load(path, model, devices, ...)`, or "
        f"`autopar.plan(model, devices, plan=plan, ...)`, prices the {other} one, too."
    )


# -- speed ------------------------------------------------------------------------------------------------------------


def _speed(diff: PlanDiff) -> str:
    """`18 % slower, 590 ms a step instead of 500 ms, because the busiest device ...`."""
    step = next((q for q in diff.quantities if q.name == _STEP), None)
    if step is None or step.before is None or step.after is None or not step.before or not step.after:
        return ""
    change = step.after / step.before - 1
    seconds = f"{milliseconds(step.after)} ms a step instead of {milliseconds(step.before)} ms"
    if abs(change) < _EQUALLY_FAST:
        return f"As fast as before: {seconds} (predicted)."
    faster = step.before / step.after - 1
    words = f"{change:.0%} slower" if change > 0 else f"{faster:.0%} faster"
    reasons = _reasons(diff.parts, step.after - step.before)
    because = f", because the busiest device spends {reasons}" if reasons else ""
    return f"{words.replace('%', ' %')}: {seconds} (predicted){because}."


def _reasons(parts: Sequence[Quantity], difference: float) -> str:
    """The parts of the step that make the difference, the largest first, and those that do the contrary."""
    changes = [(part.name, (part.after or 0.0) - (part.before or 0.0)) for part in parts]
    named = [(name, s) for name, s in changes if abs(s) >= _A_REASON * abs(difference)]
    for_it = sorted((one for one in named if one[1] * difference > 0), key=lambda one: -abs(one[1]))
    against = sorted((one for one in named if one[1] * difference < 0), key=lambda one: -abs(one[1]))
    if not for_it:
        return ""
    text = _listed([_spent(*one) for one in for_it[:_MOST_REASONS]])
    return text + (f", although {_listed([_spent(*one) for one in against[:_MOST_REASONS]])}" if against else "")


def _spent(name: str, seconds: float) -> str:
    return f"{milliseconds(abs(seconds))} ms {'more' if seconds > 0 else 'less'} on {name}"


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


# -- decisions --------------------------------------------------------------------------------------------------------


def decisions_in_words(diff: PlanDiff) -> list[str]:
    """What the second plan does otherwise, in the terms of a plan by hand: degrees, schedule, recomputation."""
    return [*map(_in_words, diff.degrees), *_recomputed(diff)]


_PLURALS = {"stages": ("stage", "stages"), "micro-batches": ("micro-batch", "micro-batches")}


def _settings(diff: PlanDiff) -> Iterator[str]:
    for setting in diff.settings:
        if setting in diff.degrees or not setting.of_recomputation:  # else said by stage
            yield _in_words(setting)


def _in_words(one: Setting) -> str:
    before, after = _shown(one.before), _shown(one.after)
    if one.name in _PLURALS:
        single, several = _PLURALS[one.name]
        return f"{after} {single if one.after == 1 else several} instead of {before}"
    if one.name == "training":
        return "for training, no longer for inference" if one.after else "for inference, no longer for training"
    if one.name == "schedule":
        return f"schedule {after} instead of {before}"
    if one.name == "batch size":
        return f"for a batch of {after} samples instead of {before}"
    if one.name == "model":
        return "for another model"
    if one.name == "ZeRO":
        return f"ZeRO {after} instead of {before}"
    if one.of_recomputation:
        stages = one.name if "stages" in one.name else f"stages {one.name}"
        return f"{stages}: {after} (before: {before})"
    if one.after is None:
        return f"no {one.name} (before: {before})"
    return f"{one.name}: {after}" + ("" if one.before is None else f" (before: {before})")


def _recomputed(diff: PlanDiff) -> Iterator[str]:
    """By stage where stages do otherwise, else by modules that moved to a stage that does otherwise."""
    for (before, after), run in itertools.groupby(
        sorted(diff.modes, key=lambda one: (one.before, one.after)), key=lambda one: (one.before, one.after)
    ):
        yield f"{_again(before, after)} in {_stages(list(run))}"
    if not (diff.modes or any(setting.of_recomputation for setting in diff.settings)):
        for modules, n, now in _runs((r.module, r.n_operators, r.now) for r in diff.recomputed):
            yield f"{'recomputes' if now else 'no longer recomputes'} {modules} ({_operators(n)})"


def _again(before: str, after: str) -> str:
    old, new = RECOMPUTE[before], RECOMPUTE[after]
    if new is Recompute.NONE:
        return f"no longer recomputes {WHAT_RUNS_AGAIN[old]}"
    if old is Recompute.NONE:
        return f"recomputes {WHAT_RUNS_AGAIN[new]}"
    return f"recomputes {WHAT_RUNS_AGAIN[new]} instead of {WHAT_RUNS_AGAIN[old]}"


def _stages(modes: Sequence[StageMode]) -> str:
    numbers = [str(one.stage) for one in modes]
    return f"stage{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"


def _moves(diff: PlanDiff) -> Iterator[str]:
    moved = ((m.module, m.n_operators, (m.before, m.after)) for m in diff.moves)
    for modules, n, (before, after) in _runs(moved):
        yield f"{modules} ({_operators(n)}) moved from stage {before} to stage {after}"


def _runs(items: Iterable[tuple[str, int, Any]]) -> list[tuple[str, int, Any]]:
    """Neighbouring modules with the same value as one, with the sum of their operators: `layers.8-11`, or `a .. c`."""
    runs = []
    for value, run in itertools.groupby(items, key=lambda item: item[2]):
        members = list(run)
        names = [module or "the whole model" for module, _, _ in members]
        runs.append((_named_together(names), sum(n for _, n, _ in members), value))
    return runs


def _named_together(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    layers = [re.fullmatch(r"(.*?)(\d+)", name) for name in names]
    numbers = [int(match[2]) for match in layers if match is not None]
    parents = {match[1] for match in layers if match is not None}
    if len(numbers) == len(names) and len(parents) == 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{parents.pop()}{numbers[0]}-{numbers[-1]}"
    return f"{names[0]} .. {names[-1]}"


def _operators(count: int) -> str:
    return f"{count} operator{'s' if count > 1 else ''}"


def _shown(value: Fact) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _title(quantity: Quantity) -> str:
    return quantity.name + {"s": ", ms", "bytes": ", MB", "": ""}[quantity.unit]


def _number(quantity: Quantity, value: float | None) -> str:
    if quantity.unit == "":
        return "-" if value is None else f"{value:.1%}"
    return milliseconds(value) if quantity.unit == "s" else megabytes(value)
