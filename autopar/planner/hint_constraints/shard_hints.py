"""`shard()` hints, checked, as a mesh and constraints on the operators of one captured graph."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
from torch import fx, nn

from autopar.analysis.node_values import observe
from autopar.analysis.operators import on_device
from autopar.analysis.rules.table import bind
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.capture.shard_regions import ShardCall
from autopar.capture.uncaptured import opaque_around
from autopar.errors import PlanError
from autopar.hints.layout import Layout as NamedMesh
from autopar.hints.layout import ShardHint, TensorLayout, TensorSplit, misfits, parts_of
from autopar.hints.shard import hinted_modules
from autopar.planner.hint_constraints.shard_refusals import clashes, refused, slices_in
from autopar.planner.intra_op.constraints import AllowedPlacements, ShardingConstraints
from autopar.sharding.layouts import REPLICATE, Placements, layouts
from autopar.sharding.mesh import divisors
from autopar.sharding.strategies import repeated, strategies
from cost_models.graphs import get_attribute, private_copy, tensors_in

META = torch.device("meta")


class ResolvedSharding(NamedTuple):
    """The mesh that hints need, and the constraints on operators on it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]  # of its axes
    constraints: ShardingConstraints
    order: tuple[int, ...]  # of the devices, by number: that in which they fill the mesh, its last axis fastest


def has_sharding_hints(program: Program, model: nn.Module) -> bool:
    return bool(program.shard_calls or hinted_modules(model))


def resolve_sharding(
    program: Program,
    model: nn.Module,
    n_devices: int,
    n_microbatches: int = 1,
    mesh: tuple[tuple[int, ...], tuple[str, ...]] | None = None,
    inside: frozenset[str] | None = None,
) -> ResolvedSharding:
    """The mesh and the constraints that follow from the hints on `model` and on the functions that it calls.

    Without a `Layout` the mesh is the one given, or has the prime factors of the number of devices, the largest first.
    `inside`: the operators of a stage, by node; hints outside the stage are left out. Raises PlanError that lists
    everything that is wrong.
    """
    if inside is not None:
        here = tuple(call for call in program.shard_calls if not inside.isdisjoint(call.operators))
        elsewhere = {call.path for call in program.shard_calls} - {call.path for call in here}
        program = replace(program, shard_calls=here)
    else:
        elsewhere = set()
    hinted = {path: found for path, found in hinted_modules(model).items() if path not in elsewhere}
    work = _HintResolver(program, hinted, model, n_devices, n_microbatches, mesh)
    found = work.resolved()
    if work.problems:
        raise PlanError("the shard() hints cannot be followed:\n  " + "\n  ".join(dict.fromkeys(work.problems)))
    return found


