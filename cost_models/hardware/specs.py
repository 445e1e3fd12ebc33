"""Kinds of devices and networks as data: what vendors state of them and how much of it is reached, with sources.

The known ones lie in `data/devices.toml` and `data/networks.toml`; a cluster's own file defines more in the same form.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from cost_models.errors import DeviceError
from cost_models.hardware.links import Link
from cost_models.kernels.efficiency import Efficiency
from cost_models.kernels.kernel import COMPUTE_KINDS, MEMORY_KINDS

Rule = tuple[Callable[[Any], bool], str]  # (whether a value is right, what would be right)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _named(values: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(values, Mapping) and all(isinstance(key, str) and right(value) for key, value in values.items())


def _curves(value: Any) -> bool:
    try:
        found = Efficiency.from_json(value)
    except (AttributeError, KeyError, TypeError):
        return False
    every = [curve for curves in (found.compute, found.memory) for curve in curves.values()]
    complete = {*found.compute} == {*COMPUTE_KINDS} and {*found.memory} == {*MEMORY_KINDS}
    return complete and all(_number(v) and v >= 0 for curve in every for v in asdict(curve).values())


_RATE: Rule = (lambda v: _number(v) and v > 0, "a number > 0")
_FINITE_RATE: Rule = (lambda v: _number(v) and 0 < v < math.inf, "a finite number > 0")
_FRACTION: Rule = (lambda v: _number(v) and 0 < v <= 1, "a fraction > 0 and <= 1")
_AMOUNT: Rule = (lambda v: _number(v) and 0 <= v < math.inf, "a finite number >= 0")
_GAIN: Rule = (lambda v: _number(v) and 1 <= v < math.inf, "a finite number >= 1")
_COUNT: Rule = (lambda v: type(v) is int and v >= 0, "an integer >= 0")
_FLAG: Rule = (lambda v: isinstance(v, bool), "true or false")
_TEXT: Rule = (lambda v: isinstance(v, str), "a string")
_TEXTS: Rule = (lambda v: _named(v, _TEXT[0]), "a table of strings")
_PEAKS: Rule = (
    lambda v: _named(v, _FINITE_RATE[0]) and "float32" in v,
    "a table of finite numbers > 0 by dtype, float32 among them",
)

_DEVICE_RULES: dict[str, Rule] = {
    "peak_flops": _PEAKS,
    "memory": _FINITE_RATE,
    "bandwidth": _FINITE_RATE,
    "flops_efficiency": _FRACTION,
    "bandwidth_efficiency": _FRACTION,
    "launch": _AMOUNT,
    "attention_efficiency": _FRACTION,
    "units": _COUNT,
    "intra_node": _TEXT,
    "inter_node": _TEXT,
    "curves": (lambda v: v == {} or _curves(v), "a table of curves by kind of kernel, as of a calibrated cluster"),
    "sources": _TEXTS,
}
_NETWORK_RULES: dict[str, Rule] = {
    "latency": _AMOUNT,
    "line_rate": _RATE,
    "efficiency": _FRACTION,
    "ramp": _AMOUNT,
    "in_switch": _GAIN,
    "shared": _FLAG,
    "sources": _TEXTS,
}


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device: a product's data sheet and how much of it large operators reach.

    Raises:
        DeviceError: fields that no device can have, all of them named.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)  # FLOP/s by dtype; "tf32" is float32 on tensor cores
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory, reads and writes together
    flops_efficiency: float  # fraction of a peak that large products reach
    bandwidth_efficiency: float  # fraction of the bandwidth that large copies reach
    launch: float  # s of overhead per kernel
    attention_efficiency: float = 0.73  # fraction of a peak that attention in one kernel reaches in its forward
    units: int = 0  # multiprocessors; 0: not told
    intra_node: str = "SharedMemory"  # name of the network it has within a node, unless told otherwise
    inter_node: str = "Ethernet25"  # and between nodes
    curves: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of efficiency, where they were measured
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # where each field is from, and when

    def __post_init__(self) -> None:
        _raise(self.name, _problems(_DEVICE_RULES, type(self), table(self)))

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda", of torch.device."""
        return "cpu" if self.name == "cpu" or describes("cpu", self.name) else "cuda"

    def by_dtype(self, tf32: bool = False) -> dict[torch.dtype, float]:
        """Peak FLOP/s of every floating dtype; `tf32` as in torch.backends.cuda.matmul.allow_tf32.

        A half precision without a figure is computed in float32, and float64 at half the rate of float32.
        """
        single = self.peak_flops["float32"]
        peaks = {name: rate for name, rate in self.peak_flops.items() if name != "tf32"}
        peaks = {"float64": single / 2, "float16": single, "bfloat16": single} | peaks
        if tf32:
            peaks["float32"] = self.peak_flops.get("tf32", single)
        return {getattr(torch, name): rate for name, rate in peaks.items() if hasattr(torch, name)}


