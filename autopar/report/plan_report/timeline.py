"""One step as a drawing: every device a lane, predicted above measured on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.planner.communication import exposed_communication
from autopar.planner.pass_collectives import PassCollectives
from autopar.report.document import Block, Code, Fold, Paragraph, Section, Span, Table, TimelineLane, TimelineLanes
from autopar.report.measured_rounds import median_of
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import count, percent, seconds_text, ticks
from autopar.report.tables import paragraph
from autopar.runtime.step_profile import StepProfile
from autopar.schedule.builders import make_schedule
from autopar.schedule.clock import Phase
from autopar.schedule.timeline import Timeline

_MOST_LANES = 24  # of all replicas
_MOST_PLACES = 64  # of the pipeline, drawn by their first replica
_MOST_LINES = 48  # of the timeline on a terminal
_MOST_DRAWN = 32  # micro-batches of a schedule without times
_MOST_ROWS = 400  # of the same as a table
_MOST_TITLES = 1500  # spans that say what they are; more would make the file large

_MUCH = 0.05  # of a step
_SEEN = 0.005  # of a step: collectives that take less are not named

_LEGEND = (
    *("forward", "backward", "backward to parameters", "gradient reduction", "optimizer step", "sending"),
    "collectives",
)
_FORWARD, _BACKWARD, _WEIGHT, _REDUCTION, _OPTIMIZER, _SENDING, _COLLECTIVES = range(len(_LEGEND))
_COLOUR = {Phase.FORWARD: _FORWARD, Phase.BACKWARD: _BACKWARD, Phase.INPUT: _BACKWARD, Phase.WEIGHT: _WEIGHT}


def timeline(subject: Subject) -> Section:
    """The predicted step, and the measured one."""
    plan, predicted, profile = subject.plan, subject.timeline, subject.profile
    title = "Timeline of one step"
    if predicted is None:
        counts = [stage.replicas for stage in plan.first_stages]
        drawn = min(plan.n_microbatches, _MOST_DRAWN)
        schedule = make_schedule(plan.schedule, drawn, counts, chunks=plan.chunks, training=plan.training)
        alone = _measured_alone(profile)
        text = "The plan does not say how long its stages take, so there is no timeline."
        some = f", with {drawn} of {plan.n_microbatches:,} micro-batches" if drawn < plan.n_microbatches else ""
        chart = Code(f"The schedule, drawn as if all stages took equally long{some}:", str(schedule))
        plain = (Paragraph(text), Paragraph(chart.label), chart.text, *alone[1:-1], *((profile,) if alone else ()))
        return Section(title, (Paragraph(text), chart, *alone), plain)
    end = max(predicted.step_time, profile.seconds if profile is not None else 0.0)
    slots = _shown_slots(predicted)
    several = profile is not None and bool(profile.actions)
    lanes = list(_predicted_lanes(subject, predicted, slots, end, "predicted" if several else ""))
    if several and profile is not None:
        lanes += _measured_lanes(profile, end, "measured")
    drawing = _drawing(lanes, end, _description(subject), f"Predicted timeline\n\n{_chart(predicted)}")
    words = [*map(Paragraph, _not_drawn(predicted, slots))]
    if profile is None:
        text = "Nothing was measured. A step with train_step(..., profile=True) is drawn below the prediction."
        words.append(Paragraph(text))
    else:
        words += map(Paragraph, (*_one_of_many(subject, profile), *_outside(profile)))
    blocks: list[Block] = [drawing, *_as_table(lanes, end), *words]
    shown: list[object] = [drawing, *words]  # on a terminal
    if profile is not None:
        blocks.append(_stages_table(profile))
        shown.append(profile)
    return Section(title, tuple(blocks), tuple(shown))


def _one_of_many(subject: Subject, profile: StepProfile) -> Iterator[str]:
    """How the step that is drawn differs from the report's step time."""
    if subject.row is not None:
        yield (
            f"The measured step that is drawn is a single one, with its actions timed: it took "
            f"{seconds_text(profile.seconds)}. The step time is the {median_of(subject.row)}: "
            f"{seconds_text(subject.row.measured)}."
        )


def _outside(profile: StepProfile) -> Iterator[str]:
    """What of a measured step no action shows, where it is much."""
    end = max((stop for one in profile.actions for _, stop in one.spans), default=profile.seconds)
    rest = profile.seconds - end
    if rest > _MUCH * profile.seconds:
        yield (
            f"{seconds_text(rest)} of the measured step are outside of these actions: preparing the call, a loss that "
            "takes whole outputs, adding up gradients of replicas."
        )


def _chart(predicted: Timeline) -> str:
    """The timeline for terminals: the first rows of many."""
    head, *rows, legend = str(predicted).splitlines()
    more = [f"... and {count(len(rows) - _MOST_LINES, 'more row')}"] if len(rows) > _MOST_LINES else []
    return "\n".join([paragraph(head), *rows[:_MOST_LINES], *more, paragraph(legend)])


