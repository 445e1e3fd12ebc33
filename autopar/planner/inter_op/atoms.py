"""CostGraph -> the graph of atoms that the partition search cuts.

Operators that no cut may separate become one atom, together with all that runs between them. Replicable operators
(positions, masks, sizes) belong to no atom, because every stage computes them for itself. Operators that take hardly
any time join a neighbour (`small_atoms`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx
import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.device_group import StageConfiguration
from autopar.costs.operator_cost import OperatorCost, Weight
from autopar.errors import InputError
from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.constraints import NO_CONSTRAINTS, Constraints
from autopar.planner.inter_op.cuts import AtomGraph
from autopar.planner.inter_op.memory_formula import transient_bytes
from autopar.planner.inter_op.small_atoms import join_small_atoms
from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value
from cost_models.memory.optimizer_step import Implementation


@dataclass(frozen=True)
class Cores:
    """What stages that recompute selectively make again: cores of attention, one after the other."""

    rebuilt: tuple[Shared, ...]  # those of `Atoms.saved` that are not kept
    working: np.ndarray  # [n] bytes of `rebuilt` that are there at once while an atom's backward runs


@dataclass(frozen=True)
class Layers:
    """What stages that recompute layer by layer keep, and what they make again."""

    kept: tuple[Shared, ...]  # what enters layers, and what operators outside of them save
    working: np.ndarray  # [n] bytes that an operator of the atom needs while it runs, with what its layer makes again
    atoms: tuple[int, ...]  # those with operators of layers
    outside: tuple[int, ...] = ()  # atoms that are to be recomputed and have operators outside of layers
    products: tuple[Shared, ...] = ()  # what stages keep besides, that keep every second product of layers
    largest: float = 0.0  # bytes that a layer makes again, at most


@dataclass(frozen=True)
class Atoms:
    """Groups of operators that no cut separates. Bytes are those of the whole batch."""

    nodes: tuple[tuple[str, ...], ...]  # operators of each atom, in program order
    edges: frozenset[tuple[int, int]]  # (atom, atom that runs later)
    values: tuple[Value, ...]
    parameters: tuple[tuple[Shared, Weight], ...]
    saved: tuple[Shared, ...]
    transient: np.ndarray  # [n] bytes
    cores: Cores  # of attention
    layers: Layers
    pinned: tuple[tuple[int, int], ...] = ()  # (atom, stage)
    recomputed: tuple[int, ...] = ()
    unrepeatable: tuple[int, ...] = ()  # their stage may not recompute
    by_configuration: Mapping[str, Atoms] = field(default_factory=dict)  # the same atoms, bytes of its devices

    def of(self, name: str) -> Atoms:
        """The atoms with the bytes that each device has under a stage configuration, or on devices of a kind."""
        return self.by_configuration.get(name, self)

    def sums(self, names: tuple[str, ...], times: np.ndarray) -> np.ndarray:
        """Seconds of every atom from seconds of the nodes `names`; replicable operators are left out."""
        if names not in self._columns:
            atom_of = {name: i for i, atom in enumerate(self.nodes) for name in atom}
            self._columns[names] = np.array([atom_of.get(name, len(self.nodes)) for name in names], dtype=int)
        return np.bincount(self._columns[names], times, len(self.nodes) + 1)[: len(self.nodes)]

    def weight_shares(self, costs: CostGraph, names: tuple[str, ...]) -> np.ndarray:
        """The share of each node's backward that computes gradients of parameters, [nodes]."""
        if names not in self._shares:
            self._shares[names] = np.array([costs.operators[name].weight_share for name in names])
        return self._shares[names]

    def graph(self, weight: np.ndarray) -> AtomGraph:
        """The graph that is cut. `weight`: seconds of each atom, [n]."""
        return AtomGraph(len(self.nodes), self.edges, weight, self.values)

    def run_again(self, costs: CostGraph, names: tuple[str, ...], recompute: Recompute) -> np.ndarray:
        """Whether each node runs again within the backward of a stage with this mode, [nodes]."""
        if (names, recompute) not in self._run_again:
            again = [costs.operators[name].runs_again(recompute) for name in names]
            self._run_again[names, recompute] = np.array(again, dtype=bool)
        return self._run_again[names, recompute]

    def stepped(self, optimizer: str, implementation: Implementation) -> tuple[Stepped, ...]:
        """What the optimizer's step does for each trained parameter."""
        if (optimizer, implementation) not in self._stepped:
            trained = ((weight, shared.atoms) for shared, weight in self.parameters if weight.trained)
            self._stepped[optimizer, implementation] = tuple(
                Stepped(weight.step(optimizer, implementation), readers) for weight, readers in trained
            )
        return self._stepped[optimizer, implementation]

    @cached_property
    def _stepped(self) -> dict[tuple[str, Implementation], tuple[Stepped, ...]]:
        return {}

    @cached_property
    def _run_again(self) -> dict[tuple[tuple[str, ...], Recompute], np.ndarray]:
        return {}

    @cached_property
    def _columns(self) -> dict[tuple[str, ...], np.ndarray]:
        return {}

    @cached_property
    def _shares(self) -> dict[tuple[str, ...], np.ndarray]:
        return {}


