"""Plans that were not chosen, and the same plan under other conditions."""

from __future__ import annotations

from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.sensitivity import sensitivity as changes_of
from autopar.report.document import Block, Paragraph, Points, Section, Table
from autopar.report.explain import idle_lines
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import percent, seconds_text

_SAME = 5e-4  # share of the step that a table with one decimal does not show


def runners_up(subject: Subject) -> Section:
    """The best plans that were not chosen, and why."""
    plan, title = subject.plan, "Runners-up"
    if not plan.runners_up or plan.predicted_step_time is None:
        text = "None are known: the plan was made by hand, or a search found no other."
        return Section(title, (Paragraph(text),))
    rows = tuple(
        (rival.description, _why_not(plan, rival.step_time), seconds_text(rival.step_time)) for rival in plan.runners_up
    )
    chosen = ("this plan", "chosen", seconds_text(plan.predicted_step_time))
    columns = ("plan", "why not", "predicted step")
    blocks: list[Block] = [Table("The fastest other plans", columns, (chosen, *rows), words=2, accents=(0,))]
    idle = tuple(idle_lines(subject.explanation))
    blocks += [Points(idle)] if idle else []
    return Section(title, tuple(blocks))


def _why_not(plan: Plan, seconds: float) -> str:
    slower = seconds / plan.predicted_step_time - 1 if plan.predicted_step_time else 0.0
    if slower > _SAME:
        return f"{percent(slower)} slower"
    if slower < -_SAME:
        return f"{percent(-slower)} faster by prediction, but it holds more, does not fit, or needs more devices"
    return "as fast, but it holds more or is less simple"


def sensitivity(subject: Subject) -> Section:
    """The step if links, devices or the batch were others."""
    plan, title = subject.plan, "Sensitivity"
    changes = list(changes_of(plan, subject.step))
    if not changes:
        return Section(title, (Paragraph("The plan has no predictions to vary."),))
    changes += subject.on_other_networks
    blocks: list[Block] = [_table(plan, "The same plan under other conditions", changes)]
    explained = subject.explanation
    searched = [*explained.limits, *(change for change in explained.helps if "memory" in change.what)]
    if searched:
        blocks.append(_table(plan, "The plan of a new search", searched))
    if not subject.wanted.search:
        blocks.append(
            Paragraph(
                "What more memory and other networks would gain, and what each limit costs, takes new searches and "
                "prices: report(search=True) makes them, for a plan that was made in this process."
            )
        )
    elif explained.partial:
        blocks.append(Paragraph("No search of this process made this plan, so nothing was searched again."))
    return Section(title, tuple(blocks))


def _table(plan: Plan, caption: str, changes: list[Change]) -> Table:
    rows = tuple((one.what, seconds_text(one.step_time), percent(-one.gain(plan), "+")) for one in changes)
    now = ("as planned", seconds_text(plan.predicted_step_time), "")
    return Table(caption, ("condition", "predicted step", "change"), (now, *rows), accents=(0,))
