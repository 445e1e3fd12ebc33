"""Why operators of a plan have their strategies, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopar.plan.display import shown
from autopar.plan.plan import Plan
from autopar.plan.validation import replicas
from autopar.planner.intra_op.explain import Alternative, InsideExplained, OperatorExplained
from autopar.report.sharding import axis_text, cut_short, mesh_text, when
from autopar.report.tables import bullet, megabytes, milliseconds, paragraph, table
from autopar.sharding.stage_sharding import Exchange, StageSharding, parse_strategy

_SAME = 1e-9  # relative; seconds that differ less are equal
_NOTHING = 1e-9  # s

_LEGEND = """\
Milliseconds per micro-batch on each device. own: the operator itself. collectives: those that it causes while its
neighbours keep their strategies. whole: all operators, if this one has the strategy of the line and all others are
chosen again (<=: an upper bound, where memory is short and not everything was tried). Layouts have one code per mesh
axis for every operand and result: S0 is Shard(0), R is Replicate, P is Partial, as in torch.distributed.tensor."""


@shown.register(InsideExplained)
def inside_text(explained: InsideExplained) -> str:
    """What `print(plan.explain(path))` shows: all strategies of the operators that were searched again, and one line
    for each of the others."""
    plan = explained.plan
    full = [one for one in explained.operators if one.chosen is not None and one.chosen.whole is not None]
    short = [one for one in explained.operators if one not in full]
    parts = [part for one in full for part in _full(plan, one)]
    if full:
        parts.append(paragraph(_LEGEND))
    if short:
        rows = [_short(plan, one) for one in short]
        columns = ["other operators there" if full else "operators", "split", "layouts"]
        numbers = ["collectives", "ms", "repeated\nms"]
        parts.append(table([*columns, *numbers], cut_short(rows), words=3))
    if len(short) == 1 and not full and short[0].exchanges:
        parts.append("\n".join(map(bullet, _exchanges(short[0]))))
    if not full and any(plan.stages[one.stage].sharding is not None for one in short):
        parts.append(paragraph("This uses the plan's own numbers; only a new search can tell about other strategies."))
    return "\n\n".join(parts)


def _full(plan: Plan, one: OperatorExplained) -> Iterator[str]:
    sharding = plan.stages[one.stage].sharding
    assert sharding is not None
    assert one.chosen is not None
    yield paragraph(f"{one.key} in stage {one.stage}, mesh {mesh_text(sharding)}")
    rows = [_row(sharding, one.key, one.chosen, "chosen")]
    rows += [_row(sharding, one.key, other, "") for other in one.others]
    if one.more:
        rows.append([f"... and {one.more} more", *[""] * (len(rows[0]) - 1)])
    columns = ["", *sharding.axes, "layouts", "own\nms", "collectives\nms", "kept\nMB", "whole\nms", "whole\nMB"]
    yield table(columns, rows, words=2 + len(sharding.axes))
    reasons = [_why(sharding, one), *(f"it causes {text}" for text in _exchanges(one))]
    reasons += [f"whole: all {one.alike} equal operators of equal layers have this strategy"] if one.alike > 1 else []
    reasons += [f"devices repeat {milliseconds(one.repeated)} ms of it"] if one.repeated else []
    yield "\n".join(map(bullet, reasons))


def _row(sharding: StageSharding, key: str, one: Alternative, mark: str) -> list[str]:
    whole = one.whole
    if whole is None:
        totals = ["none fits" if not one.fits else "-", "-"]
    else:
        totals = ["" if whole.proven else "<=", megabytes(whole.nbytes)]
        totals[0] += milliseconds(whole.seconds)
    numbers = [milliseconds(one.seconds), milliseconds(one.exchanged), megabytes(one.kept)]
    return [mark, *_axes(sharding, key, one.strategy), one.strategy, *numbers, *totals]


def _axes(sharding: StageSharding, key: str, strategy: str) -> list[str]:
    sides = parse_strategy(strategy)
    name = key.rpartition("/")[2].partition("#")[0]
    return [axis_text(name, sides, axis) for axis in range(len(sharding.mesh))]


def _why(sharding: StageSharding, one: OperatorExplained) -> str:
    """What decided between the chosen strategy and the next best one."""
    chosen = one.chosen
    assert chosen is not None
    assert chosen.whole is not None
    rivals = [(other.whole, other) for other in one.others if other.whole is not None]
    if not rivals:
        listed = "chosen for memory: with every other strategy listed, no choice for the other operators fits"
        return listed if one.others else "it has no other strategy"
    whole, rival = min(rivals, key=lambda pair: pair[0].seconds)
    seconds, nbytes = whole.seconds - chosen.whole.seconds, whole.nbytes - chosen.whole.nbytes
    exchanged = whole.exchanged - chosen.whole.exchanged
    compute = seconds - exchanged
    share = seconds / chosen.whole.seconds if chosen.whole.seconds else 0.0
    if abs(share) < _SAME:
        why = "as the first of equals" if nbytes <= 0 else "for less memory"
        takes = "equally long"
    else:
        why = "for less compute" if compute > exchanged else "for less time in collectives"
        why = why if seconds > 0 else "without proof that it is best"
        takes = f"{milliseconds(abs(seconds))} ms ({abs(share):.1%}) {_more(seconds)[1:]}"
        takes += f": {_difference(compute)} compute, {_difference(exchanged)} collectives"
    if rival.seconds + rival.exchanged < chosen.seconds + chosen.exchanged:
        why = "for less memory"  # by itself the other one is faster
    words = ", ".join(_axes(sharding, one.key, rival.strategy))
    text = f"chosen {why}: with the next best, '{rival.strategy}' ({words}), the whole takes {takes}"
    if abs(nbytes) >= 1:
        text += f"; each device holds {megabytes(abs(nbytes))} MB{_more(nbytes)}"
    refused = sum(not other.fits for other in one.others)
    return text + (
        f"; with {refused} of those listed no choice for the other operators fits the memory" if refused else ""
    )


def _more(value: float) -> str:
    return " more" if value > 0 else " less"


def _difference(seconds: float) -> str:
    return "the same" if abs(seconds) < _NOTHING else f"{milliseconds(abs(seconds))} ms{_more(seconds)}"


def _short(plan: Plan, one: OperatorExplained) -> list[str]:
    stage = plan.stages[one.stage]
    numbers = [str(len(one.exchanges)), milliseconds(sum(e.seconds for e in one.exchanges))]
    if stage.sharding is None:
        each = "each of its replicas" if stage.replicas > 1 else "all"
        return [one.key, f"stage {one.stage} is not split: {each} on {replicas(stage.devices)}", "-", "0", "0", "0"]
    if one.strategy is None:
        words, layouts = "every device does all of it", "-"
    else:
        pairs = zip(stage.sharding.axes, _axes(stage.sharding, one.key, one.strategy), strict=True)
        words, layouts = "; ".join(f"{axis}: {word}" for axis, word in pairs), one.strategy
    return [one.key, words, layouts, *numbers, milliseconds(one.repeated)]


def _exchanges(one: OperatorExplained) -> list[str]:
    """`all-gather along model, forward: 3.1 MB, 0.1 ms for encoder/linear#0`."""
    alike: dict[tuple[str, str, str], list[Exchange]] = defaultdict(list)
    for exchange in one.exchanges:
        alike[exchange.collective.replace("_", "-"), exchange.axis, when(exchange)].append(exchange)
    texts = []
    for (collective, axis, time), many in alike.items():
        tensors = ["itself" if e.tensor == one.key else e.tensor for e in many]
        amount = f"{megabytes(sum(e.nbytes for e in many))} MB, {milliseconds(sum(e.seconds for e in many))} ms"
        texts.append(f"{collective} along {axis}, {time}: {amount} for {', '.join(dict.fromkeys(tensors))}")
    return texts
