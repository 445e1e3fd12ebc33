"""Devices and the links between them, as a plan for them would take them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFact:
    """A device of a plan."""

    name: str  # "cpu:0", "cuda:0"
    kind: str  # "AMD EPYC, 1 thread"
    memory: int  # bytes free


@dataclass(frozen=True)
class LinkFact:
    """A one-way link between two devices, measured."""

    source: str
    target: str
    latency: float  # s
    bandwidth: float | None  # bytes/s; None: tensors are handed over by reference


def devices_and_links(devices: str | None) -> tuple[list[DeviceFact], list[LinkFact]]:
    """The devices, None for the default ones, and their links, measured in about a second for each kind of pair.

    Raises:
        DeviceError: a device that is not there.
    """
    from cost_models import measure_links, parse_devices  # these import torch, which may not be there

    parsed = parse_devices(devices)
    links = [
        LinkFact(source, target, link.latency, None if math.isinf(link.bandwidth) else link.bandwidth)
        for (source, target), link in measure_links(parsed).items()
    ]
    return [DeviceFact(device.name, device.kind, device.memory) for device in parsed], links
