"""Workers that share one GPU: their work adds up on it, and so do their bytes.

    ["cuda:0", "cuda:0", "cuda:1"]      workers cuda:0 and cuda:0#1 are one GPU, cuda:1 is another

Workers that share the cores of a machine are priced by `CostGraph.crowding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.costs.cost_graph import CostGraph
from cost_models import Device
from cost_models.hardware.devices import gpu_of

SHARED_GPU = "one GPU in turns:"


def hardware_of(names: Iterable[str]) -> tuple[int, ...]:
    """For each of the workers a number that is the same for all workers of one GPU; () if all have their own."""
    numbers: dict[str, int] = {}
    found = tuple(numbers.setdefault(gpu_of(name), len(numbers)) for name in names)
    return found if len(numbers) < len(found) else ()


def one_worker_per_gpu(costs: CostGraph) -> CostGraph:
    """`costs` with the first worker of every GPU alone, which has the memory of all of its workers.

    More workers on a GPU never make a plan faster, nor does it then need less memory.
    """
    firsts: dict[str, Device] = {}
    for device in costs.devices:
        first = firsts.get(gpu_of(device.name))
        firsts[gpu_of(device.name)] = device if first is None else replace(first, memory=first.memory + device.memory)
    return costs if len(firsts) == len(costs.devices) else replace(costs, devices=tuple(firsts.values()))


def shared_gpu_notes(names: Sequence[str], *, used: Sequence[str]) -> tuple[str, ...]:
    """What a plan says of GPUs that are several of the workers `names`. `used`: the workers that the plan uses."""
    workers: dict[str, list[str]] = {}
    for name in names:
        workers.setdefault(gpu_of(name), []).append(name)
    notes = []
    for gpu, mine in workers.items():
        busy = [name for name in mine if name in used]
        how = f"; the work of {' and '.join(busy)} adds up on it" if len(busy) > 1 else ""
        if len(mine) > 1:
            shared = f"{SHARED_GPU} {', '.join(mine)} share {gpu} and its memory"
            notes.append(f"{shared}, so that a second one gains nothing{how}")
    return tuple(notes)