def make_atoms(costs: CostGraph, constraints: Constraints = NO_CONSTRAINTS) -> Atoms:
    """The atoms of a cost graph. Raises InputError if the graph has a cycle or none of its operators takes time."""
    graph = costs.graph
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [name for name, _ in nx.find_cycle(graph)]
        raise InputError(
            f"the cost graph has a cycle: {' -> '.join([*cycle, cycle[0]])}; an operator must not depend on itself"
        )
    shares = {n: costs.shares[n] for n, operator in costs.operators.items() if not operator.replicable}
    line = [name for name, operator in costs.operators.items() if not operator.replicable]
    if not line or not sum(shares[name] for name in line) > 0:
        raise InputError(_nothing_to_divide(costs))
    groups = [*graph.graph["fused"], *constraints.together, *_by_pin(constraints.stage_of)]
    # The last operator is in the last stage, which returns the outputs: nothing runs after it.
    ends = [(name, line[-1]) for name in line[:-1] if not any(user in shares for user in graph.successors(name))]
    order = [*graph.edges, *graph.graph.get("order", ()), *ends]
    merged = join_small_atoms(costs, _merged(line, order, groups), order, shares, constraints)
    # Operators of one atom need not be neighbours in the program: number the atoms in an order in which they can run.
    runs = gather(costs, merged, constraints, order).graph(np.zeros(len(merged))).order
    ordered = [merged[atom] for atom in runs]
    return gather_all(costs, ordered, constraints, order)


def gather_all(
    costs: CostGraph,
    nodes: Sequence[tuple[str, ...]],
    constraints: Constraints = NO_CONSTRAINTS,
    order: Sequence[tuple[str, str]] = (),
) -> Atoms:
    """`gather`, also under every stage configuration."""
    return with_configurations(gather(costs, nodes, constraints, order), costs, costs.configurations, constraints)


def with_configurations(
    atoms: Atoms, costs: CostGraph, new: Iterable[StageConfiguration], constraints: Constraints = NO_CONSTRAINTS
) -> Atoms:
    """The same atoms, also under these stage configurations."""
    groups = _Groups(costs, atoms.nodes, constraints)
    own = {c.name: groups.gather(c.operators) for c in new}
    return replace(atoms, by_configuration={**atoms.by_configuration, **own})


def _nothing_to_divide(costs: CostGraph) -> str:
    operators = [operator.key for operator in costs.operators.values()]
    if not operators:
        return "there is nothing to divide over devices: the model has no operators; call the model itself"
    named = ", ".join(operators[:3]) + (f" and {len(operators) - 3} more" if len(operators) > 3 else "")
    return (
        f"there is nothing to divide over devices: no operator of the model takes any time worth a device ({named}); "
        "call the model itself"
    )


def gather(
    costs: CostGraph,
    nodes: Sequence[tuple[str, ...]],
    constraints: Constraints = NO_CONSTRAINTS,
    order: Iterable[tuple[str, str]] = (),
) -> Atoms:
    """The groups `nodes` of all operators that are not replicable as atoms, with what they share and send.

    `order`: pairs (node, node that runs later). The last group returns the model's outputs.
    """
    return _Groups(costs, nodes, constraints, order).gather(costs.operators)


