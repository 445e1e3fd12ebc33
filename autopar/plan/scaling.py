"""A plan with predictions for a machine that is faster or slower than its costs say."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.plan import Plan
from autopar.plan.stage import RunnerUp, Stage, StageTransfer
from autopar.sharding.stage_sharding import StageSharding

_NOTE = "predictions scaled by"


def scaled(plan: Plan, factor: float, steps: int, of: str, *, single: float | None = None) -> Plan:
    """`plan` with all predicted seconds multiplied by `factor`, and a note that says so.

    `steps`: measured steps that the factor comes from, `of` the whole model or this plan. `single`: the factor for one
    device, if it is another one.
    """
    note = f"{_NOTE} {factor:.3g} after {steps} measured step{'s' if steps > 1 else ''} of {of}"
    return replace(
        plan,
        stages=tuple(_scaled_stage(stage, factor) for stage in plan.stages),
        transfers=tuple(_scaled_transfer(transfer, factor) for transfer in plan.transfers),
        runners_up=tuple(RunnerUp(rival.description, rival.step_time * factor) for rival in plan.runners_up),
        predicted_step_time=_times(plan.predicted_step_time, factor),
        single_device_time=_times(plan.single_device_time, factor if single is None else single),
        objective=_times(plan.objective, factor),
        bound=_times(plan.bound, factor),
        searched_bound=_times(plan.searched_bound, factor),
        action_time=_times(plan.action_time, factor),
        message_time=_times(plan.message_time, factor),
        whole_batch_time=_times(plan.whole_batch_time, factor),
        time_scale=factor * (plan.time_scale or 1.0),
        notes=(note, *plan.notes),
    )


def notes_without_scale(plan: Plan) -> tuple[str, ...]:
    """The notes of a plan that is predicted anew, from costs that are not scaled."""
    return tuple(note for note in plan.notes if not note.startswith(_NOTE))


def _scaled_stage(stage: Stage, factor: float) -> Stage:
    return replace(
        stage,
        forward_time=_times(stage.forward_time, factor),
        backward_time=_times(stage.backward_time, factor),
        weight_time=_times(stage.weight_time, factor),
        sync_time=_times(stage.sync_time, factor),
        optimizer_time=_times(stage.optimizer_time, factor),
        hidden_time=_times(stage.hidden_time, factor),
        recompute_time=_times(stage.recompute_time, factor),
        accumulation_time=_times(stage.accumulation_time, factor),
        sharding=None if stage.sharding is None else _scaled_sharding(stage.sharding, factor),
    )


def _scaled_sharding(sharding: StageSharding, factor: float) -> StageSharding:
    return replace(
        sharding,
        exchanges=tuple(replace(one, seconds=one.seconds * factor) for one in sharding.exchanges),
        collective_time=_times(sharding.collective_time, factor),
        repeated_time=_times(sharding.repeated_time, factor),
        repeated=tuple(replace(one, seconds=one.seconds * factor) for one in sharding.repeated),
    )


def _scaled_transfer(transfer: StageTransfer, factor: float) -> StageTransfer:
    back = _times(transfer.backward_seconds, factor)
    return replace(transfer, seconds=transfer.seconds * factor, backward_seconds=back)


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
