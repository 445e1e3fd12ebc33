"""Networks within a node and between nodes: the constants that collectives and transfers are priced with.

`data/networks.toml` holds the known networks; a cluster's own file may define more in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cost_models.hardware.links import Link
from cost_models.hardware.toml_tables import (
    AMOUNT,
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
    "line_rate": RATE,
    "efficiency": FRACTION,
    "ramp": AMOUNT,
    "in_switch": GAIN,
    "shared": FLAG,
    "sources": TEXTS,
}


@dataclass(frozen=True)
class Network:
    """What connects the devices of a node, or the nodes; `cost_models.collectives.formulas` uses these constants.

    Raises:
        DeviceError: invalid fields; the message names all of them.
    """

    name: str
    latency: float  # s per step of a collective
    line_rate: float  # bytes/s that a device (shared: a node) sends while it receives as much
    efficiency: float = 1.0  # fraction of the line rate that large messages reach
    ramp: float = 0.0  # how slowly they reach it; 0: latency and bandwidth simply add
    in_switch: float = 1.0  # bandwidth of an all-reduce by the switch over that of a ring of very many devices; <= 2
    shared: bool = False  # the devices of a node share the line rate; else each has it to itself
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # source and date of each field

    def __post_init__(self) -> None:
        raise_problems(self.name, problems(_RULES, type(self), fields_of(self)))

    @property
    def bandwidth(self) -> float:
        """Bytes/s that large messages reach."""
        return self.line_rate * self.efficiency

    @property
    def link(self) -> Link:
        """The link between two devices that have the network to themselves."""
        return Link(self.latency, self.bandwidth)


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


def read_networks(tables: Any) -> tuple[dict[str, Network], list[str]]:
    """The networks that valid toml tables define, by name, and the problems of the other tables."""
    return read_tables(tables, _RULES, Network)
