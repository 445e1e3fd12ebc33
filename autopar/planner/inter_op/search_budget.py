"""How closely a search looks: at everything where that is quick, otherwise at what promises most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchBudget:
    """How closely a search looks."""

    tolerance: float  # share of the objective that is left unproven
    counts: int  # numbers of micro-batches in the first look
    chunks: tuple[int, ...]  # stages per device under interleaved schedules
    halvings: int  # times that the gaps between numbers of micro-batches are halved
    halved: int  # vectors of device counts for which gaps are halved, the largest first
    refined: int  # plans of each schedule that are improved over cuts near theirs
    rounds: int  # times that each of them is improved
    simulated: int = 24  # most partitions that the simulator lays out
    fewer: tuple[int, ...] = (1, 2)  # with many devices: also plans on their number halved this many times
    cuts: int = 400  # most cuts in one search


# Up to this many vectors of device counts, the search proves its plan best.
EXACT_STATES = 100
EXACT = SearchBudget(tolerance=0.0, counts=20, chunks=(2, 3, 4), halvings=6, halved=4, refined=2, rounds=3)
COARSE = SearchBudget(tolerance=2e-3, counts=9, chunks=(2,), halvings=1, halved=1, refined=1, rounds=1)
# For clusters that are planned ahead, where strategies of meshes are chosen, too.
AHEAD = SearchBudget(1e-4, 20, (2, 3), halvings=0, halved=0, refined=1, rounds=1, simulated=400)
AHEAD_COARSE = SearchBudget(5e-3, 9, (2, 4), halvings=0, halved=0, refined=0, rounds=0, simulated=60, cuts=120)
