"""A plan, and the last profiled step if there is one, as a report."""

from __future__ import annotations

from collections.abc import Callable

from autopar.costs.history import costs_of
from autopar.plan.display import reported
from autopar.plan.plan import Plan
from autopar.report.document import Report, Section
from autopar.report.measured_rounds import rounds_section
from autopar.report.plan_report.alternatives import runners_up, sensitivity
from autopar.report.plan_report.communication import communication
from autopar.report.plan_report.environment import environment
from autopar.report.plan_report.layouts import layouts
from autopar.report.plan_report.memory import memory
from autopar.report.plan_report.stages import stages
from autopar.report.plan_report.subject import ReportOptions, Subject
from autopar.report.plan_report.summary import summary
from autopar.report.plan_report.timeline import timeline
from autopar.report.plan_report.verdict import verdict
from autopar.report.quantities import count

_SECTIONS: tuple[Callable[[Subject], Section], ...] = (
    *(summary, stages, timeline, memory, communication, layouts),
    *(runners_up, sensitivity, environment),
)


@reported.register
def _plan(plan: Plan, **wanted: object) -> Report:
    return plan_report(Subject(plan, wanted=ReportOptions(**wanted)))  # type: ignore[arg-type]


def plan_report(subject: Subject) -> Report:
    """The report of a plan, section by section."""
    plan = subject.plan
    kinds = ", ".join(dict.fromkeys(plan.device_kinds))
    step = "training step" if plan.training else "forward pass"
    title = f"Plan of a {step} on {count(subject.n_devices, 'device')}" + (f": {kinds}" if kinds else "")
    sections = [make(subject) for make in _SECTIONS]
    if subject.comparison is not None:
        sections.insert(1, rounds_section(subject.comparison))
    steps = (plan,) if subject.profile is None else (plan, subject.profile)
    return Report(title, verdict(plan), tuple(sections), tuple(_notes(subject)), steps)


def _notes(subject: Subject) -> list[str]:
    plan = subject.plan
    if subject.measured is not None:
        return ["step measured"]
    if plan.predicted_step_time is None:
        return ["not priced"]
    return ["estimated from data sheets" if costs_of(plan) == "estimated" else "predicted from measured operators"]
