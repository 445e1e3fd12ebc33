"""The report of a pipelined module: that of its plan, and of what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.plan.display import reported
from autopar.plan.plan import Plan
from autopar.report.document import Paragraph, Report, Section
from autopar.report.plan_report.build import plan_report
from autopar.report.plan_report.subject import ReportOptions, Subject
from autopar.runtime.comparing.comparison import Comparison
from autopar.runtime.module import PLAN_COMES, PipelinedModule
from autopar.runtime.step_profile import StepProfile


@reported.register
def module_report(module: PipelinedModule, **wanted: Any) -> Report:
    """The plan in force, beside the last profiled step, if that was a step of this plan."""
    plan, checked = module.plan, ReportOptions(**wanted)
    if plan is None:
        text = f"No plan yet: {PLAN_COMES}."
        return Report(
            f"A pipelined {type(module.unwrap()).__name__}", text, (Section("At a glance", (Paragraph(text),)),)
        )
    return plan_report(_subject(module, plan, checked))


def compared_report(module: PipelinedModule, comparison: Comparison, name: str, command: str) -> Report:
    """The same for the plan `name` of a comparison, which the module runs: the step time is the median of the rounds,
    beside the plain model and the other rows."""
    assert module.plan is not None, "it was compared"
    subject = _subject(module, module.plan, ReportOptions(command=command))
    return plan_report(replace(subject, comparison=comparison, row=comparison[name]))


def _subject(module: PipelinedModule, plan: Plan, wanted: ReportOptions) -> Subject:
    profile = module.last_profile if _follows(module.last_profile, plan) else None
    return Subject(plan, profile, wanted, module.code_text, tuple(module.stages))


def _follows(profile: StepProfile | None, plan: Plan) -> bool:
    """Whether a profiled step was one of this plan: a module may have planned again since."""
    if profile is None:
        return False
    places = {(index, name) for index, stage in enumerate(plan.stages) for name in stage.devices}
    return profile.schedule == plan.schedule and all((one.stage, one.device) in places for one in profile.stages)
