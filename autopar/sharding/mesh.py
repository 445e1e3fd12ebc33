"""Devices in a grid, and the seconds of collectives along its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.errors import InputError
from cost_models import Cluster, Collective


@dataclass(frozen=True)
class Mesh:
    """The devices of a stage in a grid whose last axis runs fastest, as of torch.distributed's DeviceMesh:

        axis "data", 2 long     0  1  2  3      axis "model", 4 long
                                4  5  6  7

    Raises:
        InputError: an axis has no device, the axes do not have one different name each, or the number of devices is
            not the product of the axes.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]  # of the axes
    devices: tuple[str, ...]  # names, the last axis running fastest

    def __post_init__(self) -> None:
        if any(n < 1 for n in self.shape):
            raise InputError(f"the axes of a mesh have at least one device, got {self.shape}")
        if len(self.names) != len(self.shape) or len(set(self.names)) < len(self.names):
            raise InputError(f"a mesh of shape {self.shape} needs {len(self.shape)} different names, got {self.names}")
        if len(self.devices) != self.size or len(set(self.devices)) < self.size:
            raise InputError(
                f"a mesh of shape {self.shape} needs {self.size} different devices, got {len(set(self.devices))} "
                f"different of {len(self.devices)}"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def grid(self) -> np.ndarray:
        """Names in an array of the mesh's shape."""
        return np.array(self.devices, dtype=object).reshape(self.shape)

    @cached_property
    def _lines(self) -> dict[tuple[int, int], tuple[Cluster, tuple[str, ...], int]]:
        """By axis and cluster: the cluster, the first line along the axis, the number of lines that share networks."""
        return {}

    def line(self, axis: int) -> tuple[str, ...]:
        """The first line of devices along an axis. One collective runs on every such line."""
        first = np.moveaxis(self.grid, axis, 0).reshape(self.shape[axis], -1)[:, 0]
        return tuple(first)

    def place(self, device: int) -> tuple[int, ...]:
        """The coordinates of a device on the mesh; `device`: its number."""
        return tuple(int(i) for i in np.unravel_index(device, self.shape))

    def seconds(self, collective: Collective, nbytes: float, axis: int, cluster: Cluster) -> float:
        """Seconds of a collective that runs on all lines along `axis` at once; `nbytes` as for `collective_seconds`."""
        key = (axis, id(cluster))
        if key not in self._lines:
            line = self.line(axis)
            # Lines in the same nodes share the networks of these nodes.
            nodes = {cluster.node_of(name) for name in line}
            here = sum(cluster.node_of(name) in nodes for name in self.devices)
            self._lines[key] = (cluster, line, max(1, here // len(line)))
        _, line, concurrent = self._lines[key]
        return 0.0 if len(line) == 1 else cluster.seconds(collective, nbytes, line, concurrent)


def divisors(n: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def mesh_shapes(n: int, axes: int) -> list[tuple[int, ...]]:
    """All shapes of `axes` axes with n devices."""
    if axes == 1:
        return [(n,)]
    return [(d, *rest) for d in divisors(n) for rest in mesh_shapes(n // d, axes - 1)]


def make_mesh(shape: Sequence[int], devices: Sequence[str], names: Sequence[str] | None = None) -> Mesh:
    """A mesh over `devices`; axes are called "axis0", "axis1" .. where they have no names."""
    return Mesh(tuple(shape), tuple(names or (f"axis{i}" for i in range(len(shape)))), tuple(devices))
