"""Numbers of devices, of micro-batches and of copies of a pipeline that a search looks at, and its schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from autopar.planner.inter_op.config import Used
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import INTERLEAVED, V_SHAPED

FEW_DEVICES = 8  # up to this many devices, every vector of device counts is searched
# With more devices, all meshes of a plan have one width; with more meshes, the whole pipeline is copied.
MANY_DEVICES = MANY_MESHES = 128
_EVERY_COUNT = 32  # up to this many samples, every number of micro-batches is searched


def halved_counts(full: Used, shifts: Iterable[int]) -> list[Used]:
    """All vectors of device counts for few devices, otherwise all devices, and their numbers halved `shifts` times."""
    if sum(full) <= FEW_DEVICES:
        return _largest_first(itertools.product(*(range(c + 1) for c in full)))
    found = {full, *(tuple(max(1, c >> shift) for c in full) for shift in shifts)}
    for kind, count in enumerate(full):
        found |= {tuple(c if k == kind else 0 for k in range(len(full))) for c in (count, 1)}
    return _largest_first(found)


def parts_of_cluster(full: Used, nodes: int) -> list[Used]:
    """Vectors of device counts of some of the nodes, if these are few, and of halves, quarters and so on."""
    found = {tuple(c * some // nodes for c in full) for some in range(1, nodes if nodes <= FEW_DEVICES else 1)}
    found |= {tuple(c >> shift for c in full) for shift in range(1, max(full).bit_length())}
    return _largest_first(found)


def counts_in_cluster(full: Used, nodes: int, shifts: Iterable[int]) -> list[Used]:
    """`halved_counts`, and in clusters of few nodes those of every number of nodes."""
    found = halved_counts(full, shifts)
    return found if sum(full) <= FEW_DEVICES else _largest_first({*found, *parts_of_cluster(full, nodes)})


def _largest_first(counts: Iterable[Used]) -> list[Used]:
    return sorted((u for u in counts if any(u)), key=lambda u: (-sum(u), u))


def microbatch_counts_ahead(batch: int, most: int, devices: Iterable[int]) -> list[int]:
    """Divisors of the batch, and multiples of numbers of devices, up to `most`; every number if they are few."""
    if most <= _EVERY_COUNT:
        return list(range(1, most + 1))
    found = {m for m in range(1, most + 1) if batch % m == 0}
    steps = [1, 2, 3, *(1 << shift for shift in range(2, most.bit_length()))]
    for number in devices:
        found |= {number * step for step in steps if number * step <= most}
    return sorted(found)


def copies_of_pipeline(m: int, counts: Used, width: int) -> list[int]:
    """Numbers of copies of the whole pipeline to search with: powers of two.

    Few meshes: 1, so that every stage may have any number of replicas. Many: enough copies that each has a few meshes,
    and all copies have the same numbers of micro-batches and devices.
    """
    meshes = sum(counts) // width
    if meshes <= MANY_MESHES:
        return [1]
    together = math.gcd(m, *counts)
    possible = [1 << n for n in range(together.bit_length()) if together % (1 << n) == 0]
    return [copies for copies in possible if FEW_DEVICES <= meshes // copies <= MANY_MESHES] or possible[-1:]


def searched_schedules(options: SearchOptions, training: bool, *, apart: bool) -> list[str]:
    """Schedules to search; gpipe's partitions are those of 1f1b where they fit. `apart`: it has an objective of its
    own, as its sends run behind passes, which a large search leaves out."""
    if options.schedule is not None:
        return [options.schedule]
    if not training:
        return ["gpipe", "interleaved-1f1b", *V_SHAPED]
    if not options.loss_inside:
        # All forwards come before the caller's loss: no schedule holds fewer micro-batches than gpipe.
        return ["gpipe", "zb-h1", *INTERLEAVED]
    return ["1f1b", "zb-h1", *(["gpipe"] if apart else []), *INTERLEAVED]
