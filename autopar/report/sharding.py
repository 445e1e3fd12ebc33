"""Sharded stages of a plan as text: meshes, strategies, parameters, collectives and repeated work.

Stages with the same mesh share their tables, and equal layers share a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from autopar.analysis.rules import neural
from autopar.plan.exits.plan_degrees import replica_axes
from autopar.plan.plan import Plan
from autopar.plan.stage import Stage
from autopar.planner.communication import rounds, times_a_step
from autopar.report.layer_names import folded, operator_text
from autopar.report.tables import bullet, megabytes, milliseconds, paragraph, table
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements
from autopar.sharding.stage_sharding import Exchange, StageSharding, Stored

_MOST = 24  # lines of a table
_MOST_REPEATED = 6  # operators with repeated work that a text names

_LEGEND = (
    "Each mesh axis has a column: how it splits the operator. Layouts have one code per mesh axis for every operand "
    "and result: S0 is Shard(0), R is Replicate, P is Partial (pieces of a sum), as in torch.distributed.tensor. Of "
    "parameters, the second layout is that of the optimizer's state."
)

# Operators that are listed even where their results keep the placements of their operands.
_ALWAYS_LISTED = {*neural.RULES, "embedding"}
_LINEAR = {"linear": (1, 0), "addmm": (2, 1)}  # place of the weight, its dimension of the result's columns

Sides = tuple[tuple[Placements, ...], tuple[Placements, ...]]  # layouts of operands, of results


def sharding_parts(plan: Plan) -> list[str]:
    """Paragraphs of `print(plan)` about its sharded stages; none if there are none."""
    sharded = {number: stage for number, stage in enumerate(plan.stages) if stage.sharding is not None}
    if not sharded:
        return []
    parts = [_meshes(plan, sharded)]
    if any(stage.sharding is not None and stage.sharding.strategies for stage in sharded.values()):
        parts.append(paragraph(_LEGEND))
    alike = stages_by_mesh(plan)
    for stages in alike:
        own = [stage.sharding for stage in stages if stage.sharding is not None]
        over = f" ({mesh_text(own[0])})" if len(alike) > 1 else ""
        parts += [*_strategies(stages, own, over), *_parameters(own, over)]
    return [*parts, *_collectives(plan), *_regathered(sharded), *_repeated(plan, sharded)]


def stages_by_mesh(plan: Plan) -> list[list[Stage]]:
    """The sharded stages of a plan: those with the same mesh together."""
    alike: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Stage]] = defaultdict(list)
    for stage in plan.stages:
        if stage.sharding is not None:
            alike[stage.sharding.mesh, stage.sharding.axes].append(stage)
    return list(alike.values())


def mesh_text(sharding: StageSharding) -> str:
    """`data 2 x model 4`."""
    return " x ".join(f"{name} {n}" for name, n in zip(sharding.axes, sharding.mesh, strict=True))


def axis_text(name: str, sides: Sides, axis: int) -> str:
    """How an axis of a mesh splits an operator: the placement of its result, for matrices in words, too."""
    operands, results = ([layout[axis] for layout in side] for side in sides)
    cut = next((code for code in results if code >= 0), None)
    weight, columns = _LINEAR.get(name, (0, 0))
    if name in _LINEAR and len(operands) > weight and operands[weight] >= 0:
        return f"columns, Shard({cut})" if operands[weight] == columns else "rows, Partial"
    if name == "embedding" and operands[0] >= 0:
        return f"columns, Shard({cut})" if operands[0] == 1 else "rows of the table, Partial"
    if cut is not None:
        return f"Shard({cut})"
    if PARTIAL in results:
        return "Partial" if any(code >= 0 for code in operands) else "Partial, passed on"
    return "Replicate" if all(code == REPLICATE for code in operands) else "Replicate, reduced inside"


def stored_words(stored: Stored, axes: Sequence[str], gathered: Iterable[str], replicas: Iterable[str]) -> str:
    """How a parameter is sharded; the stage of ZeRO is that over replicas.

    gathered: axes along which all its pieces are gathered before every use. replicas: axes whose devices are replicas.
    """
    axes_of: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for axis, layout, state in zip(axes, stored.layout, stored.state, strict=True):
        if layout >= 0:
            note, zero = (", gathered for every use", 3) if axis in gathered else ("", 0)
            axes_of[f"Shard({layout})", note, zero].append(axis)
        elif state >= 0:
            axes_of["gradient and state" if stored.scattered else "state", "", 1 + stored.scattered].append(axis)
    return "; ".join(
        f"{what} over {' and '.join(names)}{note}" + (f" (ZeRO {zero})" if zero and {*names} & {*replicas} else "")
        for (what, note, zero), names in axes_of.items()
    )


def when(exchange: Exchange) -> str:
    """Forward, backward or once per step."""
    return "once per step" if exchange.once else "backward" if exchange.backward else "forward"


def cut_short(rows: Sequence[list[str]], most: int = _MOST) -> list[list[str]]:
    """The first rows of a table, and the number of the others."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[:most], [_more(len(rows) - most), *[""] * (len(rows[0]) - 1)]]


