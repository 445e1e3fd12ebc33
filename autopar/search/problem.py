"""The stage partition problem and its solution, as data.

The model is a line of n atoms (operators that may not be separated are one atom). A stage is an interval [start,
stop) of atoms on r devices of one kind; its devices are replicas, micro-batch k runs on replica k mod r:

    atoms    0 1 2 3 | 4 5 6 | 7 8 9
    stage       0        1       2
    devices   a a        b       a        kinds a and b, in any order; stage 0 has two replicas
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Value:
    """A tensor that later atoms read; sent directly from its producer's stage to every other stage that reads it."""

    producer: int  # atom
    consumers: tuple[int, ...]  # atoms, all after the producer
    nbytes: float  # bytes forward, per micro-batch
    grad_nbytes: float  # bytes backward, per micro-batch; 0 where no gradient flows


@dataclass(frozen=True)
class Shared:
    """Bytes that a stage holds once if it has any of the atoms: a parameter with its gradient, a saved storage."""

    nbytes: float  # bytes
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Devices that cost the same."""

    name: str
    count: int  # devices
    memory: float  # usable bytes on each; math.inf for no limit
    latency: float  # seconds a transfer into or out of a device takes before its first byte
    seconds_per_byte: float  # of that transfer
    reduce_seconds_per_byte: (
        float  # gradient reduction of a replicated stage: seconds per gradient byte and extra replica
    )


@dataclass(frozen=True)
class Problem:
    """What to partition, over which devices; checked when made.

    Raises:
        ValueError: a cost is NaN, infinite or negative, an array has the wrong shape, an atom does not exist, a
            consumer is not after its producer, or a count is below one.
    """

    forward: np.ndarray  # [n_kinds, n] seconds per micro-batch
    backward: np.ndarray  # [n_kinds, n] seconds per micro-batch; zeros for inference
    values: tuple[Value, ...]
    resident: tuple[Shared, ...]  # parameters, gradients, optimizer state, buffers
    gradient_bytes: tuple[Shared, ...]  # reduced once a step where the stage is replicated
    saved: tuple[Shared, ...]  # activations kept for backward, per in-flight micro-batch
    transient: np.ndarray  # [n] bytes while the atom runs; the maximum over a stage counts
    cut_allowed: np.ndarray  # bool [n + 1]; cut c separates atoms c - 1 and c; cuts 0 and n are always allowed
    n_microbatches: int
    schedule: str  # a name that autopar.schedule.in_flight_limit knows
    kinds: tuple[Kind, ...]
    max_replicas: int  # of one stage
    max_stages: int | None = None

    def __post_init__(self) -> None:
        n = self.n_atoms
        _check(n >= 1, f"the problem needs at least one atom, got forward of shape {self.forward.shape}")
        _check(len(self.kinds) >= 1, "the problem needs at least one kind of device")
        for name, shape in (
            ("forward", (len(self.kinds), n)),
            ("backward", (len(self.kinds), n)),
            ("transient", (n,)),
            ("cut_allowed", (n + 1,)),
        ):
            found = getattr(self, name).shape
            _check(found == shape, f"{name} must have shape {shape}, got {found}")
        _check(
            self.cut_allowed.dtype == np.bool_, f"cut_allowed must be an array of bool, got {self.cut_allowed.dtype}"
        )
        for name in ("forward", "backward", "transient"):
            _check_costs(name, getattr(self, name))
        for name in ("n_microbatches", "max_replicas", "max_stages"):
            count = getattr(self, name)
            _check(count is None or count >= 1, f"{name} must be at least 1, got {count}")
        self._check_kinds()
        self._check_values()
        for name in ("resident", "gradient_bytes", "saved"):
            self._check_shared(name)

    @property
    def n_atoms(self) -> int:
        return int(self.forward.shape[-1]) if self.forward.ndim else 0

    def _check_kinds(self) -> None:
        for kind in self.kinds:
            _check(kind.count >= 1, f"kind {kind.name!r} must have at least 1 device, got {kind.count}")
            _check(kind.memory >= 0, f"kind {kind.name!r}: memory must be a number of bytes >= 0, got {kind.memory}")
            for field in ("latency", "seconds_per_byte", "reduce_seconds_per_byte"):
                _check_costs(f"kind {kind.name!r}: {field}", getattr(kind, field))

    def _check_values(self) -> None:
        _check_costs("values: nbytes", [value.nbytes for value in self.values])
        _check_costs("values: grad_nbytes", [value.grad_nbytes for value in self.values])
        for index, value in enumerate(self.values):
            inside = all(0 <= atom < self.n_atoms for atom in (value.producer, *value.consumers))
            _check(inside, f"values[{index}] names an atom outside 0..{self.n_atoms - 1}: {value}")
            after = all(consumer > value.producer for consumer in value.consumers)
            _check(after, f"values[{index}] has a consumer that is not after its producer: {value}")

    def _check_shared(self, name: str) -> None:
        items: tuple[Shared, ...] = getattr(self, name)
        _check_costs(f"{name}: nbytes", [item.nbytes for item in items])
        for index, item in enumerate(items):
            inside = all(0 <= atom < self.n_atoms for atom in item.atoms)
            _check(inside, f"{name}[{index}] names an atom outside 0..{self.n_atoms - 1}: {item}")


@dataclass(frozen=True)
class StageChoice:
    """One stage: atoms [start, stop) on `replicas` devices of `kinds[kind]`."""

    start: int
    stop: int
    kind: int
    replicas: int
    time: float  # seconds one micro-batch takes, forward, backward and incoming transfers


@dataclass(frozen=True)
class Solution:
    """The best partition for one choice of device counts."""

    stages: tuple[StageChoice, ...]
    objective: float  # seconds a step takes, as `solve` defines it
    used: tuple[int, ...]  # devices of each kind


@dataclass(frozen=True)
class Infeasibility:
    """The stage that lacks most memory in the plan where that is least: in every plan some stage lacks as much."""

    index: int  # of the stage in its plan
    stage: StageChoice
    needed: float  # bytes on each of its devices
    available: float  # bytes


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_costs(name: str, costs: object) -> None:
    array = np.asarray(costs, dtype=float)
    bad = array[~(np.isfinite(array) & (array >= 0))]
    _check(bad.size == 0, f"{name} must be finite and >= 0, got {bad.flat[0] if bad.size else None}")
