"""Why the search chose a plan: its bottleneck, its runners-up, the cost of each limit, and what would make it faster.

All numbers are simulated steps: the value of a change is the step with it against the step without.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autopar.plan.display import explained, shown
from autopar.plan.plan import Plan
from autopar.planner.change import Change
from autopar.planner.communication import exposed_communication
from autopar.planner.explainers import explainer_of
from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.other_launches import compiled_instead
from autopar.planner.other_speeds import plan_at_other_speed
from autopar.planner.predicted_step import PredictedStep, grows_with_the_batch, step_of_plan
from autopar.planner.search_options import SearchOptions
from autopar.schedule.timeline import Timeline

# `helps` shows the step with the bottleneck's devices, and with links and collectives, this much faster.
_FASTER = 1.1
_MORE_LINK = 2.0
PER_HALF = ", per half of it"  # ends the change whose step is that of half of its batch

TUNED = "tuned over"  # begins the note of a plan that measured steps chose
_NO_REASONS = ("estimated from", "predictions scaled", "by hand:")  # notes that do not say why a device is idle


@dataclass(frozen=True)
class Bottleneck:
    """The stage on the busiest device."""

    stage: int
    devices: tuple[str, ...]
    busy: float  # share of the step in which its busiest device computes
    bound: str  # the largest of its parts, or memory
    # The step's parts, adding up to 1: compute, link and bubble, and where there are some, collectives and whole batch,
    # which is "wait for whole batch" where another device does that.
    shares: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Explanation:
    """`print(plan.explain())` shows it."""

    plan: Plan
    bottleneck: Bottleneck | None  # None for a plan without predictions
    runners_up: tuple[Change, ...] = ()
    limits: tuple[Change, ...] = ()  # what each hint or limit cost: the step without it
    helps: tuple[Change, ...] = ()
    idle: tuple[tuple[str, str], ...] = ()  # (device, why the plan does not use it)
    partial: bool = False  # the plan was loaded: what takes a new search is missing

    def __str__(self) -> str:
        return shown(self)


@explained.register(Plan)
def explain_plan(plan: Plan) -> Explanation:
    """Why a plan is as it is; for a loaded plan, from its own numbers alone."""
    explain = explainer_of(plan).plan or own_explanation
    return explain(plan)


def own_explanation(plan: Plan, step: PredictedStep | None = None) -> Explanation:
    """The explanation from a plan's own numbers, without a search. `step`: that of the plan, where it is known."""
    step = step_of_plan(plan) if step is None else step
    larger = None if step is None else step_of_plan(plan, batch_factor=2)
    if step is None or larger is None:
        return Explanation(plan, None, partial=True)
    bottleneck = _bottleneck(plan, step.timeline(), step.timeline(link_speed=float("inf")))
    rivals = tuple(Change(rival.description, rival.step_time) for rival in plan.runners_up)
    helps = _helps(plan, bottleneck, step, larger)
    idle = tuple((name, _why_unused(plan)) for name in _idle(plan))
    return Explanation(plan, bottleneck, rivals, (), helps, idle, partial=True)


def explanation(
    searching: Searching,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    make_plan: Callable[..., Plan],
) -> Callable[[Plan], Explanation]:
    """A function that explains the plan of `chosen`. Its first call runs further searches, so call it only for a user
    who asks."""

    @cache
    def searched() -> tuple[list[Change], list[Change]]:
        return _limits(searching, make_plan), _more_memory(searching, make_plan)

    def explain(plan: Plan) -> Explanation:
        known, now = own_explanation(plan), plan.time_scale or 1.0
        step = plan.predicted_step_time or 0.0  # which the plan keeps without a limit, and with more memory
        limits, more = (
            tuple(replace(change, step_time=min(step, now * change.step_time)) for change in changes)
            for changes in searched()
        )
        helps = [*known.helps, *more]
        bottleneck = known.bottleneck
        memory = [change for change in (*limits, *helps) if "memory" in change.what]
        if bottleneck is not None and any(change.gain(plan) > 0.01 for change in memory):
            bottleneck = replace(bottleneck, bound="memory")
        tuned = any(note.startswith(TUNED) for note in plan.notes)
        why = _why_unused(plan) if tuned else _why_idle(searching, chosen, candidates, now)
        idle = tuple((name, why) for name in _idle(plan))
        return replace(known, bottleneck=bottleneck, limits=limits, helps=tuple(helps), idle=idle, partial=False)

    return explain


