"""Small atoms joined to a neighbour, so that the partition search has fewer of them to cut.

A small atom with one predecessor or one successor joins it. No cycle arises: every path into, or out of, the atom goes
through that neighbour. Where both sides are possible, it joins the one where more bytes cross:

    A --4 MB--> relu --1 MB--> B        A+relu --1 MB--> B
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from autopar.costs.cost_graph import CostGraph
from autopar.planner.inter_op.constraints import Constraints

# Atoms that take less than this share of the model are small. What they join grows to no more than that share, or to no
# more than this factor times the largest atom in it.
_SMALL = 1e-3
_GROWTH = 1.1


def join_small_atoms(
    costs: CostGraph,
    atoms: list[tuple[str, ...]],
    order: Iterable[tuple[str, str]],
    shares: Mapping[str, float],
    constraints: Constraints,
) -> list[tuple[str, ...]]:
    """`atoms` with small ones joined, in the order of their first operators.

    `order`: pairs (node, node that runs later). `shares`: of the model's seconds, of every operator, in program order.
    """
    joined = _JoinedAtoms(costs, atoms, order, shares, constraints)
    queue = deque(atom for atom in range(len(atoms)) if joined.is_small(atom))
    while queue:
        atom = queue.popleft()
        neighbour = joined.best_neighbour(atom) if joined.is_small(atom) else None
        if neighbour is not None:
            joined.join(neighbour, atom)
            queue.append(neighbour)  # perhaps still small
    place = {name: i for i, name in enumerate(shares)}
    kept = [sorted(members, key=place.__getitem__) for members in joined.members if members]
    return [tuple(members) for members in sorted(kept, key=lambda members: place[members[0]])]


class _JoinedAtoms:
    """Atoms, by number, with the bytes between neighbours; an atom that joined another one has no members left."""

    def __init__(
        self,
        costs: CostGraph,
        atoms: Sequence[tuple[str, ...]],
        order: Iterable[tuple[str, str]],
        shares: Mapping[str, float],
        constraints: Constraints,
    ) -> None:
        self.members = [list(atom) for atom in atoms]
        self._weight = [sum(shares[name] for name in atom) for atom in atoms]
        self._largest = list(self._weight)  # share of the largest atom that joined
        self._small = _SMALL * sum(self._weight)
        self._marks = [_marks(atom, constraints) for atom in atoms]
        self._before: list[dict[int, float]] = [{} for _ in atoms]  # predecessor -> bytes that it sends here
        self._after: list[dict[int, float]] = [{} for _ in atoms]  # successor -> bytes that it receives
        atom_of = {name: i for i, atom in enumerate(atoms) for name in atom}
        for a, b in order:
            if a in atom_of and b in atom_of and atom_of[a] != atom_of[b]:
                source, target = atom_of[a], atom_of[b]
                nbytes = self._before[target].get(source, 0.0) + float(costs.operators[a].output_bytes)
                self._before[target][source] = self._after[source][target] = nbytes

    def is_small(self, atom: int) -> bool:
        return bool(self.members[atom]) and self._weight[atom] < self._small

    def best_neighbour(self, atom: int) -> int | None:
        """The only predecessor or the only successor that may be joined, with most bytes in between."""
        sides = [side[atom] for side in (self._before, self._after)]
        choices = [
            (-nbytes, place, other)
            for place, side in enumerate(sides)
            if len(side) == 1
            for other, nbytes in side.items()
            if self._may_join(atom, other)
        ]
        return min(choices)[2] if choices else None

    def join(self, kept: int, gone: int) -> None:
        """Move the members and neighbours of `gone` to `kept`."""
        self.members[kept] += self.members[gone]
        self.members[gone] = []
        self._weight[kept] += self._weight[gone]
        self._largest[kept] = max(self._largest[kept], self._largest[gone])
        for mine, theirs in ((self._before, self._after), (self._after, self._before)):
            for other, nbytes in mine[gone].items():
                theirs[other].pop(gone, None)
                if other != kept:
                    mine[kept][other] = mine[kept].get(other, 0.0) + nbytes
                    theirs[other][kept] = mine[kept][other]
            mine[kept].pop(gone, None)
            mine[gone] = {}

    def _may_join(self, atom: int, other: int) -> bool:
        limit = max(self._small, _GROWTH * max(self._largest[other], self._largest[atom]))
        return self._marks[other] == self._marks[atom] and self._weight[atom] + self._weight[other] <= limit


def _marks(atom: Sequence[str], constraints: Constraints) -> tuple[object, ...]:
    """Atoms that hints treat differently are not joined."""
    stages = {constraints.stage_of[name] for name in atom if name in constraints.stage_of}
    return tuple(sorted(stages)), any(name in constraints.recompute for name in atom)
