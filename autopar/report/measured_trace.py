"""A measured step as a Chrome trace, and the predicted and measured steps of a report in one.

pid   rank: devices by the stages that they have, or as in the plan where the trace has the predicted step, too
X     a part of an action between waits, and a wait
s, f  a value or gradient, from when it was sent to when its receiver went on
C     bytes of tensors on a GPU as its actions end
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from autopar.errors import InputError
from autopar.plan.display import traced
from autopar.plan.plan import Plan
from autopar.planner.predicted_step import step_of_plan
from autopar.report.chrome_trace import predicted_events
from autopar.report.document import Report
from autopar.report.trace_events import COMPUTING, PHASES, TraceEvent, TraceProcesses, write
from autopar.runtime.step_profile import StepProfile
from autopar.schedule.clock import Phase


@traced.register
def _(profile: StepProfile, path: Path, rank: int | None) -> None:
    ranks = _ranks_of(profile)
    if rank is not None and rank not in ranks.values():
        raise InputError(f"rank {rank!r} has no trace; the step has ranks 0..{len(ranks) - 1}")
    events = [e for e in _events(profile, TraceProcesses(), ranks) if rank is None or e["pid"] == rank]
    if rank is not None:
        events = [event for event in events if event["ph"] not in "sf"]  # an arrow has its other end elsewhere
    write(path, events, f"measured step of {profile.seconds} s, {profile.schedule}", len(ranks), rank)


@traced.register
def _(report: Report, path: Path, rank: int | None) -> None:
    """The predicted step, the measured one, or both, one below the other."""
    plans = [one for one in report.steps if isinstance(one, Plan) and step_of_plan(one) is not None]
    profiles = [one for one in report.steps if isinstance(one, StepProfile) and one.actions]
    if not (plans or profiles):
        raise InputError(
            "this report has no step to trace: only reports of a plan or a pipelined module have one, if the plan has "
            "predictions, or a step was profiled with train_step(..., profile=True)"
        )
    if rank is not None or not (plans and profiles):
        traced([*plans, *profiles][-1], path, rank)
        return
    plan, profile, numbers = plans[0], profiles[0], itertools.count(1)
    step = step_of_plan(plan)
    assert step is not None
    world = len(plan.used_devices)
    events = predicted_events(plan, step.timeline(), TraceProcesses("predicted, ", 0, 2, 0, numbers), None)
    places = {name: number for number, name in enumerate(plan.used_devices)}
    ranks = {name: places[name] for name in _ranks_of(profile)}
    events += _events(profile, TraceProcesses("measured, ", world, 2, 1, numbers), ranks)
    write(path, events, f"predicted and measured step of {plan.places}, {plan.schedule}", world, None)


def _ranks_of(profile: StepProfile) -> dict[str, int]:
    """By the name of a device."""
    return {name: number for number, name in enumerate(dict.fromkeys(one.device for one in profile.stages))}


def _events(profile: StepProfile, processes: TraceProcesses, ranks: Mapping[str, int]) -> Iterator[TraceEvent]:
    for name, rank in ranks.items():
        stages = ", ".join(str(one.stage) for one in profile.stages if one.device == name)
        yield from processes.named(rank, f"{name}, stage {stages}", {COMPUTING: "computing"})
    for one in profile.actions:
        rank, about = ranks[one.device], {"stage": one.stage, "micro-batch": one.microbatch}
        name = f"{PHASES[Phase(one.phase)]} of stage {one.stage}"
        for start, end in one.spans:
            yield processes.kernel(name, rank, COMPUTING, start, end, **about)
        for (_, start), (end, _) in itertools.pairwise(one.spans):
            yield processes.annotation("waiting for a message", rank, COMPUTING, start, end, **about)
        if one.allocated is not None:
            yield processes.counter("bytes allocated", rank, one.spans[-1][1], {"tensors": one.allocated})
    for send in profile.sends:
        what = "gradient" if send.gradient else "value"
        ends = (ranks[send.device], send.sent), (ranks[send.to_device], send.received)
        yield from processes.arrow(what, *ends)
