"""Device kinds as data: the vendor's figures, the fraction of them that real operators reach, and every source.

`data/devices.toml` holds the known kinds; a cluster's own file may define more in the same form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from cost_models.hardware.toml_tables import (
    AMOUNT,
    COUNT,
    FINITE_RATE,
    FRACTION,
    TEXT,
    TEXTS,
    Rule,
    fields_of,
    is_number,
    look_up,
    maps_names,
    problems,
    raise_problems,
    read_data,
    read_tables,
)
from cost_models.kernels.efficiency_curves import Efficiency
from cost_models.kernels.kernel import COMPUTE_KINDS, MEMORY_KINDS
from cost_models.kernels.launches import HostCosts, host_costs
from cost_models.kernels.roofline import Rates


def _are_curves(value: Any) -> bool:
    """Whether `value` is a complete `Efficiency` as JSON."""
    try:
        read = Efficiency.from_json(value)
    except (AttributeError, KeyError, TypeError):
        return False
    curves = [curve for by_kind in (read.compute, read.memory) for curve in by_kind.values()]
    complete = {*read.compute} == {*COMPUTE_KINDS} and {*read.memory} == {*MEMORY_KINDS}
    return complete and all(is_number(v) and v >= 0 for curve in curves for v in asdict(curve).values())


_PEAKS: Rule = (
    lambda v: maps_names(v, FINITE_RATE[0]) and "float32" in v,
    "a table of finite numbers > 0 by dtype, float32 among them",
)
_CURVES: Rule = (
    lambda v: v == {} or _are_curves(v),
    "a table of curves by kind of kernel, as of a calibrated cluster",
)
_RULES: dict[str, Rule] = {
    "peak_flops": _PEAKS,
    "memory": FINITE_RATE,
    "bandwidth": FINITE_RATE,
    "flops_efficiency": FRACTION,
    "bandwidth_efficiency": FRACTION,
    "launch": AMOUNT,
    "attention_efficiency": FRACTION,
    "units": COUNT,
    "host": FINITE_RATE,
    "intra_node": TEXT,
    "inter_node": TEXT,
    "curves": _CURVES,
    "sources": TEXTS,
}


@dataclass(frozen=True)
class DeviceSpec:
    """A device kind: the figures of its data sheet, and the fraction of them that large operators reach.

    Raises:
        DeviceError: invalid fields; the message names all of them.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)  # FLOP/s by dtype; "tf32" is float32 on tensor cores
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory, reads and writes together
    flops_efficiency: float  # fraction of a peak that large products reach
    bandwidth_efficiency: float  # fraction of the bandwidth that large copies reach
    launch: float  # s of overhead per kernel
    attention_efficiency: float = 0.73  # fraction of a peak that attention in one kernel reaches in its forward
    units: int = 0  # multiprocessors; 0: unknown
    host: float = 1.0  # how many times as long its host takes to launch kernels as `launches.HOST_COSTS` say
    intra_node: str = "SharedMemory"  # name of the usual network within a node
    inter_node: str = "Ethernet25"  # name of the usual network between nodes
    curves: Mapping[str, Any] = field(default_factory=dict, hash=False)  # measured `Efficiency` as JSON, if there is
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # source and date of each field

    def __post_init__(self) -> None:
        raise_problems(self.name, problems(_RULES, type(self), fields_of(self)))

    @property
    def device_type(self) -> str:
        """The type of its torch.device: "cpu" or "cuda"."""
        return "cpu" if self.name == "cpu" or describes("cpu", self.name) else "cuda"

    def by_dtype(self, tf32: bool = False) -> dict[torch.dtype, float]:
        """Peak FLOP/s of every floating dtype; `tf32` as in torch.backends.cuda.matmul.allow_tf32.

        A half precision without a figure is computed in float32, and float64 without one at half the rate of float32.
        """
        single = self.peak_flops["float32"]
        peaks = {name: rate for name, rate in self.peak_flops.items() if name != "tf32"}
        peaks = {"float64": single / 2, "float16": single, "bfloat16": single} | peaks
        if tf32:
            peaks["float32"] = self.peak_flops.get("tf32", single)
        return {getattr(torch, name): rate for name, rate in peaks.items() if hasattr(torch, name)}


