"""What the stages of an arrangement hold and send to each other, in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.memory_formula import activation_bytes, resident_bytes
from autopar.schedule.timeline import StageMemory


@dataclass
class StageContent:
    """Bytes on each device of one stage; activations and messages of the whole batch."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    received: float = 0.0
    received_gradient: float = 0.0  # gradients that the stage sends back for what it received
    once: float = 0.0  # s once a step: what a mesh does for parameters that several operators read

    def memory(self, atoms: Atoms, inside: Collection[int], recompute: bool, shares: Sequence[float]) -> StageMemory:
        """What a device holds. `inside`: the stage's atoms. `shares`: of the batch, in each micro-batch."""
        working = float(atoms.transient[list(inside)].max())
        kept, transient = activation_bytes(self.saved, self.received, working, recompute)
        return StageMemory(
            parameters=int(self.parameters),
            gradients=int(self.gradients),
            optimizer=int(self.optimizer),
            activation=tuple(int(kept * share) for share in shares),
            transient=int(transient * max(shares)),
        )


def stage_contents(atoms: Atoms, arrangement: Arrangement, optimizer: str, training: bool) -> list[StageContent]:
    """What each device of every stage holds and receives; what several atoms of a stage share counts once."""
    stage_of = _stage_of(arrangement)
    contents = [StageContent() for _ in arrangement.stages]
    for own, mine in arrangement.by_configuration(atoms):
        for shared, weight in own.parameters:
            resident = resident_bytes(weight, optimizer, training)
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].parameters += resident.parameter
                contents[stage].gradients += resident.gradient
                contents[stage].optimizer += resident.optimizer
                contents[stage].once += weight.once
        for shared in own.saved:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].saved += shared.nbytes
        for value in own.values:
            for stage in ({stage_of[atom] for atom in value.consumers} & mine) - {stage_of[value.producer]}:
                contents[stage].received += value.nbytes
                contents[stage].received_gradient += value.grad_nbytes
    return contents


def tied_gradients(atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, ...], float]:
    """Bytes on each device of the gradients that several stages have, by those stages; of a mesh its shards."""
    stage_of = _stage_of(arrangement)
    largest: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)  # by number of the parameter, and stages
    for own, mine in arrangement.by_configuration(atoms):
        for number, (shared, weight) in enumerate(own.parameters):
            holders = tuple(sorted({stage_of[atom] for atom in shared.atoms}))
            if weight.trained and len(holders) > 1 and mine & set(holders):
                largest[number, holders] = max(largest[number, holders], weight.gradient)
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for (_, holders), nbytes in largest.items():
        found[holders] += nbytes
    return dict(found)


def stage_traffic(atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes (forward, backward) of the whole batch between each pair of stages that exchange anything.

    Between meshes each device of the one sends what a device of the other holds.
    """
    stage_of = _stage_of(arrangement)
    found: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for own, mine in arrangement.by_configuration(atoms):
        for value in own.values:
            source = stage_of[value.producer]
            for target in sorted(({stage_of[c] for c in value.consumers} & mine) - {source}):
                forward, backward = found[source, target]
                found[source, target] = (forward + value.nbytes, backward + value.grad_nbytes)
    return dict(sorted(found.items()))


def _stage_of(arrangement: Arrangement) -> dict[int, int]:
    """Atom -> its stage."""
    return {atom: stage for stage, inside in enumerate(arrangement.stages) for atom in inside}
