"""CostGraph -> the line of atoms that the partition search cuts.

Operators stand in program order. Those that no cut may separate become one atom together with all that stands between
them; replicable ones (positions, masks, sizes) belong to no atom, since every stage computes them for itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from autopar.costgraph import CostGraph
from autopar.search.problem import Shared, Value

# Cuts next to an operator that takes less than this share of the model are not looked at one by one: of all cuts
# between two larger operators the one where least has to be sent is kept.
_SMALL = 1e-3
_MOST_CUTS = 600


@dataclass(frozen=True)
class Atoms:
    """The operators as a line. Bytes are those of the whole batch; a micro-batch has its share of them."""

    nodes: tuple[tuple[str, ...], ...]  # operators of each atom, in program order
    values: tuple[Value, ...]
    parameters: tuple[tuple[Shared, bool], ...]  # bytes, and whether it is trained
    saved: tuple[Shared, ...]
    transient: np.ndarray  # [n] bytes
    cut_allowed: np.ndarray  # bool [n + 1]

    def sums(self, names: tuple[str, ...], times: np.ndarray) -> np.ndarray:
        """Seconds of every atom from seconds of every node; replicable operators are left out."""
        of = dict(zip(names, times, strict=True))
        return np.array([sum(of[name] for name in atom) for atom in self.nodes])


def make_atoms(costs: CostGraph) -> Atoms:
    """The atoms of a cost graph, with all that crosses the cuts between them and the cuts that are worth a look."""
    graph = costs.graph
    line = [name for name, data in graph.nodes(data=True) if not data["replicable"]]
    place = {name: i for i, name in enumerate(line)}
    glued = np.zeros(len(line) + 1, dtype=bool)  # glued[i]: no cut between i - 1 and i
    for group in graph.graph["fused"]:
        inside = [place[name] for name in group if name in place]
        if inside:
            glued[min(inside) + 1 : max(inside) + 1] = True
    starts = [i for i in range(len(line)) if not glued[i]] or [0]
    atoms = gather(costs, tuple(tuple(line[a:b]) for a, b in zip(starts, [*starts[1:], len(line)], strict=True)))
    return replace(atoms, cut_allowed=_cuts(costs, atoms.nodes, atoms.values))


def gather(costs: CostGraph, nodes: tuple[tuple[str, ...], ...]) -> Atoms:
    """`nodes` (all operators that are not replicable, grouped) as atoms, with all that crosses any cut between them.

    Values must flow from earlier to later groups. The last group returns the model's outputs.
    """
    graph = costs.graph
    atom_of = {name: i for i, atom in enumerate(nodes) for name in atom}
    values = _values(costs, atom_of, len(nodes))
    saved: dict[int, float] = {}
    savers: dict[int, set[int]] = defaultdict(set)
    parameters: dict[str, tuple[int, bool]] = {}
    readers: dict[str, set[int]] = defaultdict(set)
    transient = np.zeros(len(nodes))
    for name, data in graph.nodes(data=True):
        if name not in atom_of:
            continue
        atom = atom_of[name]
        for storage, nbytes in data["saved"].items():
            saved[storage] = max(nbytes, saved.get(storage, 0.0))
            savers[storage].add(atom)
        for parameter, cost in data["parameters"].items():
            parameters[parameter] = cost
            readers[parameter].add(atom)
        transient[atom] = max(transient[atom], data["fresh"] + data["output"] + data["gradient"])
    return Atoms(
        nodes,
        values,
        tuple((Shared(float(n), tuple(sorted(readers[p]))), trained) for p, (n, trained) in parameters.items()),
        tuple(Shared(n, tuple(sorted(savers[s]))) for s, n in saved.items()),
        transient,
        np.ones(len(nodes) + 1, dtype=bool),
    )


def _values(costs: CostGraph, atom_of: dict[str, int], n: int) -> tuple[Value, ...]:
    graph = costs.graph
    outputs = set(graph.graph["outputs"])
    values = []
    for name in atom_of:
        consumers = {atom_of[user] for user in graph.successors(name) if user in atom_of}
        if name in outputs:
            consumers.add(n - 1)  # the last stage returns all outputs
        consumers = {c for c in consumers if c > atom_of[name]}
        if consumers:
            data = graph.nodes[name]
            gradient = data["gradient"] if costs.training else 0.0
            values.append(Value(atom_of[name], tuple(sorted(consumers)), data["output"], gradient))
    return tuple(values)


def _cuts(costs: CostGraph, nodes: tuple[tuple[str, ...], ...], values: tuple[Value, ...]) -> np.ndarray:
    """Where cutting is worth looking at: between operators that take time, at the narrowest place."""
    table = costs.tables[0]
    seconds = table.forward[-1] + table.backward[-1]
    of = dict(zip(table.nodes, seconds, strict=True))
    weight = np.array([sum(of[name] for name in atom) for atom in nodes])
    live = np.zeros(len(nodes) + 2)
    for value in values:
        live[value.producer + 1] += value.nbytes
        live[max(value.consumers) + 1] -= value.nbytes
    live = np.cumsum(live)[: len(nodes) + 1]  # live[c]: bytes that cross cut c
    allowed = np.zeros(len(nodes) + 1, dtype=bool)
    threshold = max(_SMALL * weight.sum(), np.sort(weight)[-_MOST_CUTS] if len(weight) > _MOST_CUTS else 0.0)
    large = [i for i in range(len(nodes)) if weight[i] >= threshold]
    for left, right in itertools.pairwise(large):
        between = np.arange(left + 1, right + 1)
        allowed[between[int(np.argmin(live[between]))]] = True
    return allowed