def microbatch_on_meta(program: Program, n_microbatches: int) -> tuple[fx.GraphModule, list[Any], int]:
    """The graph over parameters without values, its inputs for one micro-batch, and how many samples that has."""
    rows = max(program.batch_size // n_microbatches, 1)
    inputs: list[Any] = []
    for one in program.inputs:
        if one.shape is None:
            inputs.append(one.value)
            continue
        shape = [rows if d == one.batch_dim else size for d, size in enumerate(one.shape)]
        inputs.append(torch.empty(shape, dtype=one.dtype, device=META))
    module = on_device(program.graph_module, program.device, META)
    return private_copy(module, META), inputs, rows


class _HintResolver:
    def __init__(
        self,
        program: Program,
        hinted: Mapping[str, tuple[nn.Module, ShardHint]],
        model: nn.Module,
        n_devices: int,
        n_microbatches: int,
        mesh: tuple[tuple[int, ...], tuple[str, ...]] | None,
    ) -> None:
        self.program, self.hinted, self.model, self.n_devices = program, hinted, model, n_devices
        self.problems: list[str] = []
        self._m, self._given = n_microbatches, mesh
        self._nodes = {node.name: node for node in program.graph.nodes}
        module, inputs, self._rows = microbatch_on_meta(program, n_microbatches)
        self._values = {node.name: value for node, value in observe(module, inputs).items()}
        self._operands: dict[str, dict[int, list[AllowedPlacements]]] = defaultdict(lambda: defaultdict(list))
        self._results: dict[str, dict[int, list[AllowedPlacements]]] = defaultdict(lambda: defaultdict(list))
        self._stored: dict[str, list[AllowedPlacements]] = defaultdict(list)
        self._mesh: tuple[int, ...] = ()
        self._names: tuple[str, ...] = ()

    def resolved(self) -> ResolvedSharding:
        calls, hinted = self.program.shard_calls, self.hinted
        order = self._choose_mesh()
        called = {call.path for call in calls}
        for path in hinted:
            if path not in called:
                around = opaque_around(self.program.graph_module, path)
                why = "the model does not call it"
                if around is not None:
                    why = f"it runs uncaptured inside module '{around or '(root)'}', as a part of one operator"
                self.problems.append(f"module '{path or '(root)'}' is sharded by a hint, but {why}")
        if self._m > 1 and self.program.batch_size % self._m:
            self.problems.append(
                f"a batch of {self.program.batch_size} samples cannot be split into {self._m} equal micro-batches"
            )
        for call in calls:
            self._add_call(call)
        for path, (_, hint) in hinted.items():
            for name, cut in hint.parameters:
                self._add_parameter(path, name, cut)
        self._check_operators()
        for name, several in self._stored.items():
            self._check_agreement(f"parameter '{name}'", several)
        constraints = ShardingConstraints(
            {op: {place: tuple(several) for place, several in own.items()} for op, own in self._operands.items()},
            {op: {place: tuple(several) for place, several in own.items()} for op, own in self._results.items()},
            {name: tuple(several) for name, several in self._stored.items()},
        )
        return ResolvedSharding(self._mesh, self._names, constraints, order)

    # -- the mesh ---------------------------------------------------------------------------------------------------

    def _choose_mesh(self) -> tuple[int, ...]:
        """Choose the mesh; returns the order of the devices in it."""
        found: dict[NamedMesh, list[str]] = defaultdict(list)
        chains: list[tuple[str, ...]] = []
        for title, cut in self._every_cut():
            if isinstance(cut, TensorLayout):
                found[cut.layout].append(title)
                chains += cut.dims
        if not found:
            factors = _prime_factors(self.n_devices)
            self._mesh, self._names = self._given or (factors, tuple(f"axis{i}" for i in range(len(factors))))
            return tuple(range(self.n_devices))
        if len(found) > 1:
            named = " and ".join(f"{layout} ({titles[0]})" for layout, titles in found.items())
            self.problems.append(f"all Layouts of a model must have one mesh, here are {named}")
        layout = next(iter(found))
        if layout.size != self.n_devices:
            self.problems.append(
                f"{layout} ({found[layout][0]}) is a mesh of {layout.size} devices, but there are {self.n_devices}; "
                f"its axes must multiply to {self.n_devices}"
            )
        axes = self._outermost_first(layout, chains)
        self._mesh, self._names = tuple(layout.shape[a] for a in axes), tuple(layout.names[a] for a in axes)
        if self._given is not None and self._given != (self._mesh, self._names):
            self.problems.append(f"{layout} ({found[layout][0]}) is another mesh than the plan's, {self._given}")
        return tuple(np.arange(layout.size).reshape(layout.shape).transpose(axes).ravel().tolist())

    def _every_cut(self) -> Iterator[tuple[str, TensorSplit]]:
        for call in self.program.shard_calls:
            if call.path is None:
                yield from ((f"{call.title}, {where}", cut) for where, cut in call.hint.splits())
        for path, (_, hint) in self.hinted.items():
            yield from ((f"module '{path}', {where}", cut) for where, cut in hint.splits())

    def _outermost_first(self, layout: NamedMesh, chains: Sequence[tuple[str, ...]]) -> list[int]:
        """The axes, ordered so that of several axes that split one dimension the outermost comes first."""
        before = nx.DiGraph()
        before.add_nodes_from(range(len(layout.names)))
        place = {name: i for i, name in enumerate(layout.names)}
        for names in chains:
            nx.add_path(before, [place[name] for name in names if name in place])
        try:
            return list(nx.lexicographical_topological_sort(before))
        except nx.NetworkXUnfeasible:
            cycle = [layout.names[a] for a, _ in nx.find_cycle(before)]
            self.problems.append(
                f"the axes {', '.join(map(repr, cycle))} cut a dimension in one order here and in another there; "
                "list them in the same order everywhere, the outermost first"
            )
            return list(range(len(layout.names)))

    # -- calls ------------------------------------------------------------------------------------------------------

    def _add_call(self, call: ShardCall) -> None:
        if not call.operators:
            self.problems.append(f"{call.title} runs no operator that the captured graph shows; take its hint off")
            return
        hint = call.hint
        inputs = self._side(call, "in_strategy", "input", call.inputs, hint.inputs)
        if call.operator is None:
            for i, wanted in inputs.items():
                self._bound(call.inputs[i], wanted)
        else:
            self._add_operands(call, inputs)
        for i, wanted in self._side(call, "out_strategy", "output", call.outputs, hint.outputs).items():
            self._bound(call.outputs[i], wanted)

    def _side(
        self,
        call: ShardCall,
        name: str,
        what: str,
        nodes: Sequence[str | None],
        cuts: Sequence[TensorSplit | None] | None,
    ) -> dict[int, AllowedPlacements]:
        """The allowed layouts of inputs or outputs, by position."""
        if cuts is None:
            return {}
        if len(cuts) != len(nodes):
            has = f"{len(nodes)} tensor {what}{'s' if len(nodes) != 1 else ''}"
            shapes = ", ".join("unread" if node is None else str(tuple(self._values[node].shape)) for node in nodes)
            self.problems.append(
                f"{call.title} has {has} ({shapes}), but {name} has {len(cuts)} entries; give one for each (None: free)"
            )
            return {}
        found = {}
        for i, (node, cut) in enumerate(zip(nodes, cuts, strict=True)):
            if cut is not None and node is not None:
                wanted = self._wanted(f"{call.title}, {what} {i}", cut, self._values[node], node)
                if wanted is not None:
                    found[i] = wanted
        return found

    def _wanted(
        self, where: str, cut: TensorSplit, value: torch.Tensor, node: str | None = None
    ) -> AllowedPlacements | None:
        shape = tuple(value.shape)
        wrong = list(misfits(cut, shape))
        n = math.prod(parts_of(cut))
        if self.n_devices % n:
            possible = ", ".join(map(str, divisors(self.n_devices)))
            wrong.append(f"{cut} are {n} parts for {self.n_devices} devices; their product must be one of {possible}")
        if wrong:
            batched = node is not None and self._is_batched(node)
            rows = f" (a micro-batch has {self._rows} of {self.program.batch_size} samples)"
            self.problems += [f"{where}: {p}" + (rows if batched and self._m > 1 else "") for p in wrong]
            return None
        fitting = self._layouts(cut, shape)
        if not fitting and math.prod(self._mesh) == self.n_devices:
            self.problems.append(
                f"{where}: no axes of the mesh {self._mesh} ({', '.join(self._names)}) cut it into {cut}"
            )
        return AllowedPlacements(fitting, f"{where} as {cut}") if fitting else None

    def _is_batched(self, name: str) -> bool:
        recorded = self._nodes[name].meta.get("val")
        return isinstance(recorded, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in recorded.shape)

    def _layouts(self, cut: TensorSplit, shape: Sequence[int]) -> frozenset[Placements]:
        if isinstance(cut, TensorLayout):
            of = {name: d for d, names in enumerate(cut.dims) for name in names}
            sizes = zip(self._names, self._mesh, strict=True)
            return frozenset({tuple(of.get(name, REPLICATE) if n > 1 else REPLICATE for name, n in sizes)})
        fitting = layouts(shape, self._mesh, partial=False)
        return frozenset(one for one in fitting if slices_in(one, self._mesh, len(shape)) == cut)

    def _bound(self, border: str | None, wanted: AllowedPlacements) -> None:
        """Constrain a border of a call, whose operand and result have the same placements."""
        assert border is not None
        self._operands[border][0].append(wanted)
        self._results[border][0].append(wanted)

    def _add_operands(self, call: ShardCall, inputs: Mapping[int, AllowedPlacements]) -> None:
        """The layouts of the operands of a call that is one operator."""
        node = self._nodes[str(call.operator)]
        operands = [o.name if isinstance(o, fx.Node) else None for o in self._rule(node)[1]]
        for i, wanted in inputs.items():
            name = call.inputs[i]
            places = [place for place, operand in enumerate(operands) if operand == name]
            same = [j for j, other in enumerate(call.inputs) if other == name]
            if len(places) == len(same):
                places = [places[same.index(i)]]
            if not places and any(code != REPLICATE for layout in wanted.layouts for code in layout):
                self.problems.append(f"{wanted.reason}: {describe(node)} needs it whole on every device")
            for place in places:
                self._operands[node.name][place].append(wanted)

    def _rule(self, node: fx.Node) -> tuple[Any, Sequence[Any]]:
        """(rule or None, operands) of an operator."""
        rule = bind(node, lambda n: self._values[n.name])
        if rule is None or len(rule.outputs) != len(tensors_in(self._values[node.name])):
            return None, [n for n in node.all_input_nodes if isinstance(self._values.get(n.name), torch.Tensor)]
        return rule, rule.operands

    def _check_operators(self) -> None:
        for name, wanted in self._operands.items():
            node = self._nodes[name]
            agree = [
                self._check_agreement(f"operand {p} of {describe(node)}", several) for p, several in wanted.items()
            ]
            if not all(agree) or not self._mesh:
                continue
            rule, operands = self._rule(node)
            results = len(tensors_in(self._values[name]))
            offered = [repeated(len(operands), results, len(self._mesh))]
            if rule is not None:
                offered = strategies(rule, self._mesh)
            wanted_layouts = {p: [w.layouts for w in several] for p, several in wanted.items()}
            fits = [s for s in offered if all(s.inputs[p] in one for p, sets in wanted_layouts.items() for one in sets)]
            if fits:
                continue
            cuts = {
                p: slices_in(next(iter(several[0].layouts)), self._mesh, self._values[operands[p].name].dim())
                for p, several in wanted.items()
            }
            who = "; ".join(dict.fromkeys(w.reason for several in wanted.values() for w in several))
            why = [] if rule is None else list(clashes(rule, cuts))
            why = why or [refused(offered, cuts, self._mesh, [o.name for o in operands if isinstance(o, fx.Node)])]
            self.problems += [f"{who}: {describe(node)} cannot be split so: {one}" for one in why]

    def _check_agreement(self, what: str, several: Sequence[AllowedPlacements]) -> bool:
        if frozenset.intersection(*(wanted.layouts for wanted in several)):
            return True
        reasons = " and ".join(dict.fromkeys(wanted.reason for wanted in several))
        self.problems.append(f"hints contradict each other about {what}: {reasons}")
        return False

    # -- parameters -------------------------------------------------------------------------------------------------

    def _add_parameter(self, path: str, name: str, cut: TensorSplit) -> None:
        full = f"{path}.{name}".lstrip(".")
        tensor = get_attribute(self.model, full)
        module = self.program.graph_module
        held = [str(n.target) for n in self.program.graph.nodes if n.op == "get_attr"]
        same = [target for target in held if get_attribute(module, target) is tensor]
        if not same:
            self.problems.append(f"parameter_plan of module '{path}' names '{full}', but no operator reads it")
            return
        wanted = self._wanted(f"parameter '{full}'", cut, tensor)
        if wanted is not None:
            self._stored[same[0]].append(wanted)  # the first of tied parameters represents all


def _prime_factors(n: int) -> tuple[int, ...]:
    """Descending; (1,) for one."""
    found: list[int] = []
    while n > 1:
        factor = divisors(n)[1]
        found.append(factor)
        n //= factor
    return tuple(reversed(found)) or (1,)
