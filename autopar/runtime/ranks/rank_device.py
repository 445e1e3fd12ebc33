"""The device of a rank, and by what tensors travel from there to other ranks.

```
   CUDA   default process group     a rank's device      tensors travel
   no     any                       the CPU              over gloo
   yes    nccl                      a GPU of its own     from GPU to GPU, over NCCL
   yes    gloo for GPUs, too        a GPU                through the CPU's memory, over gloo: ranks may share the GPU
```
autopar starts the default group with "cpu:gloo,cuda:nccl". A group that the script has started itself decides the same
way: that is how a script asks for ranks that share a GPU, which NCCL refuses.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.ranks.places import Place

_CPU = torch.device("cpu")
BOTH = "cpu:gloo,cuda:nccl"  # backends of a process group, by the device of the tensor


def own_device(environment: Mapping[str, str] = os.environ) -> torch.device:
    """The GPU of this rank, where it sees one; else the CPU.

    The GPU that the script has made current with `torch.cuda.set_device`; else the only one; else the one with the
    number LOCAL_RANK, counted from the first again where there are fewer GPUs than ranks (`check_devices` says so).
    """
    if not torch.cuda.is_available():
        return _CPU
    chosen = torch.cuda.current_device()
    if chosen == 0:  # as in a script that has chosen none
        chosen = int(environment.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", chosen)


def backend_for(device: torch.device) -> str:
    """The backends with which autopar starts the default process group."""
    return BOTH if device.type == "cuda" and dist.is_nccl_available() else "gloo"


def sends_over_nccl(device: torch.device, group: Any = None) -> bool:
    """Whether the default process group (or `group`) has NCCL for a device's tensors."""
    backends = dict(one.split(":") for one in dist.get_backend_config(group).split(","))
    return device.type == "cuda" and backends.get(device.type) == "nccl"


def check_devices(places: Sequence[Place], *, over_nccl: bool) -> None:
    """Raise InputError, which is the same on all ranks, where some have GPUs and others have none, or where ranks
    share one that each needs for itself. `places`: by rank."""
    with_gpu = [rank for rank, place in enumerate(places) if place.gpu]
    without = [rank for rank, place in enumerate(places) if not place.gpu]
    if with_gpu and without:
        raise InputError(
            f"rank {_listed(with_gpu)} has a GPU ({places[with_gpu[0]].gpu_text}), and rank {_listed(without)} on host "
            f"{places[without[0]].name} has none: start ranks where each has one, or set CUDA_VISIBLE_DEVICES= (empty) "
            "on all ranks to train on CPUs"
        )
    if not over_nccl:
        return
    sharing: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in with_gpu:
        sharing[places[rank].machine, places[rank].gpu].append(rank)
    for ranks in sharing.values():
        if len(ranks) > 1:
            place = places[ranks[0]]
            raise InputError(
                f"ranks {_listed(ranks)} share {place.gpu_text} of host {place.name}: start one rank a GPU "
                "(torchrun --nproc-per-node), and let each see its own (LOCAL_RANK, CUDA_VISIBLE_DEVICES). To have "
                "ranks share a GPU, call torch.distributed.init_process_group('gloo') first: tensors then travel "
                "through the CPU's memory"
            )


def gpu_names(places: Sequence[Place]) -> list[str]:
    """By rank, the name of its device in plans: "cuda:0", "cuda:1", and "cuda:1#1" for a second rank on that GPU."""
    seen: dict[tuple[str, str], list[int]] = {}
    names = []
    for rank, place in enumerate(places):
        ranks = seen.setdefault((place.machine, place.gpu), [])
        ranks.append(rank)
        number = list(seen).index((place.machine, place.gpu))
        names.append(f"cuda:{number}" if len(ranks) == 1 else f"cuda:{number}#{len(ranks) - 1}")
    return names


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
