"""The devices that a table is about: those of its form, unless its comments name others."""

from __future__ import annotations

import re
from functools import cache

from cost_models import Cluster

NODE = 8  # devices

_FAMILIES = ("A100", "B200", "H100", "H200", "L4", "T4", "V100")  # as data sheets of `cost_models` call them
_NAMED = re.compile(rf"(?:(?<![A-Za-z0-9])|(?<=\dx))({'|'.join(_FAMILIES)})(?![A-Za-z0-9])")


@cache
def device_named(comments: str, usual: str) -> str:
    """The data sheet of the devices that `comments` name; `usual` where they name none, several or the usual ones.

    `usual`: of the form, such as "A100-80".
    """
    named = set(_NAMED.findall(comments))
    if len(named) != 1 or usual.partition("-")[0] in named:
        return usual
    (family,) = named
    if family == "A100":
        return "A100-40" if re.search(r"(?<!\d)40 ?GB", comments) else "A100-80"
    return str(family)


@cache
def cluster_of(device: str, gpus: int, inter_node: str | None = None) -> Cluster:
    """A cluster of nodes with 8 devices each."""
    return Cluster.preset(f"{min(gpus, NODE)}x{device}", max(1, gpus // NODE), inter_node=inter_node)