def rates_of(spec: DeviceSpec, host: HostCosts | None = None) -> Rates:
    """The rates of a device kind; float32 products and convolutions use tensor cores if torch currently allows it.

    Measured curves already contain the effect of the multiprocessors, so `units` is then 0. `host`: the host's launches
    are priced beside the kernels, which then take their own time and the gap to the kernel before.
    """
    # The older torch.get_float32_matmul_precision() raises an error once a program has set the attribute below.
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    launch = spec.launch if host is None else host.gap
    units = 0 if spec.curves else spec.units
    # torch lets cuDNN's convolutions use tensor cores unless a program says otherwise.
    rounded = attrgetter("conv.fp32_precision")(torch.backends.cudnn) == "tf32" and spec.device_type == "cuda"
    single = spec.peak_flops["float32"]
    convolutions = spec.peak_flops.get("tf32", single) if rounded else single
    return Rates(spec.by_dtype(tf32), spec.bandwidth, launch, units, convolutions, single)


def host_of(spec: DeviceSpec, mode: str) -> HostCosts | None:
    """What the host takes to launch kernels on a device kind in a mode of `launches.MODES`.

    None for a CPU, which runs its kernels where it launches them: `launch` covers that.

    Raises:
        ValueError: an unknown mode; the message lists the known ones.
    """
    costs = host_costs(mode)
    return None if spec.device_type == "cpu" else costs.scaled(spec.host)


def efficiency_of(spec: DeviceSpec) -> Efficiency:
    """The efficiency curves of a device kind: the measured ones if there are, else the default curves with the
    kind's own efficiencies as their best."""
    if spec.curves:
        return Efficiency.from_json(spec.curves)
    return Efficiency.default(spec.flops_efficiency, spec.bandwidth_efficiency, spec.attention_efficiency)


def device_spec(name: str, own: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """The device kind called `name`, from `own` or the known ones.

    Raises:
        DeviceError: no such kind; the message lists the known ones.
    """
    found: DeviceSpec = look_up("device", name, {**known_devices(), **(own or {})})
    return found


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """The device kinds of data/devices.toml by name."""
    return read_data("devices.toml", _RULES, DeviceSpec)


def read_devices(tables: Any, where: str) -> tuple[dict[str, DeviceSpec], list[str]]:
    """The device kinds that valid toml tables define, by name, and the problems of the other tables. `where`: as for
    `read_tables`."""
    return read_tables(tables, _RULES, DeviceSpec, where)


def data_sheet_of(kind: str) -> DeviceSpec | None:
    """The known device kind whose data sheet holds the peaks of a present GPU of `kind` (`Device.kind`, the driver's
    name); None for a GPU without one, and for every CPU: the known "cpu" is an example, no product.

    Stricter than `describes`: other forms of a chip, such as "NVIDIA H100 PCIe", "NVIDIA H200 NVL", a laptop's GPU or a
    part of a GPU (MIG), have other peaks. Every word of `kind` that does not name the chip must be one that leaves the
    peaks as they are.
    """
    for name, spec in known_devices().items():
        if spec.device_type == "cpu" or not describes(name, kind):
            continue
        chip = name.partition("-")[0]
        rest = re.sub(re.sub(r"(?<=[A-Z])(?=\d)", " ?", chip), " ", kind, count=1)
        same = _SAME_PEAKS + _ALSO.get(chip, ())
        if all(re.fullmatch("|".join(same), word, re.IGNORECASE) for word in re.split(r"[\s-]+", rest) if word):
            return spec
    return None


# Words of drivers that leave the peaks of a chip as they are: makers, sockets, and memories.
_SAME_PEAKS = ("NVIDIA", "Tesla", "GeForce", r"SXM\d*", r"HBM\d\w*", r"\d+GB")
# The PCIe card of an A100 has the peaks of the SXM module (NVIDIA A100 data sheet, 2021-06). Those of V100 and H100
# have lower ones: 112 of 125 and 756 of 989 TFLOP/s of float16 (data sheets of NVIDIA, 2020-01 and 2023).
_ALSO = {"A100": ("PCIE",)}


def describes(name: str, kind: str) -> bool:
    """Whether the known device kind `name` may describe a present device of `kind` (`Device.kind`, the driver's name).

    The parts of `name` must be words of `kind`: "A100-40" matches "NVIDIA A100-SXM4-40GB". "cpu" matches any CPU. A
    name that is not among the known ones (it comes from a cluster's own file) matches everything.
    """
    if name not in known_devices() or name == kind:
        return True
    if name == "cpu":
        return re.search(r", \d+ threads?$", kind) is not None
    words = [re.sub(r"(?<=[A-Z])(?=\d)", r"\\s*", part) for part in name.split("-")]
    return all(re.search(rf"(?<![A-Za-z0-9]){word}(?:GB)?(?![A-Za-z0-9])", kind) for word in words)
