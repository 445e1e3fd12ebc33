"""What a model costs on each device kind, as a report."""

from __future__ import annotations

import math
from collections import defaultdict

from autopar.costs.profile import Cost, Pass, Profile
from autopar.plan.display import reported
from autopar.report.document import Block, Branch, Code, Figure, Figures, Fold, Paragraph, Report, Section, Table, Tree
from autopar.report.layer_names import folded, operator_text
from autopar.report.made_with import command_block, software
from autopar.report.quantities import count, percent, rate_text, seconds_text, size_text

_MOST_OPERATORS = 40
_MOST_LINES = 25


@reported.register
def profile_report(profile: Profile, command: str | None = None) -> Report:
    """Where time and bytes go, by module and operator."""
    kind, model = profile.kinds[0], profile.model
    whole = model.seconds(kind)
    slowest = next(iter(profile.slowest(1)), None)
    passes = "forward and backward" if profile.training else "forward"
    figures = [
        Figure(f"{passes} of {count(profile.batch_size, 'sample')}", seconds_text(whole), f"on {kind}, in operators"),
        Figure("parameters", size_text(model.parameter_bytes)),
        Figure("activations", size_text(model.activation_bytes), "kept for the backward"),
    ]
    if kind in profile.whole_batch:
        figures.append(
            Figure("on the whole batch", seconds_text(profile.whole_batch[kind]), "end of the model, or loss")
        )
    if slowest is not None:
        share = percent(slowest.seconds(kind) / whole) if whole else "-"
        note = f"{operator_text(slowest.name)}: {seconds_text(slowest.seconds(kind))}"
        figures.append(Figure("slowest operator", share, note))
    sections = [Section("At a glance", (Figures(tuple(figures)), _passes(profile))), _modules(profile)]
    sections.append(Section("Operators", (_layers(profile), Fold("The slowest operators", (_operators(profile),)))))
    sections.append(Section("Links", (_links(profile),)))
    memory: Block = (
        Paragraph("Not requested: profile(..., optimizer=...) computes it.")
        if profile.memory is None
        else Code("Moment by moment, for the whole batch on one device:", str(profile.memory))
    )
    sections.append(Section("Memory of a training step", (memory,)))
    again = "autopar.profile(model, devices, example_args=...)"
    made = Paragraph(f"This report was made with {software()}.")
    sections.append(Section("Environment", (made, command_block(command, again))))
    text = f"{passes[:1].upper()}{passes[1:]} of {count(profile.batch_size, 'sample')} take {seconds_text(whole)}"
    return Report(f"Costs of a model on {', '.join(profile.kinds)}", f"{text} on {kind}.", tuple(sections))


def _passes(profile: Profile) -> Table:
    rows = tuple((p.kind, f"{p.workers}", f"{p.rows:,}", *_times(profile, p), _rate(p)) for p in profile.passes)
    backward = ("backward",) if profile.training else ()
    columns = ("device", "busy devices", "samples", "forward", *backward, "rate")
    return Table("Whole passes, by the number of samples and of busy devices", columns, rows)


def _times(profile: Profile, one: Pass) -> tuple[str, ...]:
    return (seconds_text(one.forward), *((seconds_text(one.backward),) if profile.training else ()))


def _rate(one: Pass) -> str:
    seconds = one.forward + one.backward
    return rate_text(one.rows / seconds, "samples") if seconds else "-"


def _modules(profile: Profile) -> Section:
    """The module tree; shares are of the whole model's time."""
    inside: dict[str, list[Cost]] = defaultdict(list)
    paths = {cost.name for cost in profile.modules}
    for cost in profile.modules[1:]:
        parent = cost.name.rpartition(".")[0]
        while parent and parent not in paths:
            parent = parent.rpartition(".")[0]
        inside[parent].append(cost)
    own: dict[str, list[Cost]] = defaultdict(list)
    for cost in profile.operators:
        own[cost.name.rpartition("/")[0]].append(cost)

    def branch(cost: Cost) -> Branch:
        leaves = ", ".join(f"{_operator(one)} {_time(profile, one)}" for one in own[cost.name])
        inner = tuple(branch(one) for one in inside[cost.name])
        return Branch(cost.name.rpartition(".")[2] or "the model", _note(profile, cost), (), inner, leaves)

    tree = Tree("Time and bytes on the module tree", (branch(profile.model),))
    return Section("Modules", (tree,))


def _operator(cost: Cost) -> str:
    return cost.name.rpartition("/")[2].removesuffix("#0")


def _time(profile: Profile, cost: Cost) -> str:
    return seconds_text(cost.seconds(profile.kinds[0]))


def _note(profile: Profile, cost: Cost) -> str:
    whole = profile.model.seconds(profile.kinds[0])
    share = f" ({percent(cost.seconds(profile.kinds[0]) / whole)})" if whole else ""
    return f"{_time(profile, cost)}{share}, parameters {size_text(cost.parameter_bytes)}"


def _layers(profile: Profile) -> Table:
    """Where the time goes, equal operators of equal layers in one line."""
    costs = {cost.name: cost for cost in profile.operators}
    together = [(operator_text(text), [costs[name] for name in names]) for text, names in folded(costs).items()]
    together.sort(key=lambda pair: -sum(cost.seconds(profile.kinds[0]) for cost in pair[1]))
    whole = profile.model.seconds(profile.kinds[0])
    rows = []
    for text, several in together[:_MOST_LINES]:
        times = [sum(cost.seconds(kind) for cost in several) for kind in profile.kinds]
        share = percent(times[0] / whole) if whole else "-"
        rows.append((text, f"{len(several)}", *map(seconds_text, times), share))
    left = f" ({len(rows)} of {len(together):,} lines)" if len(together) > len(rows) else ""
    caption = f"Where the time goes, operators of equal layers together{left}"
    return Table(caption, ("operators", "number", *profile.kinds, "share"), tuple(rows))


def _operators(profile: Profile) -> Table:
    shown = profile.slowest(_MOST_OPERATORS)
    whole = profile.model.seconds(profile.kinds[0])
    rows = []
    for cost in shown:
        times = [seconds_text(cost.seconds(kind)) for kind in profile.kinds]
        share = percent(cost.seconds(profile.kinds[0]) / whole) if whole else "-"
        nbytes = cost.parameter_bytes, cost.activation_bytes, cost.output_bytes
        rows.append((cost.name, *times, share, *map(size_text, nbytes)))
    columns = ("operator", *profile.kinds, "share", "parameters", "activations", "output")
    left = f" ({len(shown)} of {len(profile.operators):,})" if len(profile.operators) > len(shown) else ""
    return Table(f"The slowest operators{left}: seconds on each kind of device", columns, tuple(rows))


def _links(profile: Profile) -> Block:
    if not profile.links:
        return Paragraph("There is one device, and no link.")
    rows = tuple(
        (f"{a} -> {b}", seconds_text(link.latency), _bandwidth(link.bandwidth))
        for (a, b), link in profile.links.items()
    )
    return Table("Links between devices", ("link", "latency", "bandwidth"), rows)


def _bandwidth(rate: float) -> str:
    return f"{size_text(rate)}/s" if math.isfinite(rate) else "by reference"
