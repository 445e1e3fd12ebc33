"""The schedule as the CSV that torch.distributed.pipelining reads: `_PipelineScheduleRuntime._load_csv(path)`.

    0F0,0F1,0B0,0B1     one row per rank, its actions in their order: stage, action, micro-batch
    1F0,1B0,1F1,1B1     F forward, B backward, or in two parts I (gradients of inputs) and W (of parameters)

Every copy of the pipeline, with one replica of each stage, is a data-parallel rank with a schedule of its own, and all
of them are equal: micro-batch i of a plan with r replicas is micro-batch i div r of copy i mod r.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.plan.exits.configuration import NotExpressed, ToolConfiguration, ToolDegrees, refuse, refuse_reading
from autopar.schedule.builders import SCHEDULES, make_schedule, possible_chunks
from autopar.schedule.clock import Action, Phase

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

NAME = "schedule-csv"
TITLE = "torch.distributed.pipelining"
VERSION = "torch 2.13"

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def configuration_of(plan: Plan) -> ToolConfiguration:
    """Raises PlanError for stages with different numbers of replicas, or micro-batches that do not go round them."""
    replicas = [stage.replicas for stage in plan.stages]
    m, r = plan.n_microbatches, replicas[0]
    problems = []
    if len(set(replicas)) > 1:
        each = ", ".join(f"stage {s} has {n}" for s, n in enumerate(replicas))
        problems.append(f"its pipelines have one rank a stage, or copies of all of them: {each} replicas")
    elif m % r:
        problems.append(f"{m} micro-batches do not go evenly round {r} replicas; give a multiple of {r}")
    refuse(TITLE, problems)
    text = csv_text(plan.schedule, m // r, plan.ranks, plan.chunks, plan.training)
    settings = {"n_microbatches": m // r, "n_stages": len(plan.stages), "ranks": plan.ranks, "copies": r}
    return ToolConfiguration(NAME, VERSION, settings, text, len(plan.used_devices), tuple(_lost(plan)))


def csv_text(schedule: str, n_microbatches: int, ranks: int, chunks: int, training: bool = True) -> str:
    """The CSV of a schedule with one device a rank."""
    table = make_schedule(schedule, n_microbatches, [1] * ranks, chunks=chunks, training=training)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_text(action) for action in actions] for actions in table.actions)
    return out.getvalue()


def _text(action: Action) -> str:
    return f"{action.stage}{action.phase.value}{action.microbatch}"


def _lost(plan: Plan) -> Iterator[NotExpressed]:
    yield NotExpressed("stages", "which modules each stage has: build them as PipelineStage")
    if plan.stages[0].replicas > 1:
        n = plan.stages[0].replicas
        yield NotExpressed("replicas", f"{n} of every stage: run {n} equal pipelines, and reduce gradients over them")
    sharded = [s for s, stage in enumerate(plan.stages) if stage.sharding is not None]
    if sharded:
        yield NotExpressed("sharding", f"of stages {', '.join(map(str, sharded))}: apply it to the modules of a stage")
    if any(stage.mode for stage in plan.stages):
        yield NotExpressed("recompute", "what stages run again: wrap their modules in checkpoints")
    skips = [f"{one.source} -> {one.target}" for one in plan.transfers if one.target != one.source + 1]
    if skips:
        yield NotExpressed(
            "transfers",
            f"{', '.join(skips)}: only neighbours send to each other; pass the values on through each stage",
        )
    if plan.batch_size is not None and plan.batch_size % plan.n_microbatches:
        yield NotExpressed(
            "micro-batches", f"{plan.n_microbatches} of {plan.batch_size} samples; torch cuts the batch by tensor_split"
        )


# -- from a CSV -------------------------------------------------------------------------------------------------------


def degrees_from(source: str | ToolConfiguration) -> ToolDegrees:
    """The pipeline, chunks and schedule of a CSV, if its rows are those of a schedule of autopar's.

    Its number of micro-batches follows from `micro_batch` of `Plan.by_hand`. Raises PlanError that names the first row
    which no schedule has.
    """
    text = source.text if isinstance(source, ToolConfiguration) else source
    if not isinstance(text, str):
        refuse_reading(TITLE, [f"the text of a CSV is needed, got {type(text).__name__}"])
    rows, problems = [], []
    for rank, line in enumerate(csv.reader(io.StringIO(text))):
        cells = [cell.strip() for cell in line if cell.strip()]
        wrong = [cell for cell in cells if _ACTION.fullmatch(cell) is None]
        if wrong:
            problems.append(f"row {rank}: {wrong[0]!r} is no action of computing, such as 0F0")
        rows.append(cells)
    if not any(rows):
        problems.append("it has no actions")
    refuse_reading(TITLE, problems)
    actions = [[_action(cell) for cell in row] for row in rows]
    ranks, m = len(rows), 1 + max(action.microbatch for row in actions for action in row)
    n_stages = 1 + max(action.stage for row in actions for action in row)
    if m * n_stages > (n_actions := sum(map(len, rows))):  # not to make a table of any size that a text names
        each = f"{n_stages} stages and {m} micro-batches need"
        refuse_reading(TITLE, [f"{each} {m * n_stages} forwards, and it has {n_actions} actions"])
    if n_stages % ranks:
        refuse_reading(TITLE, [f"{n_stages} stages do not go round {ranks} ranks"])
    chunks = n_stages // ranks
    differ = []
    for name in (name for name in SCHEDULES if possible_chunks(name, ranks, chunks)):
        table = make_schedule(name, m, [1] * ranks, chunks=chunks)
        other = next((k for k in range(ranks) if list(table.actions[k]) != actions[k]), None)
        if other is None:
            found = "1f1b" if name == "interleaved-1f1b" and chunks == 1 else name
            return ToolDegrees({"pipeline": ranks, "chunks": chunks, "schedule": found})
        differ.append(f"row {other} is not that of {name}: {_first_difference(table.actions[other], actions[other])}")
    refuse_reading(TITLE, differ)
    raise AssertionError("unreachable")


def _action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    assert match is not None
    return Action(Phase(match[2]), int(match[1]), int(match[3]))


def _first_difference(wanted: tuple[Action, ...], found: list[Action]) -> str:
    for place, (a, b) in enumerate(zip(wanted, found, strict=False)):
        if a != b:
            return f"action {place} is {_text(b)} in place of {_text(a)}"
    return f"it has {len(found)} actions in place of {len(wanted)}"
