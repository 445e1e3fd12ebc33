"""What the numbers were made with, and how to make them again."""

from __future__ import annotations

from collections import Counter

from autopar.plan.plan import Plan
from autopar.report.document import Block, Points, Section, Table
from autopar.report.made_with import command_block, software
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import count

_AGAIN = """\
plan.save("plan.json")
plan = autopar.Plan.load("plan.json")   # later, or elsewhere
plan.report().save("plan.html")         # from the plan's own numbers
autopar.plan(model, devices, plan=plan, example_args=...)   # new prices"""


def environment(subject: Subject) -> Section:
    """Devices, versions, assumptions, and a command."""
    plan = subject.plan
    rows = [("devices", _devices(plan)), ("samples of a step", str(plan.batch_size or "unknown"))]
    if plan.work is not None and plan.work.tokens is not None:
        rows.append(("tokens of a step", f"{plan.work.tokens:,}"))
    if plan.assumed is not None:
        rows.append(("priced for a step with", str(plan.assumed)))
    if plan.time_scale is not None:
        rows.append(("predictions scaled by measured steps", f"{plan.time_scale:.3g}"))
    rows.append(("this report was made with", software()))
    blocks: list[Block] = [Table("What the numbers are for", ("", ""), tuple(rows), words=2)]
    blocks += [Points(plan.notes)] if plan.notes else []
    blocks.append(command_block(subject.wanted.command, _AGAIN))
    return Section("Environment", tuple(blocks))


def _devices(plan: Plan) -> str:
    kinds = Counter(plan.device_kinds)
    n = len(plan.devices) or len(plan.used_devices)
    each = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or count(n, "device")
    unused = len(plan.devices) - len(plan.used_devices)
    return f"{each}; {unused} of them not used" if plan.devices and unused > 0 else each