class _Groups:
    """Groups of operators, with what their atoms share under all stage configurations."""

    def __init__(
        self,
        costs: CostGraph,
        nodes: Sequence[tuple[str, ...]],
        constraints: Constraints,
        order: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._nodes = tuple(nodes)
        self._training = costs.training
        atom_of = {name: i for i, atom in enumerate(nodes) for name in atom}
        self._atom_of = atom_of
        self._members = [(name, atom_of[name]) for name in costs.operators if name in atom_of]
        pairs = ((atom_of[a], atom_of[b]) for a, b in order if a in atom_of and b in atom_of)
        self._edges = frozenset((a, b) for a, b in pairs if a != b)
        self._readers = list(_readers(costs, atom_of))
        self._entering = _entering_layers(costs, atom_of)
        layered = (atom for name, atom in self._members if costs.operators[name].block is not None)
        again = [name for name in constraints.recompute if name in atom_of]
        outside = (atom_of[name] for name in again if costs.operators[name].block is None)
        self._layered, self._outside = tuple(sorted(set(layered))), tuple(sorted(set(outside)))
        pinned = {(atom_of[name], stage) for name, stage in constraints.stage_of.items() if name in atom_of}
        self._pinned = tuple(sorted(pinned))
        self._recomputed = tuple(sorted({atom_of[name] for name in again}))
        unrepeatable = {atom for name, atom in self._members if not costs.operators[name].repeatable}
        self._unrepeatable = tuple(sorted(unrepeatable))

    def gather(self, operators: Mapping[str, OperatorCost]) -> Atoms:
        """The atoms, with these costs of all operators."""
        saved: dict[Hashable, float] = {}
        savers: dict[Hashable, set[int]] = defaultdict(set)
        parameters: dict[str, Weight] = {}
        readers: dict[str, set[int]] = defaultdict(set)
        transient = np.zeros(len(self._nodes))
        kept: set[Hashable] = set()  # by an operator outside of the core that makes it
        of_core: dict[Hashable, int] = {}
        for name, atom in self._members:
            operator = operators[name]
            for storage, nbytes in operator.saved.items():
                saved[storage] = max(nbytes, saved.get(storage, 0.0))
                savers[storage].add(atom)
                if operator.core is None or storage not in operator.rebuilt:
                    kept.add(storage)
                else:
                    of_core[storage] = operator.core
            for parameter, weight in operator.parameters.items():
                parameters[parameter] = weight
                readers[parameter].add(atom)
            transient[atom] = max(transient[atom], _transient(operator))
        return Atoms(
            self._nodes,
            self._edges,
            self._values(operators),
            tuple((_shared(w.held, readers[p]), w) for p, w in parameters.items()),
            tuple(_shared(n, savers[s]) for s, n in saved.items()),
            transient,
            self._cores(operators, saved, savers, {s: core for s, core in of_core.items() if s not in kept}),
            self._layers(operators),
            self._pinned,
            self._recomputed,
            self._unrepeatable,
        )

    def _cores(
        self,
        operators: Mapping[str, OperatorCost],
        saved: Mapping[Hashable, float],
        savers: Mapping[Hashable, set[int]],
        of_core: Mapping[Hashable, int],
    ) -> Cores:
        """`of_core`: storage -> the core that makes it, if no operator outside of that keeps it."""
        together: dict[int, float] = defaultdict(float)
        for storage, number in of_core.items():
            together[number] += saved[storage]
        working = np.zeros(len(self._nodes))
        for name, atom in self._members:
            core = operators[name].core
            if core is not None:
                working[atom] = max(working[atom], together[core])
        return Cores(tuple(_shared(saved[s], savers[s]) for s in of_core), working)

    def _layers(self, operators: Mapping[str, OperatorCost]) -> Layers:
        """The input of a layer counts for the stage that computes it. Other stages count it as received."""
        kept: dict[Hashable, float] = {}
        keepers: dict[Hashable, set[int]] = defaultdict(set)
        made: dict[int, dict[Hashable, float]] = defaultdict(dict)  # block -> what its operators save
        products: dict[Hashable, tuple[float, int]] = {}  # storage of what kept operators make -> bytes, atom

        def keep(tensors: Mapping[Hashable, float], atom: int) -> None:
            for storage, nbytes in tensors.items():
                kept[storage] = max(nbytes, kept.get(storage, 0.0))
                keepers[storage].add(atom)

        for name, atom in self._members:
            operator = operators[name]
            if operator.block is None:
                keep(operator.saved, atom)
                continue
            made[operator.block].update(operator.saved if operator.saved_within is None else operator.saved_within)
            if operator.kept:
                products |= {storage: (nbytes, atom) for storage, nbytes in operator.results.items()}
            for source, keeper in self._entering[name]:
                keep(operators[source].results, keeper)
        largest = {number: sum(n for s, n in saved.items() if s not in kept) for number, saved in made.items()}
        working = np.zeros(len(self._nodes))
        for name, atom in self._members:
            operator = operators[name]
            transient = _transient(operator)
            if operator.block is not None:  # the layer's saved bytes include what its second run gathers
                transient += largest[operator.block] - operator.regathered_bytes
            working[atom] = max(working[atom], transient)
        shared = tuple(_shared(n, keepers[s]) for s, n in kept.items())
        besides = tuple(Shared(nbytes, (atom,)) for storage, (nbytes, atom) in products.items() if storage not in kept)
        most = max(largest.values(), default=0.0)
        return Layers(shared, working, self._layered, self._outside, besides, most)

    def _values(self, operators: Mapping[str, OperatorCost]) -> tuple[Value, ...]:
        """The values that atoms read of each other; the last atom reads the model's outputs, to return them."""
        values = []
        for name, atom, readers in self._readers:
            operator = operators[name]
            gradient = operator.gradient_bytes if self._training else 0.0
            values.append(Value(atom, readers, operator.output_bytes, gradient, operator.copies, operator.gather))
        return tuple(values)


def _shared(nbytes: float, atoms: set[int]) -> Shared:
    return Shared(nbytes, tuple(sorted(atoms)) if len(atoms) > 1 else tuple(atoms))


def _readers(costs: CostGraph, atom_of: Mapping[str, int]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield (node, its atom, the other atoms that read its result). The last atom also reads the model's outputs."""
    outputs, last = set(costs.graph.graph["outputs"]), max(atom_of.values(), default=0)
    for name, atom in atom_of.items():
        consumers = {atom_of[user] for user in costs.graph.successors(name) if user in atom_of}
        if name in outputs:
            consumers.add(last)
        consumers.discard(atom)
        if consumers:
            yield name, atom, tuple(sorted(consumers))


def _entering_layers(costs: CostGraph, atom_of: Mapping[str, int]) -> dict[str, list[tuple[str, int]]]:
    """Operator of a layer -> the nodes outside of the layer that it reads, each with the atom that keeps the result."""
    return {
        name: [
            (source, atom_of.get(source, atom))
            for source in costs.graph.predecessors(name)
            if costs.operators[source].block != costs.operators[name].block
        ]
        for name, atom in atom_of.items()
        if costs.operators[name].block is not None
    }


def recomputed_share(costs: CostGraph) -> float:
    """The part of what a micro-batch's operators save that is there at once in a stage that recomputes its layers one
    after the other; 0 without layers."""
    whole = gather(costs, [tuple(name for name, operator in costs.operators.items() if not operator.replicable)])
    saved = sum(shared.nbytes for shared in whole.saved)
    if not (saved and whole.layers.atoms):
        return 0.0
    return min(1.0, (whole.layers.largest + sum(shared.nbytes for shared in whole.layers.kept)) / saved)


def _transient(operator: OperatorCost) -> float:
    """Bytes while it runs."""
    own = transient_bytes(operator.allocated_bytes, operator.output_bytes, operator.gradient_bytes)
    return own + operator.regathered_bytes


def _by_pin(stage_of: Mapping[str, int]) -> list[frozenset[str]]:
    """One group per pinned stage: its operators stay together."""
    groups: dict[int, set[str]] = defaultdict(set)
    for name, stage in stage_of.items():
        groups[stage].add(name)
    return [frozenset(group) for group in groups.values()]


def _merged(
    line: Sequence[str], order: Iterable[tuple[str, str]], groups: Iterable[Iterable[str]]
) -> list[tuple[str, ...]]:
    """`line` with each group, and all that must run between its members, as one; ordered by first members."""
    place = {name: i for i, name in enumerate(line)}
    linked = nx.DiGraph()
    linked.add_nodes_from(line)
    linked.add_edges_from((a, b) for a, b in order if a in place and b in place)
    for group in groups:
        members = sorted((name for name in group if name in place), key=place.__getitem__)
        # With a cycle through all members, what must run between two of them is in the same strong component.
        nx.add_cycle(linked, members)
    components = [sorted(c, key=place.__getitem__) for c in nx.strongly_connected_components(linked)]
    return [tuple(c) for c in sorted(components, key=lambda c: place[c[0]])]
