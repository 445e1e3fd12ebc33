"""How closely a search looks: at everything where that is quick, else at what promises most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchBudget:
    """How closely a search looks."""

    tolerance: float  # share of the objective that is left unproven
    counts: int  # numbers of micro-batches that are looked at first
    chunks: tuple[int, ...]  # stages a device under interleaved schedules
    halvings: int  # of the gaps between numbers of micro-batches
    halved: int  # vectors of device counts for which that is done, the largest first
    refined: int  # plans of each schedule that are searched for again, over cuts near theirs
    rounds: int  # of that
    simulated: int = 24  # partitions that the simulator lays out, at most
    fewer: tuple[int, ...] = (1, 2)  # where devices are many: how often their number is halved
    cuts: int = 400  # that are looked at, at most


# Up to so many vectors of device counts everything is proven.
EXACT_STATES = 100
EXACT = SearchBudget(tolerance=0.0, counts=20, chunks=(2, 3, 4), halvings=6, halved=4, refined=2, rounds=3)
COARSE = SearchBudget(tolerance=2e-3, counts=9, chunks=(2,), halvings=1, halved=1, refined=1, rounds=1)
ONE_OF_SEVERAL = SearchBudget(5e-3, 6, (2,), halvings=0, halved=0, refined=0, rounds=0, simulated=6, fewer=(), cuts=160)
