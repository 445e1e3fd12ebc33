"""One step as a drawing: every device a lane, predicted above measured on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.report.document import Block, Code, Fold, Lane, Lanes, Paragraph, Section, Span, Table
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import count, percent, seconds_text, ticks
from autopar.runtime.step_profile import StepProfile
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Phase
from autopar.schedule.timeline import Timeline

_MOST_LANES = 24
_MOST_ROWS = 400  # of the same as a table
_MOST_TITLES = 1500  # spans that say what they are; more would make the file large

_LEGEND = ("forward", "backward", "backward to parameters", "gradient reduction", "optimizer step", "sending")
_FORWARD, _BACKWARD, _WEIGHT, _REDUCTION, _OPTIMIZER, _SENDING = range(len(_LEGEND))
_COLOUR = {Phase.FORWARD: _FORWARD, Phase.BACKWARD: _BACKWARD, Phase.INPUT: _BACKWARD, Phase.WEIGHT: _WEIGHT}


def timeline(subject: Subject) -> Section:
    """The predicted step, and the measured one."""
    plan, predicted, profile = subject.plan, subject.timeline, subject.profile
    title = "Timeline of one step"
    if predicted is None:
        counts = [stage.replicas for stage in plan.stages]
        schedule = make_schedule(plan.schedule, plan.n_microbatches, counts, training=plan.training)
        text = "The plan does not say how long its stages take, so there is no timeline."
        drawing = Code("The schedule, drawn as if all stages took equally long:", str(schedule))
        plain = "\n\n".join([text, drawing.label, str(schedule)])
        return Section(title, (Paragraph(text), drawing, *_measured_alone(profile)), plain)
    end = max(predicted.step_time, profile.seconds if profile is not None else 0.0)
    slots = _shown_slots(predicted)
    several = profile is not None and bool(profile.actions)
    lanes = list(_predicted_lanes(subject, predicted, slots, end, "predicted" if several else ""))
    if several and profile is not None:
        lanes += _measured_lanes(profile, end, "measured")
    blocks: list[Block] = [_drawing(lanes, end, _description(subject), f"Predicted timeline\n\n{predicted}")]
    blocks += _as_table(lanes, end)
    hidden = predicted.schedule.n_slots - len(slots)
    if hidden:
        blocks.append(Paragraph(f"{count(hidden, 'replica')} that do the same work at the same times are not drawn."))
    if profile is None:
        blocks.append(
            Paragraph("Nothing was measured. A step with train_step(..., profile=True) is drawn below the prediction.")
        )
    return Section(title, tuple(blocks))


def _as_table(lanes: Sequence[Lane], end: float) -> list[Block]:
    """The same for those who cannot see the drawing, where it is not too long to be read."""
    spans = [(lane, span) for lane in lanes for span in sorted(lane.spans, key=lambda span: span.start)]
    if not 0 < len(spans) <= _MOST_ROWS:
        return []
    rows = tuple(
        (f"{lane.label}{f', {lane.group}' if lane.group else ''}", span.title, seconds_text(span.start * end))
        for lane, span in spans
    )
    return [Fold("The timeline as a table", (Table("What starts when", ("device", "what", "start"), rows, words=2),))]


def _measured_alone(profile: StepProfile | None) -> tuple[Block, ...]:
    if profile is None or not profile.actions:
        return ()
    return (_drawing(_measured_lanes(profile, profile.seconds, ""), profile.seconds, "A measured step.", ""),)


def _drawing(lanes: Sequence[Lane], end: float, description: str, text: str) -> Lanes:
    used = sorted({span.colour for lane in lanes for span in lane.spans})
    titled = sum(len(lane.spans) for lane in lanes) <= _MOST_TITLES
    drawn = tuple(
        replace(
            lane,
            spans=tuple(
                replace(span, colour=used.index(span.colour), title=span.title if titled else "") for span in lane.spans
            ),
        )
        for lane in lanes
    )
    legend = tuple(_LEGEND[colour] for colour in used)
    return Lanes("What every device does in a step", description, legend, drawn, ticks(end), text)


def _description(subject: Subject) -> str:
    plan = subject.plan
    bubble = f"; {percent(plan.bubble)} of the devices' time is idle" if plan.bubble is not None else ""
    return f"A step of {seconds_text(plan.predicted_step_time)} under {plan.schedule}{bubble}."


def _shown_slots(timeline: Timeline) -> list[int]:
    """All slots, or the first replica of each stage where there are too many."""
    schedule = timeline.schedule
    if schedule.n_slots <= _MOST_LANES:
        return list(range(schedule.n_slots))
    return list(dict.fromkeys(slots[0] for slots in schedule.placement))[:_MOST_LANES]


def _predicted_lanes(
    subject: Subject, timeline: Timeline, slots: Sequence[int], end: float, group: str
) -> Iterator[Lane]:
    schedule, plan = timeline.schedule, subject.plan
    for slot in slots:
        stages = schedule.stages_of(slot)
        stage = plan.stages[stages[0]]
        device = stage.devices[schedule.slots_of(stages[0]).index(slot) * stage.shards]
        spans = [
            Span(
                event.start / end,
                (event.end - event.start) / end,
                _COLOUR[event.action.phase],
                _title(event.action.phase, event.action.stage, event.action.microbatch, event.end - event.start),
            )
            for event in timeline.events
            if event.slot == slot
        ]
        for send in timeline.sends:
            if send.slot == slot and not send.transfer.overlap:
                spans.append(_span(send.start, send.end, end, _SENDING, "sending, and computing nothing"))
        for one in timeline.finishes:
            if one.slot == slot:
                spans.append(_span(one.start, one.reduced, end, _REDUCTION, f"gradients of stage {one.stage} summed"))
                spans.append(_span(one.reduced, one.end, end, _OPTIMIZER, f"optimizer step of stage {one.stage}"))
        busy = timeline.busy[slot] / (timeline.step_time or 1.0)
        label = f"{device}{f' +{stage.shards - 1}' if stage.shards > 1 else ''}"
        drawn = tuple(span for span in spans if span.width > 0)
        yield Lane(label, f"{busy:.0%} busy", drawn, group)


def _measured_lanes(profile: StepProfile, end: float, group: str) -> list[Lane]:
    names = list(dict.fromkeys(one.device for one in profile.stages))
    lanes = []
    for name in names[:_MOST_LANES]:
        spans = tuple(
            Span(
                start / end,
                (stop - start) / end,
                _COLOUR[Phase(one.phase)],
                _title(Phase(one.phase), one.stage, one.microbatch, stop - start),
            )
            for one in profile.actions
            if one.device == name
            for start, stop in one.spans
        )
        busy = sum(one.busy for one in profile.stages if one.device == name)
        lanes.append(Lane(name, f"{busy / profile.seconds:.0%} busy", spans, group))
    return lanes


def _span(start: float, stop: float, end: float, colour: int, what: str) -> Span:
    return Span(start / end, (stop - start) / end, colour, f"{what}: {seconds_text(stop - start)}")


def _title(phase: Phase, stage: int, microbatch: int, seconds: float) -> str:
    return f"{_LEGEND[_COLOUR[phase]]} of stage {stage}, micro-batch {microbatch}: {seconds_text(seconds)}"
