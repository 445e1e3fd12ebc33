"""What an optimizer's step reads, writes, holds and launches, and how long it takes.

The step computes little and moves much, so the bytes decide. `torch.optim` has three implementations:

    fused      one kernel reads parameter, gradient and states and writes all but the gradient; few launches
    foreach    a kernel per line of the formula, each over the tensors of all parameters; temporaries of all at once
    for-loop   such kernels for one parameter after another; temporaries of one

Adam, float32: fused reads and writes 4 + 3 tensors, 28 bytes an element. With 16-bit parameters and float32 master
copies (`Precision.master`) the copies are updated and the parameters are written from them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from cost_models.graphs import storage_key, tensors_in
from cost_models.kernels.kernel import FREE
from cost_models.kernels.launches import HOST_COSTS, HostCosts
from cost_models.memory.allocations import Allocations
from cost_models.memory.optimizer_state import OPTIMIZER_KINDS, optimizer_state_elements
from cost_models.memory.training_memory import FULL, Precision

Implementation = Literal["fused", "foreach", "for-loop"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

FUSED = tuple(name for name, kind in OPTIMIZER_KINDS.items() if "fused" in inspect.signature(kind.maker).parameters)
"""The optimizers that torch has fused kernels for."""

_SIDE = 256  # rows and columns of the parameter that a step is rehearsed with
_WARM_UP = 8  # steps before it: the first creates the states, and RAdam works otherwise in its first five

_OVERWRITING = {"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"}  # kernels that do not read `self`

# torch's multi-tensor kernels (aten/src/ATen/native/cuda/MultiTensorApply.cuh): elements of a chunk, chunks of a launch
# and, by the number of lists of tensors, tensors of a launch. More than five lists are not in the table; five count.
_CHUNK = 65536
_CHUNKS = 320
_TENSORS = (110, 64, 48, 36, 30)


def implementation_of(optimizer: Any) -> Implementation | None:
    """The implementation that an optimizer of torch.optim, or a wrapper of one, is set to use; None for torch's own
    choice, and for anything else. Of several groups of parameters, the first that says so."""
    for group in getattr(optimizer, "param_groups", ()):
        if group.get("fused"):
            return "fused"
        if group.get("foreach") is not None:
            return "foreach" if group["foreach"] else "for-loop"
    return None


@dataclass(frozen=True)
class OptimizerWork:
    """What a step does for a parameter, in tensors of the parameter's size."""

    parameter: float  # reads and writes of the parameter
    gradient: float
    state: float  # of its states together
    temporary: float
    held: float  # temporaries that are alive at once
    left: float  # of them those that are still alive while the next parameter is updated, one by one
    lists: tuple[int, ...]  # for each kernel: tensors of a parameter that it reads or writes


def optimizer_step_seconds(
    optimizer: str,
    shapes: Iterable[Sequence[int]],
    bandwidth: float,
    *,
    precision: Precision = FULL,
    implementation: Implementation = "foreach",
    host: HostCosts = HOST_COSTS["eager"],
) -> float:
    """Seconds of one step over parameters of `shapes`: those of this device, so with ZeRO its share of each.

    `bandwidth`: bytes/s of the device's memory that large copies reach. The default `implementation` is torch's on
    CUDA; on a CPU it is "for-loop". The kernels lie along the stream behind their launches.

    Raises:
        ValueError: an unknown optimizer or implementation, or a bandwidth that is not above 0.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if not bandwidth > 0:
        raise ValueError(f"needs a bandwidth above 0, got {bandwidth}")
    kernels = optimizer_launches(optimizer, sizes, precision=precision, implementation=implementation)
    if not kernels:
        return 0.0
    nbytes = optimizer_step_bytes(optimizer, sum(sizes), precision=precision, implementation=implementation)
    return OptimizerRates(bandwidth, host).seconds(StepShare(nbytes, kernels, len(sizes)))


class StepShare(NamedTuple):
    """What parameters add to an optimizer's step. Shares add up, so the fields may be numbers or arrays of sums."""

    nbytes: Any  # read and written
    kernels: Any  # launches, in parts where several parameters share one
    tensors: Any
    held: Any = 0.0  # bytes of temporaries at once, where they are of all parameters together ("foreach")

    @classmethod
    def of(
        cls, optimizer: str, elements: float, *, precision: Precision = FULL, implementation: Implementation = "foreach"
    ) -> StepShare:
        """Of one parameter with `elements` elements on this device.

        A multi-tensor kernel is shared as if all parameters were like this one, so that the sum over parameters is
        `optimizer_launches` without the last kernel of each line, which is not full.

        Raises:
            ValueError: an unknown optimizer or implementation.
        """
        return _share(optimizer, elements, precision, implementation)


NO_STEP = StepShare(0.0, 0.0, 0.0)


