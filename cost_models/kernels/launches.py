"""Seconds that the host takes to launch kernels, and a pass as the longer of its kernels and its launches.

The host launches kernels one after another and runs ahead of the device. A kernel starts when its launch is done and
the kernel before it has ended:

    host    |-l1-|-l2-|-l3-|-l4-|
    device       |==k1==|k2|k3|  |k4|     k1 hides the launches of k2 and k3; before k4 the device waits

So a pass is neither its kernels alone, nor its launches, nor the longer of the two sums.

Every constant has its source in `SOURCES`. None is fitted to a published training run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TypeVar

import numpy as np

Seconds = TypeVar("Seconds", float, np.ndarray)


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host in one mode."""

    operator: float  # an operator in the forward, besides its kernels: Python, the dispatcher, recording for autograd
    node: float  # the same operator in the backward: autograd's engine and the dispatcher
    kernel: float  # each kernel: choosing it, its arguments, the driver
    start: float  # each pass
    tensor: float  # each parameter tensor in an optimizer's step: lists, groups, step counters
    gap: float  # s of the device, not the host: from the end of a kernel to the start of one that is already launched
    accumulation: float = 0.0  # each parameter whose gradient a backward adds to the sum, besides the kernel that adds

    def scaled(self, factor: float) -> HostCosts:
        """The costs of a host that takes `factor` times as long; the gap is the device's and stays.

        Raises:
            ValueError: the factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"a host takes a positive factor as long as another one, got {factor}")
        scaled = {field.name: getattr(self, field.name) * factor for field in fields(self) if field.name != "gap"}
        return HostCosts(**scaled, gap=self.gap)


FREE_HOST = HostCosts(operator=0.0, node=0.0, kernel=0.0, start=0.0, tensor=0.0, gap=0.0)
"""Of a host that takes no time."""

HOST_COSTS: Mapping[str, HostCosts] = MappingProxyType(
    {
        "eager": HostCosts(operator=6e-6, node=6e-6, kernel=4e-6, start=0.0, tensor=3e-6, gap=1e-6),
        "compiled": HostCosts(operator=0.0, node=0.0, kernel=8e-6, start=36e-6, tensor=3e-6, gap=1e-6),
        "cuda-graphs": HostCosts(operator=0.0, node=0.0, kernel=0.0, start=8e-6, tensor=0.0, gap=1e-6),
        "eager-functions": HostCosts(
            operator=18e-6, node=17e-6, kernel=4e-6, start=0.0, tensor=3e-6, gap=1e-6, accumulation=6e-6
        ),
    }
)
"""By mode, of a host of about 2020 to 2025; `scaled` gives a faster or slower one. A CUDA graph holds the optimizer's
step as well. "eager-functions" is eager mode where every operator is a torch.autograd.Function in Python, within
modules: layers of Megatron-LM of 2021 to 2023, with their functions for norms, softmax, biases and tensor parallelism,
scripted functions, and random states that checkpoints save and restore, are taken for that. Its gradients are added to
a buffer by hooks in Python."""

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "eager.operator": "6.8 us for `2 * x` of one number with autograd, its CPU kernel included: "
        "github.com/pytorch/pytorch/issues/41383, 2020-07",
        "eager.node": "assumed as eager.operator: the engine takes the place of Python",
        "eager.kernel": "3.0 us for cuLaunchKernel (github.com/meta-pytorch/tritonbench/pull/1017, 2026-04) and 1 us "
        "for an operator called from C++ (github.com/pytorch/pytorch/issues/41383, 2020-07)",
        "eager.start": "none: a pass is its operators",
        "eager-functions.operator": "13.8 to 20.4 us for a torch.autograd.Function with one multiplication, without "
        "and with autograd, alone and as a module of its own: measured on a Xeon with torch 2.13, 2026-11",
        "eager-functions.node": "14.3 to 18.9 us for its backward, measured there",
        "eager-functions.kernel": "as eager.kernel",
        "eager-functions.start": "none: a pass is its operators",
        "eager-functions.accumulation": "2.6 us for a hook that adds param.grad to param.main_grad and frees it "
        "(Megatron-LM, megatron/model/distributed.py, _make_param_hook, 2021 to 2023), besides autograd's own "
        "addition, where `2 * x` with autograd takes 2.9 us: measured on a Xeon with torch 2.13, 2026-11; in "
        "proportion to eager.operator",
        "accumulation": "none of its own: autograd adds in C++, which `kernel` covers",
        "compiled.kernel": "6.8 us without arguments to 9.1 us with 19, cuLaunchKernel included: "
        "github.com/meta-pytorch/tritonbench/pull/1017, 2026-04",
        "compiled.start": "42.4 to 44.3 us for a compiled graph of one kernel, less that kernel: guards and wrapper, "
        "github.com/meta-pytorch/tritonbench/pull/1017, 2026-04",
        "compiled.operator": "none: the generated code calls kernels alone",
        "compiled.node": "none: the generated code calls kernels alone",
        "cuda-graphs.start": "3.5 us of the host for 80 kernels, 8 us for a small perceptron: cuda.juliagpu.org, "
        "usage, graphs, 2026",
        "cuda-graphs.kernel": "none: the device launches them",
        "cuda-graphs.operator": "none: the device launches kernels",
        "cuda-graphs.node": "none: the device launches kernels",
        "cuda-graphs.tensor": "none: the step is in the graph",
        "tensor": "3.2 to 5.2 us a tensor for torch.optim.AdamW(fused=True) on tensors of four numbers, measured on a "
        "Xeon with torch 2.13, 2026-11",
        "gap": "at most 70 us for 80 small kernels of a graph, their work included: cuda.juliagpu.org, usage, graphs, "
        "2026",
    }
)
"""Where each constant comes from, by "mode.field", or by "field" where all modes share it."""

MODES = tuple(HOST_COSTS)

LIBRARY_CALL = HOST_COSTS["eager"].kernel
"""Seconds in which compiled code calls a kernel that it did not generate, such as a product: taken for as many as in
eager mode, without the operator around it. `compiled.kernel` is for generated kernels."""

MODULE_CALL = 0.7e-6
"""Seconds of entering and leaving a torch.nn.Module in eager mode: of nn.Identity, measured on a Xeon with torch 2.13,
2026-11. Models with hooks, checkpoints and logic of their own take more."""


def host_costs(mode: str) -> HostCosts:
    """The host's costs in a mode of `MODES`.

    Raises:
        ValueError: an unknown mode; the message lists the known ones.
    """
    if mode not in HOST_COSTS:
        raise ValueError(f"unknown mode {mode!r}; known are {', '.join(MODES)}")
    return HOST_COSTS[mode]


_NO_KERNEL = 1e-12  # s: differences of sums may leave such residues


@dataclass(frozen=True)
class Clocks:
    """When the host and the device are free, in s from any common start."""

    host: float = 0.0
    device: float = 0.0


def lay(kernels: Sequence[float], launches: Sequence[float], start: Clocks = Clocks()) -> Clocks:
    """When host and device are done with kernels that are launched in order.

    `kernels[i]`: s of the device; `launches[i]`: s of the host before kernel i may start. `start`: when both are free;
    work that is still queued on the device hides as much of the launches. O(kernels).

    Raises:
        ValueError: the numbers of kernels and launches differ, or one is negative.
    """
    if len(kernels) != len(launches):
        raise ValueError(f"each kernel has one launch, got {len(kernels)} kernels and {len(launches)} launches")
    if min((*kernels, *launches), default=0.0) < 0:
        raise ValueError("kernels and launches take 0 seconds or more")
    host, device = start.host, start.device
    for kernel, launch in zip(kernels, launches, strict=True):
        host += launch
        device = max(device, host) + kernel
    return Clocks(host, device)


def pass_seconds(kernels: Sequence[float], launches: Sequence[float], *, queued: float = 0.0) -> float:
    """Seconds from the first launch until all kernels have ended.

    `queued`: s of earlier work that the device still has to do; what it hides of the launches makes the pass shorter,
    and the pass ends no earlier than that work.

    Raises:
        ValueError: as `lay`.
    """
    end = lay(kernels, launches, Clocks(0.0, queued))
    return max(end.host, end.device)


def waits(kernels: np.ndarray, launches: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[operators] s that the device waits for the host before each, where the host does not always run ahead.

    `kernels`, `launches`: [operators] s of each, in order of execution. `starts`: bool [operators], True where an
    operator is launched only when all before it has ended. With its waits, each part takes what `lay` says.
    O(operators).
    """
    found = np.zeros(len(kernels))
    host = device = 0.0
    for place, (kernel, launch, start) in enumerate(
        zip(kernels.tolist(), launches.tolist(), starts.tolist(), strict=True)
    ):
        if start:
            host = device = 0.0
        host += launch
        begin = max(device, host)
        found[place] = begin - device
        device = begin + kernel
    return found


