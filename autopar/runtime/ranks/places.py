"""Where ranks run: which of them share a host's network, and which a machine's cores and memory.

A host is a network namespace of a machine, so containers on one machine are several hosts. Ranks of one host reach each
other without a network; ranks of one machine compute on the same cores.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from cost_models.hardware.devices import parse_devices, usable_cores


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    machine: str  # identifies it until it starts anew
    network: str  # identifies the network namespace on the machine
    cores: frozenset[int]  # numbers of the cores that the process may use
    processor: str
    gpu: str = ""  # identifies the rank's GPU among all of the machine; "": it has none
    gpu_text: str = ""  # its name for messages
    name: str = ""  # of the machine, for messages

    @property
    def host(self) -> tuple[str, str]:
        return self.machine, self.network


class Share(NamedTuple):
    """What a rank has of its machine."""

    kind: str
    memory: int  # bytes
    threads: int


def here(device: torch.device) -> Place:
    """The place of this process, whose tensors are on `device`."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(usable_cores())
    machine = _text("/proc/sys/kernel/random/boot_id") or socket.gethostname()
    processor, gpu, text = _processor(parse_devices(["cpu"])[0].kind), "", ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, text = str(properties.uuid), f"{device} ({properties.name})"
    return Place(machine, _namespace(), frozenset(cores), processor, gpu, text, socket.gethostname())


def shares(everyone: Sequence[tuple[Place, int]]) -> list[Share]:
    """By rank, from its place and its machine's free memory. Ranks of a machine share its memory equally, and the
    cores that they may use together; a rank has at most its own cores."""
    on_machine: defaultdict[str, list[int]] = defaultdict(list)
    for rank, (place, _) in enumerate(everyone):
        on_machine[place.machine].append(rank)
    found = []
    for place, memory in everyone:
        ranks = on_machine[place.machine]
        threads = max(1, min(len(place.cores), len(cores_of([everyone[r][0] for r in ranks])) // len(ranks)))
        kind = f"{place.processor}, {threads} thread{'s' if threads > 1 else ''}"
        found.append(Share(kind, memory // len(ranks), threads))
    return found


def cores_of(places: Sequence[Place]) -> frozenset[int]:
    """The cores that processes of one machine may use together."""
    return frozenset().union(*(place.cores for place in places))


def numbered(keys: Sequence[object]) -> tuple[int, ...]:
    """For each key its number in order of appearance."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _processor(kind: str) -> str:
    """The name of the processor in the name of a kind of devices, which ends with the number of threads."""
    return kind.rpartition(", ")[0]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
