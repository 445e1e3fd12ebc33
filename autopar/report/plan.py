"""A plan, and the modules of its stages, as text."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopar.analysis.operators import compute_nodes
from autopar.hints.module_paths import ancestors
from autopar.plan.display import shown
from autopar.plan.plan import ONE_DEVICE, Plan
from autopar.plan.recompute import DESCRIBED
from autopar.plan.stage import Stage
from autopar.plan.validation import replicas
from autopar.report.sharding import sharding_parts
from autopar.report.tables import bullet, megabytes, milliseconds, paragraph, table
from autopar.schedule.micro_batches import split_sizes

_MOST_PATHS = 3  # of a hand-made split, shown for a stage


@shown.register(Plan)
def plan_text(plan: Plan) -> str:
    """What `print(plan)` shows: the numbers of the step, the stages, their transfers, and the reasons for the plan."""
    parts = [_headline(plan), _stages(plan)]
    if plan.transfers:
        rows = [
            [
                f"{link.source} -> {link.target}",
                megabytes(link.forward_bytes),
                megabytes(link.backward_bytes),
                milliseconds(link.seconds),
            ]
            for link in plan.transfers
        ]
        parts.append(table(["transfer", "forward MB", "backward MB", "both ms"], rows))
    parts += sharding_parts(plan)
    assumed = f"priced for a step with {plan.assumed}" if plan.assumed is not None else ""
    reasons = [reason for reason in (plan.optimality, *plan.notes, assumed) if reason]
    if reasons:
        parts.append("\n".join(map(bullet, reasons)))
    if plan.predicted_step_time is not None:
        parts.append(
            paragraph("Times, activations and transfers are predictions per micro-batch; peak MB is per device.")
        )
    elif any(stage.operators for stage in plan.stages):
        parts.append(paragraph("This plan has no predictions; autopar.plan(model, devices, plan=...) makes them."))
    return "\n\n".join(parts)


MODULE_COLUMNS = ("stage", "inputs", "operators", "outputs", "parameters", "buffers", "parameters MB")


def module_ranges(plan: Plan) -> list[str]:
    """The modules of each stage, as `first .. last`: the largest modules that lie in the stage as a whole.

    A plan made by hand that was not priced yet lists no operators; then the modules that its split names.
    """
    if not any(stage.operators for stage in plan.stages):
        return [_split_paths(plan, index) for index in range(len(plan.stages))]
    homes: dict[str, set[int]] = defaultdict(set)  # module -> stages that hold operators of it
    for index, stage in enumerate(plan.stages):
        for path in {key.rpartition("/")[0] for key in stage.operators}:
            for ancestor in ancestors(path):
                homes[ancestor].add(index)
    return [_range(stage, homes) for stage in plan.stages]


def _range(stage: Stage, homes: dict[str, set[int]]) -> str:
    if len(homes[""]) <= 1:
        return "the whole model"
    paths = [path for path in (key.rpartition("/")[0] for key in stage.operators) if path]
    if not paths:
        return "operators of the model itself"
    first, last = (next((a for a in ancestors(p)[1:] if len(homes[a]) == 1), p) for p in (paths[0], paths[-1]))
    return first if first == last else f"{first} .. {last}"


def _split_paths(plan: Plan, stage: int) -> str:
    paths = [path for path, chosen in plan.split if chosen == stage]
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(paths[:_MOST_PATHS]) + more or "-"


def _headline(plan: Plan) -> str:
    n_stages, n_devices, m = len(plan.stages), len(plan.used_devices), plan.n_microbatches
    words = [
        f"{_count(n_stages, 'stage')} on {_count(n_devices, 'device')} ({plan.places})",
        _count(m, "micro-batch", "micro-batches") + _microbatch_size(plan),
        plan.schedule,
    ]
    for mode, (_, how) in DESCRIBED.items():
        again = [str(index) for index, stage in enumerate(plan.stages) if stage.mode == mode]
        if again:
            words.append(f"{how}stage{'s' if len(again) > 1 else ''} {', '.join(again)}")
    if not plan.training:
        words.append("inference")
    lines = [paragraph(", ".join(words), others="  ")]
    if plan.predicted_step_time is not None and plan.priced_step_time is not None:
        numbers = [f"predicted step {milliseconds(plan.priced_step_time)} ms"]
        if plan.measured_step_time is not None and plan.priced_step_time != plan.predicted_step_time:
            numbers = [
                f"measured step {milliseconds(plan.measured_step_time)} ms",
                f"predicted before it ran {milliseconds(plan.priced_step_time)} ms",
            ]
        elif plan.measured_step_time is not None:
            threads = f" with {_count(plan.measured_threads, 'thread')}" if plan.measured_threads else ""
            numbers[0] += " with a worker's threads" if threads else ""
            numbers.append(f"measured {milliseconds(plan.measured_step_time)} ms{threads}")
        if plan.single_device_time is not None:
            numbers.append(f"{ONE_DEVICE} {milliseconds(plan.single_device_time)} ms")
            if plan.predicted_step_time:
                numbers.append(f"speed-up {plan.single_device_time / plan.predicted_step_time:.2f}x")
        if plan.whole_batch_time:
            numbers.append(f"on the whole batch {milliseconds(plan.whole_batch_time)} ms")
        if plan.bubble is not None:
            numbers.append(f"bubble {plan.bubble:.1%}")
        lines.append(paragraph(", ".join(numbers), others="  "))
    return "\n".join(lines)


def _microbatch_size(plan: Plan) -> str:
    if plan.batch_size is None:
        return ""
    sizes = split_sizes(plan.batch_size, plan.n_microbatches)
    most, least = sizes[0], sizes[-1]
    return f" of {least}-{most} samples" if most > least else f" of {_count(least, 'sample')}"


def _stages(plan: Plan) -> str:
    sent = [sum(link.forward_bytes for link in plan.transfers if link.source == s) for s in range(len(plan.stages))]
    columns = ["stage", "devices", "modules"]
    ranges = module_ranges(plan)
    if all(stage.forward_time is None for stage in plan.stages):
        rows = [[str(s), replicas(stage.devices), ranges[s]] for s, stage in enumerate(plan.stages)]
        return table(columns, rows, words=3)
    rows = [
        [
            str(s),
            replicas(stage.devices),
            ranges[s],
            str(len(stage.operators)),
            milliseconds(stage.forward_time),
            milliseconds(stage.backward_time),
            megabytes(stage.parameter_bytes),
            megabytes(stage.activation_bytes),
            megabytes(stage.peak_memory),
            megabytes(sent[s]),
        ]
        for s, stage in enumerate(plan.stages)
    ]
    numbers = [
        *("opera-\ntors", "forward\nms", "backward\nms", "param-\neters\nMB"),
        *("activa-\ntions\nMB", "peak\nMB", "sends\nMB"),
    ]
    return table([*columns, *numbers], rows, words=3, first_to_go=numbers[:1])


def module_row(index: int, module: fx.GraphModule) -> list[str]:
    """What is in the module of a stage, by `MODULE_COLUMNS`."""
    graph = module.graph
    tensors = list(module.parameters())
    return [
        str(index),
        str(sum(node.op == "placeholder" for node in graph.nodes)),
        str(len(compute_nodes(graph))),
        str(len(graph.output_node().all_input_nodes)),
        f"{sum(t.numel() for t in tensors):,}",
        f"{sum(t.numel() for t in module.buffers()):,}",
        megabytes(sum(t.numel() * t.element_size() for t in tensors)),
    ]


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
