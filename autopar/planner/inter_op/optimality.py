"""How far a plan is proven best, and what the proof holds fixed."""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.planner.inter_op.ahead import SearchingAhead
from autopar.planner.inter_op.bounds import relaxed_bound
from autopar.planner.inter_op.candidates import Candidate, Searching
from autopar.planner.inter_op.config import Config


class ProvenBounds(NamedTuple):
    """How far a plan is proven best."""

    bound: float  # s, of every plan's objective; for a cluster that is planned ahead, of every plan's step
    searched: float  # s, of the objectives of all plans that the search may make
    sentence: str  # with what the proof holds fixed


def proof(searching: Searching, candidate: Candidate) -> ProvenBounds:
    """How far the candidate is proven best."""
    config = candidate.config
    schedule = searching.searched_as(config.schedule)
    objective = candidate.solution.objective
    space = _looked_at(searching)
    bounds = [bound for c, bound in searching.bounds.items() if c.schedule == schedule]
    bound = min([objective, *bounds])
    if config.chunks > 1:
        bound = min(
            bound, *(_of_balanced(searching, c) for c in searching.bounds if c.chunks > 1 and c.schedule == schedule)
        )
        space += ", chunks balanced one by one"
    if isinstance(searching, SearchingAhead):
        least = min(searching.least_steps.values()) + searching.costs.least_on_whole_batch
        step = candidate.timeline.step_time
        return ProvenBounds(
            least,
            bound,
            f"within {_gap(objective, bound)} of the least objective under {config.schedule}, with {space}"
            f"{_meshes(searching)}; within {_gap(step, least)} of a lower bound, the work divided "
            "over all devices",
        )
    if searching.complete and config.chunks == 1 and bound >= objective * (1 - 1e-12):
        sentence = f"proven optimal under {config.schedule} for the search's objective: {space}"
        return ProvenBounds(objective, objective, sentence)
    near = f"within {_gap(objective, bound)} of the least objective under {config.schedule}: {space}"
    if searching.complete:
        return ProvenBounds(bound, bound, near)
    anywhere = min([bound, *(searching.relaxed(c) for c in searching.bounds if c.schedule == schedule)])
    return ProvenBounds(anywhere, bound, f"{near}; within {_gap(objective, anywhere)} of the least for any cuts")


def _looked_at(searching: Searching) -> str:
    counts = searching.counts
    found = f"{len(counts)} numbers of micro-batches from {counts[0]} to {counts[-1]}"
    if len(counts) == 1:
        found = f"{counts[0]} micro-batch" + ("es" if counts[0] > 1 else "")
    found += f", {'all' if searching.complete else 'the most promising'} {searching.n_cuts} cuts"
    if searching.apart is not None:
        found += f", meshes of {searching.apart} apart from the devices that have no place in any"
    widths = ", ".join(map(str, searching.only_on_some_devices))
    return f"{found}, meshes of {widths} only where plans leave devices unused" if widths else found


def _meshes(searching: SearchingAhead) -> str:
    """The meshes that were looked at, and that their strategies were chosen beforehand."""
    configurations = searching.costs.configurations
    if not configurations:
        return ", single devices"
    widths = ", ".join(str(width) for width in sorted({one.width for one in configurations}))
    counts = len({one.n_microbatches for one in configurations})
    return (
        f", meshes of {widths} devices at {counts} of these numbers, and the strategies chosen for each of their shapes"
    )


def _of_balanced(searching: Searching, config: Config) -> float:
    """Seconds of an interleaved plan whose ranks are equally loaded, with free transfers, at least."""
    return relaxed_bound(searching.problem_of(config, rehearsed=False), searching.counts_of(config))


def _gap(objective: float, bound: float) -> str:
    return f"{objective / bound - 1 if bound > 0 else math.inf:.2%}"
