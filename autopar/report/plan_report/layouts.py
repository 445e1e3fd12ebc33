"""How operators are split and parameters are stored, in words, equal layers in one line."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.plan.plan import Plan
from autopar.report.document import Block, Paragraph, Points, Section, Table
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import count
from autopar.report.sharding import mesh_text, parameter_rows, stages_by_mesh, strategy_counts, strategy_rows

_MOST_ROWS = 150

_WORDS = {
    "columns, Shard": "columns (Megatron), Shard",
    "rows, Partial": "rows, summed",
    "rows of the table, Partial": "rows of the table, summed",
}
_LEGEND = (
    "Each axis of the mesh has a column. Columns (Megatron): each device has some columns of the matrix and makes some "
    "of the result's. Rows, summed: each device has some rows, and results are added up. Shard(0) cuts dimension 0, "
    "usually the samples. Replicate: every device does the same. In layouts, S0 is Shard(0), R is Replicate and P is "
    "Partial, as in torch.distributed.tensor."
)


def layouts(subject: Subject) -> Section:
    """Layouts of operators and parameters by layer."""
    plan, blocks = subject.plan, []
    by_mesh = stages_by_mesh(plan)
    for stages in by_mesh:
        own = [stage.sharding for stage in stages if stage.sharding is not None]
        over = mesh_text(own[0])
        rows, n_keeping = strategy_rows(own)
        if rows:
            cells = tuple((what, *map(_in_words, words), layout) for what, *words, layout in rows)
            columns = ("operators", *(f"along {axis}" for axis in own[0].axes), "layouts")
            blocks.append(_table(f"Operators on meshes {over}", columns, cells))
        counts = strategy_counts(stages, own, n_keeping)
        blocks += [Points(tuple(counts))] if counts else []
        stored = parameter_rows(own)
        if stored:
            cells = tuple((name, words[:1].upper() + words[1:], layout) for name, words, layout in stored)
            blocks.append(_table(f"Parameters on meshes {over}", ("parameters", "stored", "layouts"), cells))
    if blocks:
        blocks.append(Paragraph(_LEGEND))
    return Section("Layouts", (*blocks, *map(Paragraph, _whole(plan))), () if blocks else None)


def _in_words(words: str) -> str:
    for short, long in _WORDS.items():
        if words.startswith(short):
            return long + words.removeprefix(short)
    return words


def _table(caption: str, columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> Block:
    left = f" (the first {_MOST_ROWS} of {len(rows):,})" if len(rows) > _MOST_ROWS else ""
    return Table(caption + left, columns, rows[:_MOST_ROWS], words=len(columns))


def _whole(plan: Plan) -> Iterator[str]:
    """Stages on single devices."""
    single = [index for index, stage in enumerate(plan.stages) if stage.sharding is None]
    if not single:
        return
    which = "All stages" if len(single) == len(plan.stages) else f"Stages {', '.join(map(str, single))}"
    text = f"{which} run whole operators on single devices, with whole parameters."
    copied = [index for index in single if plan.stages[index].replicas > 1]
    if copied:
        most = max(plan.stages[index].replicas for index in copied)
        text += f" Up to {count(most, 'replica')} of a stage take turns with micro-batches, and add up their gradients."
    yield text