def _more(count: int) -> str:
    return f"... and {count} more"


def share_text(seconds: float, plan: Plan) -> str:
    """The share of the predicted step."""
    return f"{seconds / plan.predicted_step_time:.1%}" if plan.predicted_step_time else "-"


def _meshes(plan: Plan, sharded: dict[int, Stage]) -> str:
    rows = []
    for number, stage in sharded.items():
        sharding = stage.sharding
        assert sharding is not None
        often = [(e, times_a_step(e, plan, stage)) for e in sharding.exchanges]
        seconds = sum(e.seconds * n for e, n in often)
        wasted = (sharding.repeated_time or 0.0) * rounds(plan, stage)
        known = bool(sharding.exchanges) or sharding.collective_time == 0
        rows.append(
            [
                str(number),
                mesh_text(sharding),
                str(stage.replicas),
                str(sum(n for _, n in often)) if known else "-",
                megabytes(sum(e.nbytes * n for e, n in often)) if known else "-",
                milliseconds(seconds) if known else "-",
                share_text(seconds, plan) if known else "-",
                "-" if sharding.repeated_time is None else milliseconds(wasted),
                "-" if sharding.repeated_time is None else share_text(wasted, plan),
            ]
        )
    columns = ["stage", "mesh", "meshes", "collectives\nper step", "MB", "ms", "of the\nstep"]
    return table([*columns, "repeated work\nms", "of the\nstep"], rows, words=2)


def _strategies(stages: Sequence[Stage], own: Sequence[StageSharding], over: str) -> Iterator[str]:
    axes = own[0].axes
    rows, n_keeping = strategy_rows(own)
    if rows:
        yield table([f"operators{over}", *axes, "layouts"], cut_short(rows), words=2 + len(axes))
    counts = strategy_counts(stages, own, n_keeping)
    if counts:
        yield bullet("; ".join(counts))


