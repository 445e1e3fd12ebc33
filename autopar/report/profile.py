"""A profile as text: seconds and bytes by module and by operator, whole passes, links."""

from __future__ import annotations

import math

from autopar.costs.profile import Cost, Pass, Profile
from autopar.errors.numbers import digits
from autopar.plan.display import shown
from autopar.report.tables import megabytes, milliseconds, paragraph, table

_MOST_MODULES = 30  # rows of the table; modules are shown to the depth that fits
_MOST_OPERATORS = 12
ON_WHOLE_BATCH = "Once a step, on the whole batch (the end of the model, or the loss)"


@shown.register
def _profile(profile: Profile) -> str:
    modules = _modules_that_fit(profile)
    title = f"{'Forward and backward' if profile.training else 'Forward'} of {profile.batch_size} samples"
    parts = [paragraph(f"{title} on {', '.join(profile.kinds)}: {len(profile.operators)} operators")]
    parts.append(_table(profile, "module", modules))
    shown = profile.slowest(_MOST_OPERATORS)
    if len(profile.operators) > len(shown):
        parts.append(_table(profile, f"operator ({len(shown)} slowest)", shown))
    else:
        parts.append(_table(profile, "operator", profile.operators))
    rows = [
        [p.kind, str(p.workers), str(p.rows), *map(milliseconds, (p.forward, p.backward)), _rate(p)]
        for p in profile.passes
    ]
    parts.append(table(["device", "busy", "samples", "forward ms", "backward ms", "samples/s"], rows))
    if profile.whole_batch:
        parts.append(f"{ON_WHOLE_BATCH}: {_on_kinds(profile)}")
    if profile.links:
        links = [
            [f"{a} -> {b}", f"{link.latency * 1e6:.1f}", _gigabytes(link.bandwidth)]
            for (a, b), link in profile.links.items()
        ]
        parts.append(table(["link", "latency us", "bandwidth GB/s"], links))
    if profile.memory is not None:
        parts.append(f"A training step of the whole batch on one device:\n\n{profile.memory}")
    return "\n\n".join(parts)


def _on_kinds(profile: Profile) -> str:
    return ", ".join(f"{milliseconds(seconds)} ms on {kind}" for kind, seconds in profile.whole_batch.items())


def _modules_that_fit(profile: Profile) -> list[Cost]:
    depths = [cost.name.count(".") + 1 if cost.name else 0 for cost in profile.modules]
    fitting = [d for d in range(max(depths) + 1) if sum(depth <= d for depth in depths) <= _MOST_MODULES]
    return [cost for cost, depth in zip(profile.modules, depths, strict=True) if depth <= max(fitting[-1], 1)]


def _table(profile: Profile, what: str, costs: tuple[Cost, ...] | list[Cost]) -> str:
    several = len(profile.kinds) > 1
    columns = [what]
    for kind in profile.kinds:
        on = f"\n{kind}" if several else "\nms"
        columns += [f"forward{' ms' * several}{on}"] + [f"backward{' ms' * several}{on}"] * profile.training
    columns += ["share", "param-\neters\nMB", "activa-\ntions\nMB", "output\nMB"]
    whole = profile.model.seconds(profile.kinds[0]) or 1.0
    rows = []
    for cost in costs:
        row = [cost.name or "the whole model"]
        for kind in profile.kinds:
            row += [milliseconds(cost.forward[kind])] + [milliseconds(cost.backward[kind])] * profile.training
        row.append(f"{cost.seconds(profile.kinds[0]) / whole:.1%}")
        rows.append([*row, *map(megabytes, (cost.parameter_bytes, cost.activation_bytes, cost.output_bytes))])
    return table(columns, rows)


def _rate(one: Pass) -> str:
    return digits(one.rows / (one.forward + one.backward)) if one.forward + one.backward else "-"


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g}" if math.isfinite(bandwidth) else "by reference"
