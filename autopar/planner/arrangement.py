"""Where and how the atoms run: the planner's form of a plan, before it has costs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.device_group import DeviceGroup
from autopar.plan.recompute import DESCRIBED
from autopar.plan.validation import places
from autopar.planner.inter_op.atoms import Atoms


@dataclass(frozen=True)
class Arrangement:
    """Which atoms and which device groups each stage has."""

    stages: tuple[tuple[int, ...], ...]  # atoms
    groups: tuple[tuple[DeviceGroup, ...], ...]  # replicas of each stage; of all stages of a rank the same
    n_microbatches: int
    schedule: str
    recompute: tuple[int, ...]  # of each stage, a `Recompute`
    configurations: tuple[str, ...] = ()  # of each stage, by name, or its device kind; (): no stage has a mesh

    @property
    def ranks(self) -> tuple[tuple[DeviceGroup, ...], ...]:
        """The groups of each place in the pipeline."""
        return tuple(dict.fromkeys(self.groups))

    @property
    def chunks(self) -> int:
        """Stages of each group."""
        return len(self.stages) // len(self.ranks)

    @property
    def n_groups(self) -> int:
        return sum(map(len, self.ranks))

    @property
    def n_devices(self) -> int:
        return sum(len(group.devices) for rank in self.ranks for group in rank)

    @property
    def cost_names(self) -> list[str]:
        """What each stage's costs are found by: its stage configuration, or the device kind of its first replica."""
        return list(self.configurations) or [groups[0].kind for groups in self.groups]

    def by_configuration(self, atoms: Atoms) -> list[tuple[Atoms, set[int]]]:
        """For every stage configuration in use the atoms with its bytes, and the numbers of its stages."""
        if not self.configurations:
            return [(atoms, set(range(len(self.stages))))]
        return [
            (atoms.of(name), {stage for stage, own in enumerate(self.configurations) if own == name})
            for name in dict.fromkeys(self.configurations)
        ]

    @property
    def busy(self) -> int:
        """Groups that compute at the same time: a single micro-batch is on one group after the other."""
        return self.n_groups if self.n_microbatches > 1 else 1

    @property
    def replicates_the_model(self) -> bool:
        """Whether several groups have the whole model each."""
        return len(self.stages) == 1 and self.n_groups > 1

    @property
    def plain(self) -> bool:
        """Whether the runtime calls the model itself."""
        return self.n_groups == 1 and self.n_microbatches == 1 and not any(self.recompute)

    def __str__(self) -> str:
        """A plan in a line."""
        ranks = [[device for group in rank for device in group.devices] for rank in self.ranks]
        n_stages, m = len(self.stages), self.n_microbatches
        text = f"{n_stages} stage{'s' if n_stages > 1 else ''} on {places(ranks, self.schedule, self.chunks)}, "
        if any(len(rank[0].devices) > 1 for rank in self.ranks):
            text += "meshes of " + " | ".join(str(len(rank[0].devices)) for rank in self.ranks) + " devices, "
        text += f"{m} micro-batch{'es' if m > 1 else ''}, {self.schedule}"
        for mode, (_, how) in DESCRIBED.items():
            again = [str(s) for s, own in enumerate(self.recompute) if own == mode]
            text += f", {how}{', '.join(again)}" if again else ""
        return text


@dataclass(frozen=True)
class Conditions:
    """What holds for a step under every plan."""

    optimizer: str = "adamw"  # whose state the memory holds
    loss_inside: bool = False  # the loss runs in the last stage (train_step): backwards need not wait for all forwards