def strategy_rows(own: Sequence[StageSharding]) -> tuple[list[list[str]], int]:
    """Operators by how the axes of their mesh split them, in words and as layouts, and the number of those that are
    left out: they keep the placements of their operands."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    n_keeping = 0
    for sharding in own:
        texts = dict(sharding.texts[0])
        for key, sides in sharding.strategy_of.items():
            name = key.rpartition("/")[2].partition("#")[0]
            if name not in _ALWAYS_LISTED and _keeps_placements(sides):
                n_keeping += 1
                continue
            words = [axis_text(name, sides, axis) for axis in range(len(sharding.axes))]
            alike[name, *words, texts[key]].append(key)
    return [[operator_text(text), *words] for (_, *words), keys in alike.items() for text in folded(keys)], n_keeping


def strategy_counts(stages: Sequence[Stage], own: Sequence[StageSharding], n_keeping: int) -> list[str]:
    """How many operators `strategy_rows` leaves out, and why."""
    split = {key for sharding in own for key, _ in sharding.strategies}
    whole = sum(key not in split for stage in stages for key in stage.operators)
    counts = [f"operators that keep the layouts of their operands: {n_keeping}"] if n_keeping else []
    counts += [f"operators that every device of a mesh does as a whole: {whole}"] if whole else []
    return counts


def _keeps_placements(sides: Sides) -> bool:
    """Whether along every axis the results are sharded if an operand is, and Partial if one is."""
    operands, results = sides
    for axis in range(len(results[0]) if results else 0):
        before = {min(layout[axis], 0) for layout in operands}  # 0: sharded, along whatever dimension
        after = {min(layout[axis], 0) for layout in results}
        if after != (before - {REPLICATE} or {REPLICATE}):
            return False
    return True


def _parameters(own: Sequence[StageSharding], over: str) -> Iterator[str]:
    rows = parameter_rows(own)
    if rows:
        yield table([f"parameters{over}", "stored", "layouts"], cut_short(rows), words=3)


def parameter_rows(own: Sequence[StageSharding]) -> list[list[str]]:
    """Parameters that are not whole on every device: how they are stored, in words and as layouts."""
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for sharding in own:
        gathered: dict[str, set[str]] = defaultdict(set)
        for exchange in sharding.exchanges:
            if exchange.collective == "all_gather" and when(exchange) == "forward":
                gathered[exchange.tensor].add(exchange.axis)
        texts = dict(sharding.texts[1])
        replicas = [sharding.axes[axis] for axis in replica_axes(sharding)]
        for name, stored in sharding.stored.items():
            words = stored_words(stored, sharding.axes, gathered[name], replicas)
            if words:
                alike[words, texts[name]].append(name)
    return [[text, *words] for words, names in alike.items() for text in folded(names)]


class CollectiveLine(NamedTuple):
    """Equal collectives of equal layers in a step."""

    collective: str
    axis: str  # of the mesh
    when: str
    reader: str  # the operators that read the results
    often: int  # on the busiest mesh
    nbytes: int
    seconds: float


def collective_lines(plan: Plan) -> list[CollectiveLine]:
    """The collectives of a step, by the operators that read their results; those that take longest first."""
    by_kind: dict[tuple[str, str, str], dict[str, list[tuple[Exchange, int]]]] = defaultdict(lambda: defaultdict(list))
    for stage in plan.stages:
        for exchange in stage.sharding.exchanges if stage.sharding is not None else ():
            kind = (exchange.collective.replace("_", "-"), exchange.axis, when(exchange))
            by_kind[kind][exchange.operator].append((exchange, times_a_step(exchange, plan, stage)))
    lines = []
    for kind, by_operator in by_kind.items():
        for text, keys in folded(by_operator).items():
            several = [pair for key in keys for pair in by_operator[key]]
            nbytes, seconds = sum(e.nbytes * n for e, n in several), sum(e.seconds * n for e, n in several)
            lines.append(CollectiveLine(*kind, operator_text(text), sum(n for _, n in several), nbytes, seconds))
    return sorted(lines, key=lambda line: -line.seconds)


def _collectives(plan: Plan) -> Iterator[str]:
    lines = collective_lines(plan)
    rest = lines[_MOST:]
    if rest:
        left = (_more(len(rest)), "", "", "")
        sums = sum(one.often for one in rest), sum(one.nbytes for one in rest), sum(one.seconds for one in rest)
        lines[_MOST:] = [CollectiveLine(*left, *sums)]
    if lines:
        rows = [[*w, str(n), megabytes(b), milliseconds(s), share_text(s, plan)] for *w, n, b, s in lines]
        columns = ["collective", "axis", "when", "read by", "per step", "MB", "ms", "of the\nstep"]
        yield table(columns, rows, words=4)


def _regathered(sharded: dict[int, Stage]) -> Iterator[str]:
    again = [n for n, stage in sharded.items() if stage.sharding is not None and stage.sharding.regather]
    if again:
        where = "" if len(again) == len(sharded) else f" in stages {', '.join(map(str, again))}"
        yield bullet(f"gathered activations are kept as shards{where}, and gathered again in the backward")


def _repeated(plan: Plan, sharded: dict[int, Stage]) -> Iterator[str]:
    """The operators with most of the work that several devices repeat."""
    seconds: dict[str, float] = defaultdict(float)
    for stage in sharded.values():
        for one in stage.sharding.repeated if stage.sharding is not None else ():
            seconds[one.operator] += one.seconds * rounds(plan, stage)
    sums = {text: sum(seconds[key] for key in keys) for text, keys in folded(seconds).items()}
    if sums:
        most = sorted(sums, key=lambda text: -sums[text])
        named = [f"{operator_text(text)} {milliseconds(sums[text])} ms" for text in most[:_MOST_REPEATED]]
        more = [f"{len(most) - _MOST_REPEATED} more"] if len(most) > _MOST_REPEATED else []
        yield bullet(f"devices repeat each other's work, per step most in {', '.join([*named, *more])}")