def _not_drawn(predicted: Timeline, slots: Sequence[int]) -> Iterator[str]:
    schedule = predicted.schedule
    if schedule.n_slots <= _MOST_LANES:
        return
    places = dict.fromkeys(tuple(slots) for slots in schedule.placement)
    replicas = schedule.n_slots - len(places)
    if replicas:
        yield f"{count(replicas, 'replica')} that do the same work at the same times are not drawn."
    if len(places) > len(slots):
        yield f"The last {count(len(places) - len(slots), 'place')} of the pipeline are not drawn."


def _stages_table(profile: StepProfile) -> Table:
    """What each stage took, and waited for."""
    rows = tuple(
        (
            str(one.stage),
            one.device,
            f"{one.microbatches:,}",
            seconds_text(one.forward),
            "-" if one.predicted_forward is None else seconds_text(one.predicted_forward),
            seconds_text(one.backward),
            "-" if one.predicted_backward is None else seconds_text(one.predicted_backward),
            seconds_text(one.waiting),
            f"{one.busy / profile.seconds:.0%}" if profile.seconds else "-",
        )
        for one in profile.stages
    )
    columns = ("stage", "device", "micro-batches", "forward", "predicted", "backward", "predicted", "waiting", "busy")
    caption = "The measured step, over all micro-batches. Waiting: for messages of other stages, apart from the others"
    return Table(caption, columns, rows, words=2)


def _as_table(lanes: Sequence[TimelineLane], end: float) -> list[Block]:
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
    lanes = _measured_lanes(profile, profile.seconds, "")
    drawing = _drawing(lanes, profile.seconds, "A measured step.", "")
    return drawing, *map(Paragraph, _outside(profile)), _stages_table(profile)


def _drawing(lanes: Sequence[TimelineLane], end: float, description: str, text: str) -> TimelineLanes:
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
    return TimelineLanes("What every device does in a step", description, legend, drawn, ticks(end), text)


def _description(subject: Subject) -> str:
    plan = subject.plan
    bubble = f"; {percent(plan.bubble)} of the devices' time is idle" if plan.bubble is not None else ""
    return f"A step of {seconds_text(plan.predicted_step_time)} under {plan.schedule}{bubble}."


def _shown_slots(timeline: Timeline) -> list[int]:
    """All slots, or the first replica of each stage where there are too many."""
    schedule = timeline.schedule
    if schedule.n_slots <= _MOST_LANES:
        return list(range(schedule.n_slots))
    return list(dict.fromkeys(slots[0] for slots in schedule.placement))[:_MOST_PLACES]


def _predicted_lanes(
    subject: Subject, timeline: Timeline, slots: Sequence[int], end: float, group: str
) -> Iterator[TimelineLane]:
    schedule, plan, collectives = timeline.schedule, subject.plan, PassCollectives(subject.plan)
    exposed = exposed_communication(plan)
    for slot in slots:
        stages = schedule.stages_of(slot)
        stage = plan.stages[stages[0]]
        device = stage.devices[schedule.slots_of(stages[0]).index(slot) * stage.shards]
        spans: list[Span] = []
        for event in timeline.events:
            if event.slot != slot:
                continue
            action, (computed, parts) = event.action, collectives.of(event)
            title = _title(action.phase, action.stage, action.microbatch, event.end - event.start)
            spans.append(Span(event.start / end, (computed - event.start) / end, _COLOUR[action.phase], title))
            if parts:
                waits = f"collectives of stage {action.stage}, micro-batch {action.microbatch}"
                spans.append(_span(computed, event.end, end, _COLLECTIVES, waits))
        for send in timeline.sends:
            if send.slot == slot and not send.transfer.overlap:
                spans.append(_span(send.start, send.end, end, _SENDING, "sending, and computing nothing"))
        for one in timeline.finishes:
            if one.slot == slot:
                spans.append(_span(one.start, one.reduced, end, _REDUCTION, f"gradients of stage {one.stage} summed"))
                spans.append(_span(one.reduced, one.end, end, _OPTIMIZER, f"optimizer step of stage {one.stage}"))
        busy = timeline.busy[slot] / (timeline.step_time or 1.0)
        exchanging = min(busy, exposed[plan.rank_of[stages[0]]] / (timeline.step_time or 1.0))
        label = f"{device}{f' +{stage.shards - 1}' if stage.shards > 1 else ''}"
        drawn = tuple(span for span in spans if span.width > 0)
        yield TimelineLane(label, _busy_text(busy, exchanging), drawn, group)


def _busy_text(busy: float, exchanging: float) -> str:
    """`87% busy`, or what of it is computing and what collectives."""
    if exchanging < _SEEN:
        return f"{busy:.0%} busy"
    return f"{busy - exchanging:.0%} computing, {exchanging:.0%} exchanging"


def _measured_lanes(profile: StepProfile, end: float, group: str) -> list[TimelineLane]:
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
        lanes.append(TimelineLane(name, f"{busy / profile.seconds:.0%} busy", spans, group))
    return lanes


def _span(start: float, stop: float, end: float, colour: int, what: str) -> Span:
    return Span(start / end, (stop - start) / end, colour, f"{what}: {seconds_text(stop - start)}")


def _title(phase: Phase, stage: int, microbatch: int, seconds: float) -> str:
    return f"{_LEGEND[_COLOUR[phase]]} of stage {stage}, micro-batch {microbatch}: {seconds_text(seconds)}"