@lru_cache(maxsize=1 << 14)  # equal layers have equal parameters
def _share(optimizer: str, elements: float, precision: Precision, implementation: Implementation) -> StepShare:
    """`StepShare.of`."""
    if optimizer == "none" or not elements:
        return NO_STEP
    nbytes = optimizer_step_bytes(optimizer, elements, precision=precision, implementation=implementation)
    lists = _lists(optimizer, precision, implementation)
    if implementation == "for-loop":
        return StepShare(nbytes, float(len(lists)), 1.0)
    chunks, held = math.ceil(elements / _CHUNK), 0.0
    if implementation == "foreach" and optimizer != "adafactor":  # torch's is not by default: it saves memory
        of_one = optimizer_step_temporaries(
            optimizer, [(math.ceil(elements),)], precision=precision, implementation=implementation
        )
        held = float(of_one)
    return StepShare(nbytes, sum(max(chunks / _CHUNKS, 1 / _most_tensors(count)) for count in lists), 1.0, held)


@dataclass(frozen=True)
class OptimizerRates:
    """How fast a device and its host do an optimizer's step."""

    bandwidth: float  # bytes/s of the device's memory that large copies reach
    host: HostCosts
    least: int = 1  # kernels of the step of a single small parameter

    def seconds(self, share: StepShare) -> Any:
        """Of a step over the parameters that `share` is of: a number, or an array like the fields of `share`.

        The host goes through all tensors first. Then kernels, all of the average length, lie behind their launches:

            host    |- tensors -|-l-|-l-|-l-|          the longer of  l + k kernels  and  k launches + one kernel
            device                  |==k==|==k==|==k==|
        """
        count = np.maximum(share.kernels, self.least)
        kernels = share.nbytes / self.bandwidth + count * self.host.gap
        launch = self.host.operator + self.host.kernel
        first = self.host.start + self.host.tensor * share.tensors
        seconds = first + np.maximum(launch + kernels, count * launch + kernels / count)
        found = np.where(np.asarray(share.tensors) > 0, seconds, 0.0)
        return found if isinstance(share.tensors, np.ndarray) else float(found)


def fewest_kernels(optimizer: str, implementation: Implementation) -> int:
    """Kernels of a step over one small parameter in float32."""
    return max(1, len(step_work(optimizer, implementation).lists))


def optimizer_step_bytes(
    optimizer: str, elements: float, *, precision: Precision = FULL, implementation: Implementation = "foreach"
) -> float:
    """Bytes that a step over `elements` trained elements reads and writes.

    Raises:
        ValueError: an unknown optimizer or implementation.
    """
    work = step_work(optimizer, implementation)
    updated = precision.master or precision.parameter  # bytes of an element that is updated
    gradient, extra = precision.gradient, 0
    if implementation != "fused" and gradient < updated:  # converted beforehand
        extra += gradient + updated
        gradient = updated
    if precision.master:  # parameters are written from the masters, which only a fused kernel has at hand
        extra += precision.parameter + (0 if implementation == "fused" else precision.master)
    if optimizer == "none":
        return 0.0
    moved = work.parameter * updated + work.gradient * gradient + work.state * precision.state
    return elements * (moved + work.temporary * updated + extra)


def optimizer_step_temporaries(
    optimizer: str,
    shapes: Iterable[Sequence[int]],
    *,
    precision: Precision = FULL,
    implementation: Implementation = "foreach",
) -> int:
    """Bytes that a step needs besides what is always there: of all parameters at once if "foreach", of one and what is
    left of the one before if "for-loop", none if "fused". Gradients that have to be converted for the masters count.

    Raises:
        ValueError: an unknown optimizer or implementation.
    """
    sizes = [math.prod(shape) for shape in shapes]
    work = step_work(optimizer, implementation)
    updated = precision.master or precision.parameter
    at_once = work.held * sum(sizes)
    if implementation == "for-loop":  # Python keeps a variable until the next parameter's is there
        at_once = max(
            (work.left * last + work.held * size for last, size in zip([0, *sizes], sizes, strict=False)), default=0
        )
    converted = optimizer != "none" and implementation != "fused" and precision.gradient < updated
    return math.ceil(at_once * updated) + (sum(sizes) * updated if converted else 0)


def optimizer_launches(
    optimizer: str,
    sizes: Sequence[int],
    *,
    precision: Precision = FULL,
    implementation: Implementation = "foreach",
) -> int:
    """Kernels of a step over parameters with these numbers of elements.

    Raises:
        ValueError: an unknown optimizer or implementation.
    """
    lists = _lists(optimizer, precision, implementation)
    if optimizer == "none" or not sizes:
        return 0
    if implementation == "for-loop":
        return len(lists) * len(sizes)
    return sum(_launches(sizes, count) for count in lists)


def _lists(optimizer: str, precision: Precision, implementation: Implementation) -> list[int]:
    """For each kernel of a step: tensors of a parameter that it reads or writes."""
    copies = []  # conversions of gradients, and of masters to parameters
    if implementation != "fused" and precision.master:
        copies = [2] * (1 + (precision.gradient < precision.master))
    return [*step_work(optimizer, implementation).lists, *copies]


