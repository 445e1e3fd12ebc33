"""The search's candidates, checked against the memory by their rehearsed steps.

The partition search adds up bytes by a formula. The plan that it chooses is rehearsed (`rehearsed_memory.py`), and one
whose step exceeds the memory of a device is dropped. Where a search is quick, the best partition of the same kind that
needs less by the formula takes its place:

    search -> candidates -> choose -> rehearse -- fits --> plan
      ^             ^                     |
      |             '- with less memory <-+- dropped
      '--- bytes of the formula times the smallest excess, where all are dropped

Two more searches follow where they take little time. They correct no bytes, and leave out the stages that rehearsals
have shown not to fit, one by one:

1. if anything was dropped: corrected bytes also refuse stages whose bytes the formula overstates
2. if memory may lack (`_looks_again`): with fewer bytes than the formula says of all stages
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
from autopar.planner.inter_op.refused_stages import RefusedStage
from autopar.planner.rehearsed_memory import Peaks, rehearsed
from autopar.planner.search_options import SearchOptions

_FEWER = 0.8  # share of the formula's bytes: it is up to 18 % above what steps of T5 and ResNet-50 hold
_FEWER_AHEAD = 0.7  # the same for clusters: up to 27 % above what layers that run again hold on a GPU
_MOST_SEARCHES = 4
_MOST_DROPPED = 20  # candidates in whose place others are looked for
_DROPPED_TIMES_CUTS = 6000  # the same where only single stages are refused: searches over few cuts take little time
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
    refused: list[RefusedStage] = field(default_factory=list)  # as in `SearchSpace.refused`
    by_stage: bool = False  # whether stages that do not fit are left out, and no bytes of the formula are corrected
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
            shares = enumerate(self._shares(candidate))
            too_large = [stage for stage, share in shares if share > _ALL]
            # Interleaved stages share a device.
            refused = self.searching.refused_stages(candidate, too_large) if config.chunks == 1 else []
            self.refused += refused
            if self.by_stage and refused:
                self.searching.refused += refused
            else:
                before = self.searching.bytes_factor(config)
                self.searching.bytes_factors[config] = max(before * needed, room) * _STEP
        return False

    def _share(self, candidate: Candidate) -> tuple[float, float]:
        """The share of a device's memory that the rehearsed step needs, where that is most, and the share of the
        formula's bytes of this stage that the device has."""
        shares = self._shares(candidate)
        needed = max(shares)
        stage = shares.index(needed)
        room = self._memory(candidate, stage) / max(1.0, _by_formula(candidate, stage))
        return needed, room if needed > 0 else math.inf

    def _shares(self, candidate: Candidate) -> list[float]:
        """Of every stage, the largest share of a device's memory that the rehearsed step needs."""
        peaks = self.peaks_of(candidate).stages
        nbytes = [_by_formula(candidate, stage) if one is None else one.peak for stage, one in enumerate(peaks)]
        return [each / self._memory(candidate, stage) for stage, each in enumerate(nbytes)]

    def _memory(self, candidate: Candidate, stage: int) -> float:
        """Bytes of the smallest device of a stage."""
        limit = self.searching.options.memory_limit or math.inf
        return max(1.0, min(limit, *(group.memory for group in candidate.arrangement.groups[stage])))

    def choose(self, choose: Choose) -> Candidate | None:
        """The best candidate that fits; None if there is none."""
        self.best = None
        quick, most = _is_quick(self.searching), _MOST_DROPPED
        if self.by_stage:
            most = max(most, _DROPPED_TIMES_CUTS // self.searching.n_cuts)
        while self.candidates and self.best is None:
            best = choose(self.searching.costs, self.candidates)
            if self.fits(best):
                self.best = best
            elif quick and best.config == self.searching.searched_config(best) and self.dropped <= most:
                self.candidates += self.searching.searched_again(best.config)
        return self.best


def _by_formula(candidate: Candidate, stage: int) -> float:
    """Bytes on the fullest device of a stage, as the search adds them up."""
    timeline = candidate.timeline
    peaks = timeline.peak_memory or (0,) * timeline.schedule.n_slots
    return max(peaks[slot] for slot in timeline.schedule.slots_of(stage))


def find_fitting(costs: CostGraph, options: SearchOptions, choose: Choose, meshes: MeshChoices | None = None) -> Found:
    """The candidates of a search; `best` fits the memory, and is None where no plan does."""
    found = _searched(costs, options, choose, meshes)
    for width in found.searching.only_on_some_devices:
        found = _faster(found, _searched(costs, options, choose, meshes, width))
    searches, quick = [found], _is_quick(found.searching)
    if quick and found.dropped:
        # Corrected bytes of all stages may refuse what fits, and steps that do not fit have cut the search short.
        searches.append(_without_refused(costs, options, choose, meshes, found.best, searches))
        found = _faster(found, searches[-1])
    if costs.rehearsal is not None and costs.alone and _looks_again(found):
        # Stages on meshes are not rehearsed, and so gain nothing.
        fewer = replace(options, bytes_factor=_FEWER if costs.cluster is None else _FEWER_AHEAD)
        searches.append(_without_refused(costs, fewer, choose, None, found.best, searches))
        found = _faster(found, searches[-1])
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


def _without_refused(
    costs: CostGraph,
    options: SearchOptions,
    choose: Choose,
    meshes: MeshChoices | None,
    known: Candidate | None,
    searches: Sequence[Found],
) -> Found:
    """What a search finds that may be faster than the known plan, without the stages that earlier ones have shown not
    to fit."""
    refused = [one for search in searches for one in search.refused] if _is_quick(searches[0].searching) else None
    seconds = math.inf if known is None else known.timeline.step_time
    return _searched(costs, options, choose, meshes, faster_than=seconds, refused=refused)


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
    *,
    faster_than: float = math.inf,
    refused: Sequence[RefusedStage] | None = None,
) -> Found:
    """`apart`: see `SearchSpace`. `faster_than`: seconds of a known step; for a cluster, plans that cannot be faster
    may be left out. `refused`: the stages that the search leaves out."""
    if costs.cluster is not None:
        searching: Searching = SearchingAhead(costs, options, meshes, apart, faster_than=faster_than)
    else:
        searching = Searching(costs, options)
        if meshes is not None and (meshes.may_gain_time or _may_lack_memory(searching)):
            searching = SearchingAtHand(costs, options, meshes, apart)
    searching.refused += refused or ()
    found = Found(searching, by_stage=refused is not None)
    searching.fits = found.would_fit
    found.candidates = searching.run()
    best = found.choose(choose)
    if best is not None:
        better = searching.prove(best)
        if better:
            found.candidates += better
            found.choose(choose)
    return found
