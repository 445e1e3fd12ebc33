"""What a partition problem says of the model: its atoms, and the cuts between which stages may lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.planner.inter_op.checks import check, check_costs
from autopar.planner.inter_op.cut_tables import CutBlocks, Tables, tables
from autopar.planner.inter_op.stage_bytes import Shared, Stepped, Value


@dataclass(frozen=True)
class Space:
    """The atoms, what they share and send, and the cuts between which stages may lie. Bytes of the whole batch.

    Raises:
        ValueError: bytes are NaN, infinite or negative, an array has the wrong shape, an atom does not exist.
    """

    cuts: np.ndarray  # bool [n_cuts, n]: the atoms before each cut; by size, from none to all of them
    values: tuple[Value, ...]
    resident: tuple[Shared, ...]  # parameters, gradients, optimizer state, buffers; whatever the batch
    gradients: tuple[Shared, ...]  # reduced once a step where the stage is replicated; whatever the batch
    saved: tuple[Shared, ...]  # activations kept for backward
    transient: np.ndarray  # [n] bytes while the atom runs; the maximum over a stage counts
    once: tuple[Shared, ...] = ()  # seconds once a step of a stage that has any of the atoms
    stepped: tuple[Stepped, ...] = ()  # what the optimizer does once a step
    rebuilt: tuple[Shared, ...] = ()  # those of `saved` that stages make again which recompute cores of attention
    core: np.ndarray | None = None  # [n] bytes of these that are there at once while the atom's backward runs
    kept: tuple[Shared, ...] = ()  # what stages keep that make layers again one by one
    block: np.ndarray | None = None  # [n] bytes at work in their backwards, with what the atom's layer makes again
    layered: tuple[int, ...] = ()  # atoms with operators of such layers
    pinned: tuple[tuple[int, int], ...] = ()  # (atom, stage that it must be in, from 0)
    recomputed: tuple[int, ...] = ()  # atoms whose stage must recompute
    outside: tuple[int, ...] = ()  # those of them that are not in layers that run again one by one
    unrepeatable: tuple[int, ...] = ()  # atoms whose stage may not
    lane: float = 0.0  # s per byte between nodes, for values that several devices of a node hold alike
    alike: Space | None = None  # over the same cuts, so that what depends on these alone is computed once for both

    def __post_init__(self) -> None:
        check(self.cuts.ndim == 2 and self.cuts.dtype == np.bool_, "cuts must be an array of bool [n_cuts, n]")
        n = self.n_atoms
        check(n >= 1, "the problem needs at least one atom")
        check(len(self.cuts) >= 2 and not self.cuts[0].any() and bool(self.cuts[-1].all()), "cuts go from none to all")
        sizes = self.cuts.sum(axis=1)
        check(bool((np.diff(sizes) >= 0).all()), "cuts must be sorted by the number of atoms before them")
        check(self.transient.shape == (n,), f"transient must have shape {(n,)}, got {self.transient.shape}")
        check_costs("transient", self.transient)
        check_costs("values: nbytes", [value.nbytes for value in self.values])
        check_costs("values: grad_nbytes", [value.grad_nbytes for value in self.values])
        check_costs("values: gather", [value.gather for value in self.values])
        check_costs("lane", self.lane)
        for index, value in enumerate(self.values):
            inside = all(0 <= atom < n for atom in (value.producer, *value.consumers))
            check(inside, f"values[{index}] names an atom outside 0..{n - 1}: {value}")
        check(self.alike is None or self.alike.cuts is self.cuts, "a space that is alike has other cuts")
        check(self.core is None or self.core.shape == (n,), f"core must have shape {(n,)}")
        check(self.block is None or self.block.shape == (n,), f"block must have shape {(n,)}")
        for name in ("resident", "gradients", "saved", "once", "rebuilt", "kept"):
            items: tuple[Shared, ...] = getattr(self, name)
            check_costs(f"{name}: nbytes", [item.nbytes for item in items])
            for index, item in enumerate(items):
                inside = all(0 <= atom < n for atom in item.atoms)
                check(inside, f"{name}[{index}] names an atom outside 0..{n - 1}: {item}")
        hinted = (*(atom for atom, _ in self.pinned), *self.recomputed, *self.outside, *self.unrepeatable)
        for atom in (*hinted, *self.layered):
            check(0 <= atom < n, f"a hint names an atom outside 0..{n - 1}: {atom}")

    @property
    def n_atoms(self) -> int:
        return int(self.cuts.shape[1])

    @cached_property
    def cut_blocks(self) -> CutBlocks:
        return CutBlocks(self.cuts) if self.alike is None else self.alike.cut_blocks

    @cached_property
    def tables(self) -> Tables:
        """Every quantity of a stage, by pair of cuts."""
        return tables(
            self.cut_blocks,
            values=self.values,
            lane=self.lane,
            resident=self.resident,
            gradients=self.gradients,
            saved=self.saved,
            transient=self.transient,
            once=self.once,
            stepped=self.stepped,
            rebuilt=self.rebuilt,
            core=self.core,
            kept=self.kept,
            block=self.block,
            layered=self.layered,
            outside=self.outside,
            recomputed=self.recomputed,
            unrepeatable=self.unrepeatable,
        )
