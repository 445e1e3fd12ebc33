"""The stage map: which modules each stage has, on the model's module tree."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from autopar.plan.plan import Plan
from autopar.plan.recompute import NAMES
from autopar.plan.validation import replicas
from autopar.report.document import Block, Branch, Code, Paragraph, Section, Table, Tree
from autopar.report.plan import MODULE_COLUMNS, module_ranges, module_row
from autopar.report.plan_report.subject import Subject
from autopar.report.quantities import count, seconds_text, size_text
from autopar.report.sharding import mesh_text

_MOST_NAMED = 4  # devices of a stage


def stages(subject: Subject) -> Section:
    """Every stage, its devices and its modules."""
    plan = subject.plan
    blocks: list[Block] = [_table(plan)]
    texts: list[Any] = [plan]  # on a terminal
    if any(stage.operators for stage in plan.stages):
        root = _tree(plan)
        blocks.append(Tree("Stages on the model's module tree", tuple(_branches(root)), tuple(_strip(plan))))
        blocks.append(
            Paragraph(
                "Widths in the strip are numbers of operators, in program order. Unfold a module to see its operators."
            )
        )
    else:
        branches = tuple(Branch(path, stages=(stage,)) for path, stage in plan.split)
        blocks.append(Tree("Modules that the split names", branches))
        blocks.append(Paragraph("The plan lists no operators: those of other modules follow their inputs."))
    if subject.modules:
        rows = tuple(tuple(module_row(index, module)) for index, module in enumerate(subject.modules))
        running = Table("What runs: one torch.fx.GraphModule for each stage", MODULE_COLUMNS, rows)
        blocks.append(running)
        texts.append(running)
    if subject.code:
        blocks.append(Code("How they run:", subject.code))
        texts.append(subject.code)
    return Section("Stages", tuple(blocks), tuple(texts))


def _table(plan: Plan) -> Table:
    ranges = module_ranges(plan)
    rows = []
    for index, stage in enumerate(plan.stages):
        mesh = f"a mesh of {mesh_text(stage.sharding)}" if stage.sharding is not None else "one device"
        where = f"{count(stage.replicas, 'replica')} on {mesh} each" if stage.replicas > 1 else mesh
        rows.append(
            (
                str(index),
                _devices_text(stage.devices),
                where,
                ranges[index],
                NAMES[stage.mode],
                f"{len(stage.operators):,}",
                *(_or_dash(seconds, seconds_text) for seconds in (stage.forward_time, stage.backward_time)),
                *(_or_dash(n, size_text) for n in (stage.parameter_bytes, stage.activation_bytes, stage.peak_memory)),
            )
        )
    columns = (
        *("stage", "devices", "runs on", "modules", "recompute", "operators", "forward", "backward"),
        *("parameters", "activations", "peak"),
    )
    caption = "Stages. Times and activations are predictions for one micro-batch; bytes are those on each device."
    return Table(caption, columns, tuple(rows), words=5)


def _devices_text(names: tuple[str, ...]) -> str:
    """Few names with blanks between them, where a line can break."""
    return " + ".join(names) if len(names) <= _MOST_NAMED else replicas(names)


def _or_dash(value: float | None, text: object) -> str:
    return "-" if value is None else text(value)  # type: ignore[operator]


@dataclass
class _Module:
    """A module with the operators of its own, and those inside it."""

    path: str
    stages: dict[int, int] = field(default_factory=dict)  # stage -> operators, of all inside
    inner: dict[str, _Module] = field(default_factory=dict)
    own: Counter[tuple[int, str]] = field(default_factory=Counter)  # (stage, operator)


def _tree(plan: Plan) -> _Module:
    root = _Module("")
    for index, stage in enumerate(plan.stages):
        for key in stage.operators:
            path, _, name = key.rpartition("/")
            module = root
            module.stages[index] = module.stages.get(index, 0) + 1
            for part in path.split(".") if path else ():
                inner = f"{module.path}.{part}" if module.path else part
                module = module.inner.setdefault(part, _Module(inner))
                module.stages[index] = module.stages.get(index, 0) + 1
            module.own[index, name.partition("#")[0]] += 1
    return root


def _branches(module: _Module) -> Iterator[Branch]:
    if module.own and not module.path:
        yield _branch("the model itself", _Module("", _stages_of(module.own), {}, module.own))
    for name, inner in module.inner.items():
        label = name
        while len(inner.inner) == 1 and not inner.own:  # nothing to choose there
            ((part, inner),) = inner.inner.items()
            label = f"{label}.{part}"
        yield _branch(label, inner)


def _stages_of(own: Counter[tuple[int, str]]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for (stage, _), number in own.items():
        found[stage] += number
    return dict(found)


def _branch(label: str, module: _Module) -> Branch:
    total = sum(module.stages.values())
    several = len(module.stages) > 1
    own: list[str] = []
    for (stage, name), number in module.own.items():
        times = f" x{number}" if number > 1 else ""
        own.append(f"{name}{times}{f' (stage {stage})' if several else ''}")
    inner = tuple(_branches(module)) if module.path else ()
    return Branch(label, count(total, "operator"), tuple(sorted(module.stages)), inner, ", ".join(own))


def _strip(plan: Plan) -> Iterator[tuple[float, int, str]]:
    """Runs of operators of one stage in program order: (share, stage, title)."""
    total = sum(len(stage.operators) for stage in plan.stages)
    ranges = module_ranges(plan)
    runs = [(index, len(stage.operators)) for index, stage in enumerate(plan.stages)]
    for index, run in itertools.groupby(runs, key=lambda pair: pair[0]):
        number = sum(n for _, n in run)
        yield number / total, index, f"stage {index}: {ranges[index]}, {count(number, 'operator')}"
