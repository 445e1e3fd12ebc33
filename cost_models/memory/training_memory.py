"""Bytes that a device needs to train: those it always holds, and those that come and go within a step.

```
    bytes |        /\\  ____        activations grow in the forward and go in the backward, while gradients
          |       /  \\/    \\       appear; then the optimizer's step needs some room of its own
          |______/          \\___
          | parameters, optimizer state, buffers
          +---------------------- time: forward, backward, step
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cost_models.memory.optimizer_state import optimizer_state_elements

FRAGMENTATION = {"cpu": 0.0, "cuda": 0.05}
"""By device type, the fraction of everything else set aside for gaps between blocks. On a CPU a gap in the address
space is no memory. On CUDA this is a choice: PyTorch's allocator cuts blocks from segments of 2 MiB and more."""

WORKSPACE = {"cpu": 0, "cuda": 132 << 20}
"""By device type, bytes that libraries hold for their kernels. On CUDA what torch gives cuBLAS and cuBLASLt: on Hopper
some 32 MiB each, for the thread that runs forwards and for autograd's own. So many bytes were allocated beside all
tensors of a ResNet-50 on an H200 with torch 2.11. Before Hopper it is 8 MiB (discuss.pytorch.org/t/178671, 2023) and
1 to 4 MiB (pytorch/pull/120925, 2024). cuDNN's depend on the convolution (measuring/convolution_workspaces.py)."""


def usable_memory(memory: float, device_type: str) -> int:
    """Bytes for tensors on a device with `memory` bytes: without workspaces and the gaps between blocks.

    Raises:
        ValueError: an unknown device type.
    """
    if device_type not in FRAGMENTATION:
        raise ValueError(f"unknown device type {device_type!r}; known are {', '.join(FRAGMENTATION)}")
    return max(0, int((memory - WORKSPACE[device_type]) / (1 + FRAGMENTATION[device_type])))


@dataclass(frozen=True)
class Precision:
    """Bytes per element of a trained parameter."""

    parameter: int = 4
    gradient: int = 4
    master: int = 0  # a copy in higher precision that the optimizer updates
    state: int = 4  # of a number that the optimizer keeps


FULL = Precision()
"""float32; with torch.autocast as well, whose casts of parameters come and go."""

MIXED = Precision(parameter=2, gradient=2, master=4)
"""16-bit parameters and gradients, float32 copy and states: 2 + 2 + K bytes an element, K = 12 for Adam (Rajbhandari et
al., ZeRO, 2020, section 3.1)."""

MIXED_FULL_GRADIENTS = Precision(parameter=2, gradient=4, master=4)
"""The same with gradients summed in float32, as Megatron-LM and FSDP2 do by default."""

HALF = Precision(parameter=2, gradient=2, state=2)
"""All in 16 bits: what torch.optim makes of a model in bfloat16."""

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": FULL,
        "bf16": HALF,
        "bf16-mixed": MIXED_FULL_GRADIENTS,
        "bf16-mixed-bf16-grads": MIXED,
        "fp16-mixed": MIXED,
    }
)
"""By name, with Adam's bytes an element in all: fp32 16, bf16 8, bf16-mixed 18 (the table of "Distributed Optimizer" in
Megatron-LM's documentation: bf16 parameters, fp32 gradients), bf16-mixed-bf16-grads and fp16-mixed 16 (ZeRO). "-mixed"
keeps float32 master copies; a model under torch.autocast has float32 parameters and is "fp32"."""


def precision_named(name: str) -> Precision:
    """The precision called `name` in `PRECISIONS`.

    Raises:
        ValueError: no such name; the message lists the known ones.
    """
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def bytes_per_element(optimizer: str, precision: Precision) -> int:
    """Bytes of parameter, gradient, master copy and states of one trained element.

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    states = optimizer_state_elements(optimizer, (1,))
    return precision.parameter + precision.gradient + precision.master + states * precision.state


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one device at its peak."""

    parameters: int
    gradients: int
    optimizer: int  # states and master copies
    buffers: int
    activations: int  # kept for the backward, beyond the room that gradients take over from them
    transient: int  # results and gradients that only the next operators read
    reserve: int  # for fragmentation

    @property
    def total(self) -> int:
        states = self.parameters + self.gradients + self.optimizer + self.buffers
        return states + self.activations + self.transient + self.reserve


def training_memory(
    shapes: Iterable[Sequence[int]],
    *,
    optimizer: str = "adam",
    precision: Precision = FULL,
    zero: int = 0,
    replicas: int = 1,
    activations: int = 0,
    buffers: int = 0,
    transient: int = 0,
    device_type: str = "cpu",
) -> TrainingMemory:
    """Bytes on each of `replicas` devices that train parameters of `shapes`, the same in all.

    `zero` is the stage of ZeRO (Rajbhandari et al., 2020, section 5; FSDP is stage 3), for P elements and r replicas:

        stage   parameters   gradients   optimizer
        0           p P         g P         k P        p, g: bytes an element; k: master copy and states
        1           p P         g P         k P / r
        2           p P         g P / r     k P / r
        3           p P / r     g P / r     k P / r    (what is gathered to be used is `transient`)

    `activations`: beyond the room that gradients take over from them. `transient`: the peak of what operators need
    besides what they keep; at least `optimizer_step_temporaries`, if no activations are left at the step.

    Raises:
        ValueError: an unknown optimizer, stage or device type, or no replicas.
    """
    if zero not in range(4) or replicas < 1:
        raise ValueError(f"ZeRO has stages 0 to 3 over one or more replicas, not stage {zero} over {replicas}")
    if device_type not in FRAGMENTATION:
        raise ValueError(f"unknown device type {device_type!r}; known are {', '.join(FRAGMENTATION)}")
    sizes = [tuple(shape) for shape in shapes]
    elements = sum(math.prod(shape) for shape in sizes)
    states = sum(optimizer_state_elements(optimizer, shape) for shape in sizes)
    whole = (
        (3, elements * precision.parameter),
        (2, elements * precision.gradient),
        (1, elements * precision.master + states * precision.state),
    )
    parameters, gradients, state = (-(-nbytes // replicas) if zero >= stage else nbytes for stage, nbytes in whole)
    used = parameters + gradients + state + buffers + activations + transient
    reserve = math.ceil(used * FRAGMENTATION[device_type])
    return TrainingMemory(parameters, gradients, state, buffers, activations, transient, reserve)
