"""Networks within a node and between nodes: the constants that collectives and transfers are priced with.

`data/networks.toml` holds the known networks; a cluster's own file may define more in the same form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cost_models.hardware.links import Link
from cost_models.hardware.toml_tables import (
    AMOUNT,
    CARDS,
    FLAG,
    FRACTION,
    GAIN,
    RATE,
    TEXTS,
    Rule,
    fields_of,
    look_up,
    problems,
    raise_problems,
    read_data,
    read_tables,
)

_RULES: dict[str, Rule] = {
    "latency": AMOUNT,
    "start": AMOUNT,
    "line_rate": RATE,
    "efficiency": FRACTION,
    "ramp": AMOUNT,
    "in_switch": GAIN,
    "shared": FLAG,
    "cards": CARDS,
    "sources": TEXTS,
}


@dataclass(frozen=True)
class Network:
    """What connects the devices of a node, or the nodes; `cost_models.collectives.formulas` uses these constants.

    Each device has a card (adapter, port) of its own, or the devices of a node share its cards, neighbours the same:

        shared = false              devices  0 1 2 3 4 5 6 7      shared = true, cards = 4    devices  0 1 2 3 4 5 6 7
                                    cards    0 1 2 3 4 5 6 7                                  cards    0 0 1 1 2 2 3 3

    Raises:
        DeviceError: invalid fields; the message names all of them.
    """

    name: str
    latency: float  # s per step of a collective
    line_rate: float  # bytes/s that a card sends while it receives as much
    efficiency: float = 1.0  # fraction of the line rate that large messages reach
    ramp: float = 0.0  # how slowly they reach it; 0: latency and bandwidth simply add
    in_switch: float = 1.0  # bandwidth of an all-reduce by the switch over that of a ring of very many devices; <= 2
    shared: bool = False  # the devices of a node share its cards; else each has a card of its own
    cards: int = 1  # of a node, where they are shared
    start: float = 0.0  # s of a collective before its first step, such as the wait of one stream for another
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # source and date of each field

    def __post_init__(self) -> None:
        wrong = problems(_RULES, type(self), fields_of(self))
        if not wrong and self.cards != 1 and not self.shared:
            wrong.append(f"cards must be 1 where shared is false: each device has its own card; got {self.cards}")
        raise_problems(self.name, wrong)

    @property
    def bandwidth(self) -> float:
        """Bytes/s that large messages reach."""
        return self.line_rate * self.efficiency

    @property
    def link(self) -> Link:
        """The link between two devices that have a card of the network to themselves."""
        return Link(self.latency, self.bandwidth)

    def card(self, device: int, devices: int) -> int:
        """The card of a device; `device`: its number in a node of `devices` devices."""
        return device * self.cards // devices if self.shared and self.cards < devices else device

    def reach(self, n: int, devices: int) -> float:
        """Cards that `n` neighbouring devices use together, in a node of `devices` devices.

        Where a node has more cards than devices, each device uses its part of them.
        """
        if not self.shared:
            return n
        if self.cards >= devices:
            return n * self.cards / devices
        return self.card(n - 1, devices) + 1

    def crowd(self, n: int, devices: int) -> float:
        """Devices that share the fullest card if `n` neighbours send at once; below 1 where each has several cards."""
        if not self.shared:
            return 1.0
        return devices / self.cards if self.cards >= devices else min(n, math.ceil(devices / self.cards))


def network(name: str, own: Mapping[str, Network] | None = None) -> Network:
    """The network called `name`, from `own` or the known ones.

    Raises:
        DeviceError: no such network; the message lists the known ones.
    """
    found: Network = look_up("network", name, {**known_networks(), **(own or {})})
    return found


@cache
def known_networks() -> dict[str, Network]:
    """The networks of data/networks.toml by name."""
    return read_data("networks.toml", _RULES, Network)


def read_networks(tables: Any, where: str) -> tuple[dict[str, Network], list[str]]:
    """The networks that valid toml tables define, by name, and the problems of the other tables. `where`: as for
    `read_tables`."""
    return read_tables(tables, _RULES, Network, where)