def overlapped_seconds(kernels: Seconds, launches: Seconds, start: float | np.ndarray = 0.0) -> Seconds:
    """Seconds of a pass by the sums of its `kernels` and of its `launches`: the longer. Numbers, or arrays of passes.

    `start`: s of the host before the first launch of a pass that has kernels.

    The sums of the parts of a graph add up, which is what a planner needs that weighs every interval of operators.
    `lay` is never shorter, and never longer than both sums together. For GPT-2, BERT-base and ResNet-50 of 1 to 64
    samples on A100 and H100 `lay` is longer by 0 to 3 %; where both sums are alike, by up to 6 % (BERT), and 17 % in
    the forward of one sample of GPT-2, whose longest kernel comes last.
    """
    least = np.where(np.asarray(kernels) > _NO_KERNEL, start, 0.0)
    longer = np.maximum(kernels, launches + least)
    return longer if isinstance(kernels, np.ndarray) else float(longer)


def launches_of(
    counts: Sequence[int], costs: HostCosts, *, backward: bool = False, python: Sequence[float] | None = None
) -> list[float]:
    """Seconds of the host before each kernel of operators that launch `counts[i]` kernels each, in order.

    An operator without kernels (a view) delays the next kernel; behind the last kernel such operators are left out.
    `python`: s of the model's own Python before each operator, such as `MODULE_CALL` for each module that is entered.

    Raises:
        ValueError: there are not as many operators with Python as operators.
    """
    if python is not None and len(python) != len(counts):
        raise ValueError(f"each operator has its Python, got {len(python)} for {len(counts)} operators")
    each = costs.node if backward else costs.operator
    launches, waiting = [], costs.start
    for place, count in enumerate(counts):
        waiting += each + (0.0 if python is None else python[place])
        for _ in range(count):
            launches.append(waiting + costs.kernel)
            waiting = 0.0
    return launches


def operators_seconds(
    operators: Sequence[Sequence[float]],
    costs: HostCosts,
    *,
    backward: bool = False,
    python: Sequence[float] | None = None,
    queued: float = 0.0,
) -> float:
    """Seconds of a pass over operators with their kernels, in order of execution.

    `operators`: for each operator the s of its kernels without their launches (see `busy_seconds`). `backward` and
    `python` are as for `launches_of`, `queued` as for `pass_seconds`.

    Raises:
        ValueError: as `lay` and `launches_of`.
    """
    kernels = [kernel + costs.gap for operator in operators for kernel in operator]
    launches = launches_of([len(operator) for operator in operators], costs, backward=backward, python=python)
    return pass_seconds(kernels, launches, queued=queued)
