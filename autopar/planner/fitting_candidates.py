"""The search's candidates, checked against the memory by their rehearsed steps.

The partition search adds up bytes by a formula. The plan that it chooses is rehearsed (`rehearsed_memory.py`), and one
whose step exceeds the memory of a device is dropped. Where a search is quick, the best partition of the same kind that
needs less by the formula takes its place:

    search -> candidates -> choose -> rehearse -- fits --> plan
      ^             ^                     |
      |             '- with less memory <-+- dropped
      '--- bytes of the formula times the smallest excess, where all are dropped

Where memory may lack (`_looks_again`), a second search takes the formula's bytes for less than they are, as the formula
may be too high; of its candidates, too, only those that the rehearsal lets pass are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.costs.cost_graph import CostGraph
from autopar.planner.arrangement import Arrangement
from autopar.planner.inter_op.ahead import SearchingAhead
from autopar.planner.inter_op.at_hand import SearchingAtHand
from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.inter_op.config import MeshChoices
from autopar.planner.inter_op.memory_formula import all_resident
from autopar.planner.rehearsed_memory import Peaks, rehearsed
from autopar.planner.search_options import SearchOptions

_FEWER = 0.8  # share of the formula's bytes: it is up to 18 % above what steps of T5 and ResNet-50 hold
_FEWER_AHEAD = 0.7  # the same for clusters: up to 27 % above what layers that run again hold on a GPU
_MOST_SEARCHES = 4
_MOST_FURTHER = 2  # searches for a plan that is faster than one that fits, where still faster ones were dropped
_MOST_DROPPED = 20  # candidates in whose place others are looked for
_ALL = 1 + 1e-9  # of the memory, with rounding
_STEP = 1.005  # the next search asks for this much less memory than what exceeded it

Choose = Callable[[CostGraph, Sequence[Candidate]], Candidate]


@dataclass
class Found:
    """The result of the searches: candidates by predicted time; those that were rehearsed fit the memory."""

    searching: Searching
    candidates: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None
    excess: float = math.inf  # smallest share of the memory that a dropped candidate needs; of all searches at the end
    room: float = math.inf  # smallest share of the formula's bytes of a dropped stage that its device has
    dropped: int = 0  # candidates
    _peaks: dict[Arrangement, Peaks] = field(default_factory=dict)

    def peaks_of(self, candidate: Candidate) -> Peaks:
        """The rehearsed peaks of its stages."""
        arrangement, searching = candidate.arrangement, self.searching
        if arrangement not in self._peaks:
            conditions = searching.options.conditions
            self._peaks[arrangement] = rehearsed(searching.costs, searching.atoms, arrangement, conditions)
        return self._peaks[arrangement]

    def would_fit(self, candidate: Candidate) -> bool:
        """Whether the rehearsed step fits the memory of every device."""
        return self._share(candidate)[0] <= _ALL

    def fits(self, candidate: Candidate) -> bool:
        """`would_fit`; a candidate that does not is dropped."""
        needed, room = self._share(candidate)
        if needed <= _ALL:
            return True
        self.excess, self.room = min(self.excess, needed), min(self.room, room)
        self.candidates = [one for one in self.candidates if one is not candidate]
        self.dropped += 1
        config = candidate.config
        if config == self.searching.searched_config(candidate):  # under 1F1B, a plan for GPipe holds less
            before = self.searching.bytes_factor(config)
            self.searching.bytes_factors[config] = max(before * needed, room) * _STEP
        return False

    def _share(self, candidate: Candidate) -> tuple[float, float]:
        """The share of a device's memory that the rehearsed step needs, where that is most, and the share of the
        formula's bytes of this stage that the device has."""
        limit = self.searching.options.memory_limit or math.inf
        arrangement, timeline = candidate.arrangement, candidate.timeline
        by_formula = timeline.peak_memory or (0,) * timeline.schedule.n_slots
        needed, room = 0.0, math.inf
        for stage, (one, groups) in enumerate(zip(self.peaks_of(candidate).stages, arrangement.groups, strict=True)):
            slots = timeline.schedule.slots_of(stage)
            peak = one.peak if one is not None else max(by_formula[slot] for slot in slots)
            share = max(peak / max(1.0, min(group.memory, limit)) for group in groups)
            if share > needed:
                needed = share
                room = peak / share / max(1.0, *(by_formula[slot] for slot in slots))
        return needed, room

    def choose(self, choose: Choose) -> Candidate | None:
        """The best candidate that fits; None if there is none."""
        self.best = None
        quick, refused = _is_quick(self.searching), self.searching.bytes_factors
        while self.candidates and self.best is None:
            best = choose(self.searching.costs, self.candidates)
            if self.fits(best):
                self.best = best
            elif quick and best.config in refused and self.dropped <= _MOST_DROPPED:
                self.candidates += self.searching.searched_again(best.config)
        return self.best


