"""What the stages of an arrangement hold and send to each other, in bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.costs.sends import Sent
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.atoms import Atoms
from autopar.planner.inter_op.memory_formula import Activations, activation_bytes, resident_bytes
from autopar.schedule.timeline import StageMemory


@dataclass
class StageContent:
    """Bytes on each device of one stage; activations and messages of the whole batch."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    rebuilt: float = 0.0  # of `saved`, what the cores of attentions make
    kept: float = 0.0  # where layers run again one by one
    products: float = 0.0  # besides, where these keep every second product
    received: float = 0.0
    received_gradient: float = 0.0  # gradients that the stage sends back for what it received
    once: float = 0.0  # s once a step: what a mesh does for parameters that several operators read

    def memory(self, atoms: Atoms, inside: Collection[int], recompute: int, shares: Sequence[float]) -> StageMemory:
        """What a device holds. `inside`: the stage's atoms. `shares`: of the batch, in each micro-batch."""
        working = float(atoms.transient[list(inside)].max())
        core = float(atoms.cores.working[list(inside)].max())
        block = float(atoms.layers.working[list(inside)].max())
        activations = Activations(
            self.saved, self.received, working, self.rebuilt, core, self.kept, block, self.products
        )
        kept, transient = activation_bytes(activations, recompute)
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
        for shared in own.cores.rebuilt:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].rebuilt += shared.nbytes
        for shared in own.layers.kept:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].kept += shared.nbytes
        for shared in own.layers.products:
            for stage in {stage_of[atom] for atom in shared.atoms} & mine:
                contents[stage].products += shared.nbytes
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


class Traffic(NamedTuple):
    """What a stage sends to a later one and receives from it, of the whole batch."""

    forward: list[Sent]  # as the devices of the later stage hold it
    backward: list[Sent]  # as the devices of the earlier stage hold it

    @property
    def nbytes(self) -> tuple[float, float]:
        """Forward and backward, on each device that receives."""
        return sum(one.nbytes for one in self.forward), sum(one.nbytes for one in self.backward)


def stage_traffic(atoms: Atoms, arrangement: Arrangement) -> dict[tuple[int, int], Traffic]:
    """What each pair of stages exchanges."""
    stage_of = _stage_of(arrangement)
    found: dict[tuple[int, int], Traffic] = defaultdict(lambda: Traffic([], []))
    for own, mine in arrangement.by_configuration(atoms):
        for value in own.values:
            source = stage_of[value.producer]
            for target in {stage_of[c] for c in value.consumers} - {source}:
                found[source, target].forward.extend([value.forward] if target in mine else ())
                found[source, target].backward.extend([value.backward] if source in mine else ())
    return dict(sorted(found.items()))


def _stage_of(arrangement: Arrangement) -> dict[int, int]:
    """Atom -> its stage."""
    return {atom: stage for stage, inside in enumerate(arrangement.stages) for atom in inside}