def _bottleneck(plan: Plan, timeline: Timeline, free: Timeline) -> Bottleneck:
    """The slowest stage of the busiest hardware, and the step divided into its work, its collectives, waiting for links
    and for what runs on the whole batch, and idle time. Slots that share hardware work in turns."""
    slots, stages_of = timeline.busiest, timeline.schedule.stages_of
    times = {stage: _stage_seconds(plan, stage) for slot in slots for stage in stages_of(slot)}
    stage = max(times, key=lambda s: times[s])
    step = timeline.step_time or 1.0
    busy = sum(timeline.busy[slot] for slot in slots) / step
    link = max(0.0, 1 - free.step_time / step)
    link = min(link, 1 - busy) if busy < 1 else 0.0
    exchanging = min(busy, exposed_communication(plan)[plan.rank_of[stage]] / step)
    collectives = (("collectives", exchanging),) if exchanging else ()
    once, waits = timeline.on_whole_batch / step, set(slots).isdisjoint(timeline.whole_batch_slots)
    computing = busy - exchanging - (0.0 if waits else once)
    whole_batch = (("wait for whole batch" if waits else "whole batch", once),) if once else ()
    bubble = max(0.0, 1 - busy - link - (once if waits else 0.0))
    shares = (("compute", computing), *collectives, ("link", link), *whole_batch, ("bubble", bubble))
    bound = max(shares, key=lambda share: share[1])[0]
    return Bottleneck(stage, plan.stages[stage].devices, busy, bound, shares)


def _stage_seconds(plan: Plan, stage: int) -> float:
    one = plan.stages[stage]
    forward = one.forward_time or 0.0
    return forward * (2 if one.recompute else 1) + (one.backward_time or 0.0) + (one.recompute_time or 0.0)


def _helps(plan: Plan, bottleneck: Bottleneck, step: PredictedStep, larger: PredictedStep) -> tuple[Change, ...]:
    one = plan.stages[bottleneck.stage]

    def other_step(devices: Container[tuple[str, ...]], computing: float = 1.0, collectives: float = 1.0) -> float:
        found = step_of_plan(plan_at_other_speed(plan, computing=computing, collectives=collectives, on=devices))
        assert found is not None, "the plan's own stages have times"
        return found.timeline().step_time

    faster = other_step((one.devices,), computing=1 / _FASTER)
    which = "all devices" if plan.ranks == 1 else f"the devices of stage {bottleneck.stage}"
    which = one.devices[0] if len(one.devices) == 1 else which
    changes = [Change(f"computing {_FASTER - 1:.0%} faster on {which}", faster)]
    if any(exposed_communication(plan)):
        everywhere = {stage.devices for stage in plan.stages}
        changes.append(Change("collectives twice as fast", other_step(everywhere, collectives=1 / _MORE_LINK)))
    if plan.transfers:
        changes.append(Change("links twice as fast", step.timeline(link_speed=_MORE_LINK).step_time))
    if len(plan.used_devices) > 1 and grows_with_the_batch(plan):
        changes.append(Change(f"a batch twice as large{PER_HALF}", larger.timeline().step_time / 2))
    return (*changes, *compiled_instead(plan))