def _most_tensors(lists: int) -> int:
    """Of a launch of a multi-tensor kernel with `lists` lists of tensors."""
    return _TENSORS[min(lists, len(_TENSORS)) - 1]


def _launches(sizes: Sequence[int], lists: int) -> int:
    """Launches of one multi-tensor kernel: a new one begins where the chunks or the tensors of one are used up."""
    most = _most_tensors(lists)
    launches = chunks = tensors = 0
    for size in sizes:
        if not size:
            continue
        tensors += 1
        chunks += -(-size // _CHUNK)
        if chunks >= _CHUNKS:
            launches += chunks // _CHUNKS
            chunks %= _CHUNKS
            tensors = 1 if chunks else 0
        if tensors >= most:
            launches, chunks, tensors = launches + 1, 0, 0
    return launches + (chunks > 0)


@cache
def step_work(optimizer: str, implementation: Implementation) -> OptimizerWork:
    """What a step of `optimizer` does. Of a fused kernel by definition; else a step of torch.optim is rehearsed on the
    meta device, and every kernel's arguments and results are counted.

    Raises:
        ValueError: an unknown optimizer or implementation, or one that torch does not have.
    """
    optimizer_state_elements(optimizer, ())  # raises for one that is unknown
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known are {', '.join(IMPLEMENTATIONS)}")
    if optimizer == "none":
        return OptimizerWork(0, 0, 0, 0, 0, 0, ())
    if implementation == "fused":
        if optimizer not in FUSED:
            raise ValueError(f"torch has no fused kernel for {optimizer!r}, only for {', '.join(FUSED)}")
        states = optimizer_state_elements(optimizer, (1,))
        return OptimizerWork(2, 1, 2 * states, 0, 0, 0, (2 + states,))
    return _rehearsed(optimizer, implementation == "foreach")


def _rehearsed(optimizer: str, foreach: bool) -> OptimizerWork:
    one, two = (_StepKernels.of(optimizer, foreach, parameters) for parameters in (1, 2))
    size = _SIDE**2
    moved = {role: count / size for role, count in one.moved.items()}
    held = one.most / (4 * size)
    return OptimizerWork(
        **moved, held=held, left=0.0 if foreach else max(0.0, two.most / (4 * size) - held), lists=tuple(one.lists)
    )


class _StepKernels(Allocations):
    """Counts the elements that kernels on the meta device read and write, by the role of their tensors."""

    def __init__(self, roles: dict[int, str]) -> None:
        super().__init__()
        self.moved = dict.fromkeys(("parameter", "gradient", "state", "temporary"), 0)
        self.lists: list[int] = []
        self.most = 0  # bytes of temporaries at once
        self._roles = roles

    @classmethod
    def of(cls, optimizer: str, foreach: bool, count: int) -> _StepKernels:
        """The kernels of a step over `count` parameters."""
        parameters = [torch.nn.Parameter(torch.empty(_SIDE, _SIDE, device="meta")) for _ in range(count)]
        gradients = [torch.empty_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        kind = OPTIMIZER_KINDS[optimizer]
        steps = kind.maker(parameters, lr=1e-3, foreach=foreach, **kind.settings)  # type: ignore[call-arg]
        with Allocations():
            for _ in range(_WARM_UP):
                steps.step()
        states = [t for state in steps.state.values() for t in tensors_in(list(state.values())) if t.is_meta]
        tensors: dict[str, Sequence[torch.Tensor]] = {"parameter": parameters, "gradient": gradients, "state": states}
        kernels = cls({storage_key(t): role for role, ts in tensors.items() for t in ts})
        kernels.record([*parameters, *gradients, *states])
        before = len(kernels.events)
        with kernels:
            steps.step()
        alive = 0
        for event in kernels.events[before:]:
            alive += kernels.nbytes[event] if event >= 0 else -kernels.nbytes[~event]
            kernels.most = max(kernels.most, alive)
        return kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view or func.overloadpacket.__name__ in FREE | {"_local_scalar_dense"}:
            return result
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        overwritten = {"self"} if func.overloadpacket.__name__ in _OVERWRITING else set()
        reads = _elements([value for name, value in named.items() if name not in overwritten])
        writes = _elements([named.get(name) for name in written] if written else result)
        for key, elements in (*reads.items(), *writes.items()):
            self.moved[self._roles.get(key, "temporary")] += elements
        if reads or writes:
            self.lists.append(len(reads.keys() | writes.keys()))
        return result


def _elements(values: Any) -> dict[int, int]:
    """The elements of the storages of tensors on the meta device, but for counters; what is read twice comes from a
    cache the second time."""
    return {storage_key(t): t.numel() for t in tensors_in(values) if t.is_meta and t.numel() > 1}
