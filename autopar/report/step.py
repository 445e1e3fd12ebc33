"""A profiled training step as text: times and waits of each stage, next to the plan's prediction."""

from __future__ import annotations

from autopar.plan.display import shown
from autopar.report.tables import milliseconds, paragraph, table
from autopar.runtime.step_profile import StageStep, StepProfile


@shown.register
def _step_profile(profile: StepProfile) -> str:
    head = f"A training step of {profile.batch_size} samples in {milliseconds(profile.seconds)} ms"
    if profile.error is None:
        head += ", without a prediction for it"
    else:
        head += f", predicted {milliseconds(profile.predicted)} ms ({profile.error:+.1%})"
    head += f"; {profile.schedule}, {profile.n_microbatches} micro-batch{'es' * (profile.n_microbatches > 1)}"
    columns = ["stage", "device", "micro-\nbatches", "forward\nms", "predicted\nms", "of it loss\nms"]
    columns += ["backward\nms", "predicted\nms", "waiting\nms", "busy"]
    parts = [paragraph(head), table(columns, [_cells(profile, s) for s in profile.stages], words=2)]
    if profile.one_worker:
        parts.append(
            paragraph(
                "One thread ran the actions of all devices in turn: the operators are too small for more threads."
            )
        )
    if profile.clock_error:
        parts.append(
            paragraph(
                "Devices are on several machines, whose clocks were compared: times on two of them may be wrong by "
                f"{milliseconds(profile.clock_error)} ms against each other."
            )
        )
    return "\n\n".join(parts)


def _cells(profile: StepProfile, one: StageStep) -> list[str]:
    seconds = [one.forward, one.predicted_forward, one.loss, one.backward, one.predicted_backward, one.waiting]
    share = f"{one.busy / profile.seconds:.0%}"
    return [str(one.stage), one.device, str(one.microbatches), *map(milliseconds, seconds), share]