def _limits(searching: Searching, make_plan: Callable[..., Plan]) -> list[Change]:
    """The step without each of the user's limits and hints."""
    options, costs = searching.options, searching.costs
    lifted: list[tuple[str, SearchOptions]] = [
        (f"{name}={value}", free)
        for name, value, free in (
            ("n_microbatches", options.n_microbatches, replace(options, n_microbatches=None)),
            ("schedule", options.schedule, replace(options, schedule=None)),
            ("max_replicas", options.max_replicas, replace(options, max_replicas=None)),
            ("memory_limit", options.memory_limit, replace(options, memory_limit=None)),
        )
        if value is not None and name not in options.narrowed
    ]
    constraints = options.constraints
    for what, empty in (
        ("pipeline_stage hints", replace(constraints, stage_of={})),
        ("recompute hints", replace(constraints, recompute=frozenset())),
        ("keep_together hints", replace(constraints, together=())),
    ):
        if empty != constraints and what not in options.narrowed:
            lifted.append((what, replace(options, constraints=empty)))
    found = [Change(f"without {what}", _step(make_plan(costs, free))) for what, free in lifted]
    meshes = searching.meshes
    if searching.ahead and meshes is not None and meshes.most_width is not None:  # shards at hand are to be measured
        wider = make_plan(costs, options, meshes=replace(meshes, most_width=None))
        found.append(Change(f"without max_shards={meshes.most_width}", _step(wider)))
    return found


def _more_memory(searching: Searching, make_plan: Callable[[Any, SearchOptions], Plan]) -> list[Change]:
    options = replace(
        searching.options,
        memory_limit=None if searching.options.memory_limit is None else 2 * searching.options.memory_limit,
    )
    devices = tuple(replace(device, memory=2 * device.memory) for device in searching.costs.devices)
    return [Change("twice the memory", _step(make_plan(replace(searching.costs, devices=devices), options)))]


def _step(plan: Plan) -> float:
    return plan.predicted_step_time or 0.0


def _idle(plan: Plan) -> list[str]:
    return [name for name in plan.devices if name not in plan.used_devices]


def _why_unused(plan: Plan) -> str:
    """Why a plan uses no more devices, from its notes: measured steps of a tuned plan decide, whatever the search."""
    tuned = [note for note in plan.notes if note.startswith(TUNED)]
    reasons = tuned or [note for note in plan.notes if not note.startswith(_NO_REASONS)]
    return "; ".join(reasons) or "the plan does not use it"


def why_no_more(searching: Searching, chosen: Candidate) -> str:
    """Why no candidate uses more devices than `chosen`: the search looks no further at plans that are slower."""
    if searching.some_plan_uses_more(chosen.arrangement.n_devices):
        return "no plan on more devices is predicted to be as fast"
    return "no feasible plan uses more"


def _why_idle(searching: Searching, chosen: Candidate, candidates: Sequence[Candidate], now: float) -> str:
    """How much slower the best plan on more devices is, and why. `now`: the scale of predicted seconds."""
    more = [c for c in candidates if c.arrangement.n_devices > chosen.arrangement.n_devices]
    if not more:
        return why_no_more(searching, chosen)
    rival = min(more, key=lambda c: c.timeline.step_time)
    free = rival.step.timeline(link_speed=float("inf"))
    work, own = (sum(candidate.step.timeline().busy) for candidate in (rival, chosen))
    smaller = rival.arrangement.n_microbatches > chosen.arrangement.n_microbatches
    slower = "devices slow each other down" + ", small micro-batches are less efficient" * smaller
    causes = [
        (work / own - 1 if own else 0.0, f"more work in total: {slower}"),
        (rival.timeline.bubble, "of its devices' time idle"),
        (1 - free.step_time / rival.timeline.step_time, "of its step spent on links"),
    ]
    reasons = ", ".join(f"{share:.0%} {what}" for share, what in causes if share > 0.01) or "no gain"
    return (
        f"the best plan on {rival.arrangement.n_devices} devices takes {now * rival.timeline.step_time * 1e3:.4g} ms a "
        f"step against {now * chosen.timeline.step_time * 1e3:.4g} ms: {reasons}"
    )