def find_fitting(costs: CostGraph, options: SearchOptions, choose: Choose, meshes: MeshChoices | None = None) -> Found:
    """The candidates of a search; `best` fits the memory, and is None where no plan does."""
    found = _searched(costs, options, choose, meshes)
    for width in found.searching.only_on_some_devices:
        found = _faster(found, _searched(costs, options, choose, meshes, width))
    searches = [found]
    if costs.rehearsal is not None and costs.alone and _looks_again(found):
        searches.append(_with_fewer_bytes(costs, options, choose, found.best))
        found = _faster(*searches)
        refused = searches[0]
        for _ in range(_MOST_FURTHER if found.best is not None else 0):
            if not refused.dropped:
                break
            # Steps that do not fit have cut the search short.
            refused = _searched(costs, options, choose, None, known=refused.searching)
            found = _faster(found, refused)
    for _ in range(_MOST_SEARCHES):
        if found.best is not None or not math.isfinite(found.excess):
            break
        # With fewer bytes than what the formula says of a dropped stage, the search would find that stage again.
        factor = max(found.searching.options.bytes_factor * found.excess, found.room) * _STEP
        found = _searched(costs, replace(options, bytes_factor=factor), choose, meshes)
        searches.append(found)
    if math.isfinite(searches[0].excess):  # else the formula says what is lacking
        found.excess = min(one.excess for one in searches)
    return found


def _looks_again(found: Found) -> bool:
    """Whether to search with fewer bytes, too: wherever memory may lack, but for a large cluster, whose search takes
    long, only if nothing fits."""
    return found.best is None or (_is_quick(found.searching) and _may_lack_memory(found.searching))


def _is_quick(searching: Searching) -> bool:
    """Whether a further search takes little time."""
    return searching.costs.cluster is None or searching.all_shapes


def _may_lack_memory(searching: Searching) -> bool:
    """Whether the formula may refuse a stage that the rehearsal would not: unless every device holds the whole model
    and batch by the formula, with room to spare."""
    atoms, training = searching.atoms, searching.costs.training
    nbytes = all_resident((w for _, w in atoms.parameters), searching.options.optimizer, training).total
    nbytes += sum(shared.nbytes for shared in atoms.saved) + sum(value.nbytes for value in atoms.values)
    nbytes += float(atoms.transient.max())
    return nbytes > _FEWER * min(map(searching.memory, searching.costs.groups))


def _with_fewer_bytes(costs: CostGraph, options: SearchOptions, choose: Choose, known: Candidate | None) -> Found:
    """What a search with fewer bytes finds that may be faster than the known plan. It has no meshes: stages on meshes
    are not rehearsed, and so gain nothing."""
    factor = _FEWER if costs.cluster is None else _FEWER_AHEAD
    seconds = math.inf if known is None else known.timeline.step_time
    return _searched(costs, replace(options, bytes_factor=factor), choose, None, faster_than=seconds)


def _faster(found: Found, other: Found) -> Found:
    """The first one, unless the plan of the other takes less time."""
    if other.best is None:
        return found
    if found.best is not None and found.best.timeline.step_time <= other.best.timeline.step_time:
        return found
    return other


def _searched(
    costs: CostGraph,
    options: SearchOptions,
    choose: Choose,
    meshes: MeshChoices | None,
    apart: int | None = None,
    known: Searching | None = None,
    *,
    faster_than: float = math.inf,
) -> Found:
    """`apart`: see `SearchSpace`. `known`: an earlier search, whose rehearsals count here, too. `faster_than`: seconds
    of a known step; for a cluster, plans that cannot be faster may be left out."""
    if costs.cluster is not None:
        searching: Searching = SearchingAhead(costs, options, meshes, apart, faster_than=faster_than)
    else:
        searching = Searching(costs, options)
        if meshes is not None and (meshes.may_gain_time or _may_lack_memory(searching)):
            searching = SearchingAtHand(costs, options, meshes, apart)
    searching.bytes_factors |= known.bytes_factors if known is not None else {}
    found = Found(searching)
    searching.fits = found.would_fit
    found.candidates = searching.run()
    best = found.choose(choose)
    if best is not None:
        better = searching.prove(best)
        if better:
            found.candidates += better
            found.choose(choose)
    return found
