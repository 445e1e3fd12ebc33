"""A comparison of plans for a cluster as text."""

from __future__ import annotations

from autopar.plan.display import shown
from autopar.plan.plan import Plan
from autopar.plan.recompute import DESCRIBED
from autopar.planner.cluster_comparison import ClusterComparison, PlannedRow
from autopar.report.diff import decisions_in_words
from autopar.report.quantities import seconds_text, size_text, utilisation_note, utilisation_text
from autopar.report.tables import megabytes, milliseconds, paragraph, table
from cost_models import bytes_text

ALIKE = 0.02  # steps that differ by less are about equally long: estimates are no better


@shown.register
def _comparison(comparison: ClusterComparison) -> str:
    step = "training step" if comparison.training else "forward pass"
    head = paragraph(
        f"One {step} of {comparison.batch_size} samples on {comparison.cluster}, predicted from data sheets; the model "
        f"needs {comparison.flops / 1e12:.3g} TFLOP"
    )
    unit = "tokens" if comparison.rows[0].tokens else "samples"
    columns = ["plan", "step\nms", f"{unit}\nper s", "MFU", "peak\nMB", "bubble", "commu-\nnication\nms"]
    rows = [_cells(row) for row in comparison.rows]
    foot = (
        f"{utilisation_note(row.utilisation for row in comparison.rows)} peak MB: of the fullest device. "
        "communication: collectives that no computing hides, on the device with most of them."
    )
    done = [paragraph(f"{row.name}: {described(row.plan)}") for row in comparison.rows]
    done += [
        paragraph(
            f"{row.name} does not fit: it needs {bytes_text(row.memory)}, the device has {bytes_text(row.usable)}"
        )
        for row in comparison.rows
        if not row.fits
    ]
    done += [paragraph(f"{name} has no row: {why}") for name, why in comparison.missing]
    assumed = {row.name: str(row.plan.assumed) for row in comparison.rows if row.plan.assumed is not None}
    if len(set(assumed.values())) > 1:  # prices that do not compare plans alone
        done += [paragraph(f"{name} is priced for a step with {how}") for name, how in assumed.items()]
    fastest = comparison.fastest
    others = [
        paragraph(f"{fastest.name} against {row.name}: {gained(row, fastest)}.{otherwise(comparison, row)}")
        for row in comparison.rows
        if row is not fastest
    ]
    return "\n\n".join(
        [head, table(columns, rows), "\n".join(done), *(["\n".join(others)] if others else []), paragraph(foot)]
    )


def _cells(row: PlannedRow) -> list[str]:
    return [
        row.name,
        milliseconds(row.seconds),
        f"{row.throughput:.4g}" if row.throughput < 1e4 else f"{row.throughput:,.0f}",
        utilisation_text(row.utilisation),
        megabytes(row.memory),
        f"{row.bubble:.1%}",
        milliseconds(row.communication),
    ]


def described(plan: Plan) -> str:
    """The decisions of a plan in a line: equal stages are counted."""
    first = plan.first_stages
    widths = {(stage.replicas, stage.sharding.mesh if stage.sharding else ()) for stage in first}
    text = f"{len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    parts = []
    for replicas, mesh in sorted(widths):
        where = f"meshes of {' x '.join(map(str, mesh))}" if mesh else "single devices"
        parts.append(f"{replicas} replica{'s' if replicas > 1 else ''} on {where}")
    m = plan.n_microbatches
    text += f" ({'; '.join(parts)}), {m} micro-batch{'es' if m > 1 else ''}, {plan.schedule}"
    for mode, (how, _) in DESCRIBED.items():
        again = sum(stage.mode == mode for stage in plan.stages)
        text += f", {'all' if again == len(plan.stages) else again} {how}" if again else ""
    stored = [one for stage in plan.stages if stage.sharding for _, one in stage.sharding.parameters]
    if any(one.state != one.layout for one in stored):
        text += ", optimizer's state cut further than parameters"
    return text


def otherwise(comparison: ClusterComparison, row: PlannedRow) -> str:
    """What the fastest plan decides otherwise than `row`, as a sentence after another one; "" for nothing."""
    words = decisions_in_words(comparison.difference(row.name))
    return f" It has {'; '.join(words)}." if words else ""


def gained(row: PlannedRow, fastest: PlannedRow) -> str:
    """What the seconds of two plans differ in."""
    difference = row.seconds - fastest.seconds
    parts = {
        "communication": row.communication - fastest.communication,
        "waiting": row.bubble * row.seconds - fastest.bubble * fastest.seconds,
    }
    parts["computing"] = difference - sum(parts.values())
    texts = [
        f"{seconds_text(abs(seconds))} {'less' if seconds > 0 else 'more'} {name}"
        for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
        if abs(seconds) > 0.005 * row.seconds
    ]
    memory = fastest.memory - row.memory
    if memory:
        texts.append(f"{size_text(abs(memory))} {'more' if memory > 0 else 'less'} at the peak of memory")
    share = row.seconds / fastest.seconds if fastest.seconds else 1.0
    fast = "about equally fast" if abs(share - 1) <= ALIKE else f"{share:.2f}x as fast"
    return f"{fast}: {', '.join(texts) or 'hardly any difference'}"
