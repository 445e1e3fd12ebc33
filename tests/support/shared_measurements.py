"""What ranks measure of their machine to plan: once for all jobs of a pool that have as many ranks.

All ranks of a group keep it after the same jobs, so that none measures alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch.distributed as dist

from autopar.runtime.ranks import planning


def measure_once() -> None:
    """From now on, in this process."""
    known: dict[Hashable, Any] = {}

    def once(key: Hashable, measure: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = measure()
        return known[key]

    spec, links, collectives = planning.measure_spec, planning.measure_process_links, planning.measure_collectives

    def spec_once(device: Any) -> Any:
        return once((device.kind, device.threads, device.torch_device), lambda: spec(device))

    def links_once(hosts: Sequence[int], *carried: Any) -> Any:
        return once(("links", *hosts), lambda: links(hosts, *carried))

    def collectives_once(group: Any, *carrier: Any, **what: Any) -> Any:
        members = dist.get_world_size(), tuple(dist.get_process_group_ranks(group))
        return once((members, repr(what)), lambda: collectives(group, *carrier, **what))

    planning.measure_spec = spec_once
    planning.measure_process_links = links_once
    planning.measure_collectives = collectives_once