@dataclass(frozen=True)
class Network:
    """What connects the devices of a node, or the nodes: constants of `cost_models.collectives`.

    Raises:
        DeviceError: fields that no network can have, all of them named.
    """

    name: str
    latency: float  # s per step of a collective
    line_rate: float  # bytes/s that a device (shared: a node) sends while it receives as much
    efficiency: float = 1.0  # fraction of the line rate that large messages reach
    ramp: float = 0.0  # how slowly they reach it; 0: latency and bandwidth simply add
    in_switch: float = 1.0  # bandwidth of an all-reduce that the switch computes over that of a ring of devices
    shared: bool = False  # the devices of a node share the line rate, rather than having it each
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # where each field is from, and when

    def __post_init__(self) -> None:
        _raise(self.name, _problems(_NETWORK_RULES, type(self), table(self)))

    @property
    def bandwidth(self) -> float:
        """Bytes/s that large messages reach."""
        return self.line_rate * self.efficiency

    @property
    def link(self) -> Link:
        """The connection of two devices that have the network to themselves."""
        return Link(self.latency, self.bandwidth)


def table(value: DeviceSpec | Network) -> dict[str, Any]:
    """The fields except the name, as they stand in a toml file."""
    return {key: item for key, item in asdict(value).items() if key != "name"}


def device_spec(name: str, own: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """The kind of device called `name`, among `own` and the known ones.

    Raises:
        DeviceError: there is none; the message lists those there are.
    """
    return _look_up("device", name, {**known_devices(), **(own or {})})


def network(name: str, own: Mapping[str, Network] | None = None) -> Network:
    """The network called `name`, among `own` and the known ones.

    Raises:
        DeviceError: there is none; the message lists those there are.
    """
    return _look_up("network", name, {**known_networks(), **(own or {})})


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """The devices of data/devices.toml by name."""
    specs, problems = read_devices(_data("devices.toml"))
    _raise("devices.toml", problems)
    return specs


@cache
def known_networks() -> dict[str, Network]:
    """The networks of data/networks.toml by name."""
    networks, problems = read_networks(_data("networks.toml"))
    _raise("networks.toml", problems)
    return networks


def read_devices(tables: Any) -> tuple[dict[str, DeviceSpec], list[str]]:
    """The devices that toml tables by name define, and everything that is wrong with the others."""
    return _read(tables, _DEVICE_RULES, DeviceSpec)


def read_networks(tables: Any) -> tuple[dict[str, Network], list[str]]:
    """The networks that toml tables by name define, and everything that is wrong with the others."""
    return _read(tables, _NETWORK_RULES, Network)


def _read(tables: Any, rules: dict[str, Rule], kind: type[Any]) -> tuple[dict[str, Any], list[str]]:
    if not _named(tables, lambda v: isinstance(v, Mapping)):
        return {}, [f"must be a table of tables by name, got {tables!r}"]
    read, wrong = {}, []
    for name, fields_of in tables.items():
        problems = [f"{name}: {problem}" for problem in _problems(rules, kind, fields_of)]
        if problems:
            wrong += problems
        else:
            read[name] = kind(name=name, **fields_of)
    return read, wrong


def _problems(rules: dict[str, Rule], kind: type[Any], values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a `kind`: missing ones, unknown ones, wrong values."""
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    missing = [f"{name} is missing; give {rules[name][1]}" for name in rules if name in required - set(values)]
    unknown = [f"{name} is no field; there are {', '.join(rules)}" for name in values if name not in rules]
    wrong = [
        f"{name} must be {right}, got {values[name]!r}"
        for name, (is_right, right) in rules.items()
        if name in values and not is_right(values[name])
    ]
    return missing + unknown + wrong


def _look_up(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """By name; upper and lower case, dashes, underscores and spaces do not matter."""

    def plain(text: str) -> str:
        return re.sub(r"[-_ ]", "", text).lower()

    if name in known:
        return known[name]
    for other, value in known.items():
        if plain(other) == plain(name):
            return value
    raise DeviceError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def _data(file: str) -> dict[str, Any]:
    return tomllib.loads(files("cost_models").joinpath("data", file).read_text())


def _raise(where: str, problems: list[str]) -> None:
    if problems:
        raise DeviceError(f"{where}: " + "; ".join(problems))


def describes(name: str, kind: str) -> bool:
    """Whether a device at hand of `kind` (`Device.kind`: what its driver calls it) may be the kind of device `name`.

    The parts of a known name are looked for as words, "A100-40" in "NVIDIA A100-SXM4-40GB"; "cpu" describes any CPU,
    and a name of a file of one's own anything.
    """
    if name not in known_devices() or name == kind:
        return True
    if name == "cpu":
        return re.search(r", \d+ threads?$", kind) is not None
    words = [re.sub(r"(?<=[A-Z])(?=\d)", r"\\s*", part) for part in name.split("-")]
    return all(re.search(rf"(?<![A-Za-z0-9]){word}(?:GB)?(?![A-Za-z0-9])", kind) for word in words)
