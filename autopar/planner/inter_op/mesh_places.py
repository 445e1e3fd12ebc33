"""Which devices of a pool make meshes together, where hosts may have different numbers of them.

    nodes of 4, 4 and 2 devices     0 1 2 3 | 4 5 6 7 | 8 9

    width 2     [0 1] [2 3] [4 5] [6 7] [8 9]     within a node
    width 4     [0 1 2 3] [4 5 6 7]               within a node; 8 and 9 are left for narrower meshes
    width 8     [0 .. 7]                          whole nodes, of the largest ones
    width 10    [0 .. 9]                          all

So all meshes of one width lie alike in their nodes, and one price holds for them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

Place = tuple[int, ...]  # of a mesh: the numbers of its devices in the pool


def mesh_places(nodes: Sequence[int], width: int) -> list[Place]:
    """Disjoint meshes of `width` devices that lie alike, node by node, as many as there can be.

    `nodes`: the number of each device's node.
    """
    members = _members(nodes)
    most = max(map(len, members), default=0)
    if width <= most:
        return [tuple(of[i : i + width]) for of in members for i in range(0, len(of) - width + 1, width)]
    whole = [of for of in members if len(of) == most]
    together, rest = divmod(width, most) if most else (0, 1)
    if rest == 0 and together <= len(whole):
        starts = range(0, len(whole) - together + 1, together)
        return [tuple(device for of in whole[i : i + together] for device in of) for i in starts]
    return [tuple(device for of in members for device in of)] if width == len(nodes) > 0 else []


def devices_by_node(nodes: Sequence[int], width: int) -> tuple[int, ...]:
    """Devices that meshes of `width` have in each of their nodes, ascending; () if there are no such meshes."""
    places = mesh_places(nodes, width)
    return tuple(sorted(Counter(nodes[device] for device in places[0]).values())) if places else ()


def counts_exactly(nodes: Sequence[int], width: int, n_devices: int) -> bool:
    """Whether there are meshes of `width`, and as many as `n_devices` of the pool suffice for, so that a search may
    count devices without knowing their nodes.

    Widths that all count exactly, where each divides the next, can be placed together if they need no more devices
    than that: the widest first, and each of them takes as many places of a narrower one as it has devices.
    """
    return len(mesh_places(nodes, width)) >= max(1, n_devices // width)


def place_together(nodes: Sequence[int], widths: Sequence[int]) -> list[Place] | None:
    """Disjoint meshes of these widths, in their order; None if they are not found. In one node each takes the next
    devices. In several the widest are placed first, and each within a node in the one with the fewest free devices."""
    free = {number: list(of) for number, of in enumerate(_members(nodes))}
    most = max((len(of) for of in free.values()), default=0)
    found: dict[int, Place] = {}
    for index in sorted(range(len(widths)), key=lambda i: -widths[i] if len(free) > 1 else i):
        width = widths[index]
        if width <= most:
            fitting = [of for of in free.values() if len(of) >= width]
            place = tuple(min(fitting, key=len)[:width]) if fitting else None
        else:
            # Whole nodes: those of a mesh lie alike, wherever they are.
            whole, together = [of for of in free.values() if len(of) == most], width // most
            if width == together * most and together <= len(whole):
                place = tuple(device for of in whole[:together] for device in of)
            else:
                place = tuple(range(len(nodes))) if width == len(nodes) == sum(map(len, free.values())) else None
        if place is None:
            return None
        found[index] = place
        free = {number: [device for device in of if device not in place] for number, of in free.items()}
    return [found[index] for index in range(len(widths))]


def _members(nodes: Sequence[int]) -> list[list[int]]:
    """The devices of each node, those of the first node first."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for device, node in enumerate(nodes):
        found[node].append(device)
    return list(found.values())
