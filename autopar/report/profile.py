"""What a model costs on the devices at hand, by operator and by module."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import networkx as nx

from autopar.report.tables import megabytes, milliseconds, table
from cost_models import Link
from cost_models.step_memory import StepMemory

_MOST_MODULES = 30  # rows of the table; modules are shown to the depth that fits
_MOST_OPERATORS = 12


@dataclass(frozen=True)
class Cost:
    """An operator, or a module with all operators inside it. For the whole batch."""

    name: str  # `module.path/operator#k`, or the module's path ("" for the model itself)
    operators: int
    parameter_bytes: int  # a tied parameter counts once
    activation_bytes: int  # saved for the backward
    output_bytes: int  # of what it hands on; of a module: what is read outside it
    forward: Mapping[str, float]  # kind of device -> s
    backward: Mapping[str, float]  # kind of device -> s

    def seconds(self, kind: str) -> float:
        """Forward and backward."""
        return self.forward[kind] + self.backward[kind]


@dataclass(frozen=True)
class Pass:
    """A whole pass as it was measured."""

    kind: str
    workers: int  # of the devices of that kind, busy at the same time
    rows: int  # samples
    forward: float  # s, loss included
    backward: float  # s, loss included


@dataclass(frozen=True)
class Profile:
    """The costs that a plan is made from; `print(profile)` shows tables.

    `graph`: a networkx.DiGraph of the operators to draw (`networkx.nx_pydot.write_dot`) or to save (`write_graphml`).
    Its nodes have label, module, operator, source, forward and backward (s on the first kind of device),
    parameter_bytes, activation_bytes and output_bytes; its edges nbytes.
    """

    batch_size: int  # samples
    training: bool  # whether there is a backward
    kinds: tuple[str, ...]  # of devices, as offered
    operators: tuple[Cost, ...]  # in program order
    modules: tuple[Cost, ...]  # every module after the one that contains it
    passes: tuple[Pass, ...]
    links: Mapping[tuple[str, str], Link]  # (from, to), names of devices
    memory: StepMemory | None  # of a training step of the whole batch on one device, if it was asked for
    graph: nx.DiGraph = field(repr=False, compare=False)

    @property
    def model(self) -> Cost:
        """The whole model, without the loss."""
        return self.modules[0]

    def __getitem__(self, path: str) -> Cost:
        """A module by its path. KeyError where no operator runs in it."""
        for module in self.modules:
            if module.name == path:
                return module
        raise KeyError(path)

    def slowest(self, count: int | None = None, kind: str | None = None) -> tuple[Cost, ...]:
        """The operators that take most time on a kind of device (default: the first), most first."""
        chosen = kind or self.kinds[0]
        return tuple(sorted(self.operators, key=lambda cost: -cost.seconds(chosen)))[:count]

    def __str__(self) -> str:
        modules = self._modules_that_fit()
        title = f"{'Forward and backward' if self.training else 'Forward'} of {self.batch_size} samples"
        parts = [f"{title} on {', '.join(self.kinds)}: {len(self.operators)} operators"]
        parts.append(self._table("module", modules))
        shown = self.slowest(_MOST_OPERATORS)
        if len(self.operators) > len(shown):
            parts.append(self._table(f"operator ({len(shown)} slowest)", shown))
        else:
            parts.append(self._table("operator", self.operators))
        rows = [
            [p.kind, str(p.workers), str(p.rows), *map(milliseconds, (p.forward, p.backward)), _rate(p)]
            for p in self.passes
        ]
        parts.append(table(["device", "busy", "samples", "forward ms", "backward ms", "samples/s"], rows))
        if self.links:
            links = [
                [f"{a} -> {b}", f"{link.latency * 1e6:.1f}", _gigabytes(link.bandwidth)]
                for (a, b), link in self.links.items()
            ]
            parts.append(table(["link", "latency us", "bandwidth GB/s"], links))
        if self.memory is not None:
            parts.append(f"A training step of the whole batch on one device:\n\n{self.memory}")
        return "\n\n".join(parts)

    def to_json(self) -> str:
        """All of it in seconds and bytes; the bandwidth of a link that hands tensors over by reference is null."""
        data = {
            "batch_size": self.batch_size,
            "training": self.training,
            "devices": self.kinds,
            "modules": [asdict(cost) for cost in self.modules],
            "operators": [asdict(cost) for cost in self.operators],
            "passes": [asdict(one) for one in self.passes],
            "links": [
                {
                    "source": source,
                    "target": target,
                    "latency": link.latency,
                    "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None,
                }
                for (source, target), link in self.links.items()
            ],
            "memory": None if self.memory is None else asdict(self.memory),
        }
        return json.dumps(data, indent=1, allow_nan=False)

    def _modules_that_fit(self) -> list[Cost]:
        depths = [cost.name.count(".") + 1 if cost.name else 0 for cost in self.modules]
        fitting = [d for d in range(max(depths) + 1) if sum(depth <= d for depth in depths) <= _MOST_MODULES]
        return [cost for cost, depth in zip(self.modules, depths, strict=True) if depth <= max(fitting[-1], 1)]

    def _table(self, what: str, costs: tuple[Cost, ...] | list[Cost]) -> str:
        several = len(self.kinds) > 1
        columns = [what]
        for kind in self.kinds:
            on = f"\n{kind}" if several else "\nms"
            columns += [f"forward{' ms' * several}{on}"] + [f"backward{' ms' * several}{on}"] * self.training
        columns += ["share", "parameters\nMB", "activations\nMB", "output\nMB"]
        whole = self.model.seconds(self.kinds[0]) or 1.0
        rows = []
        for cost in costs:
            row = [cost.name or "the whole model"]
            for kind in self.kinds:
                row += [milliseconds(cost.forward[kind])] + [milliseconds(cost.backward[kind])] * self.training
            row.append(f"{cost.seconds(self.kinds[0]) / whole:.1%}")
            rows.append([*row, *map(megabytes, (cost.parameter_bytes, cost.activation_bytes, cost.output_bytes))])
        return table(columns, rows)


def _rate(one: Pass) -> str:
    return f"{one.rows / (one.forward + one.backward):.4g}" if one.forward + one.backward else "-"


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g}" if math.isfinite(bandwidth) else "by reference"
