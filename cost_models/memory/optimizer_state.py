"""What an optimizer keeps for every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import optim


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of torch.optim, with the settings on which its state depends."""

    maker: type[optim.Optimizer]
    tensors: int  # of a parameter's own shape and dtype that it keeps for the parameter, as torch.optim allocates them
    settings: Mapping[str, Any] = field(default_factory=dict)


OPTIMIZER_KINDS: dict[str, OptimizerKind] = {
    "sgd": OptimizerKind(optim.SGD, 0),
    "momentum": OptimizerKind(optim.SGD, 1, {"momentum": 0.9}),
    "adam": OptimizerKind(optim.Adam, 2),  # the first and second moment
    "adamw": OptimizerKind(optim.AdamW, 2),
    "adam-amsgrad": OptimizerKind(optim.Adam, 3, {"amsgrad": True}),  # and the largest second moment so far
    "adamw-amsgrad": OptimizerKind(optim.AdamW, 3, {"amsgrad": True}),
    "nadam": OptimizerKind(optim.NAdam, 2),
    "radam": OptimizerKind(optim.RAdam, 2),
    "adamax": OptimizerKind(optim.Adamax, 2),
    "adadelta": OptimizerKind(optim.Adadelta, 2),
    "adagrad": OptimizerKind(optim.Adagrad, 1),
    "asgd": OptimizerKind(optim.ASGD, 1),
    "rprop": OptimizerKind(optim.Rprop, 2),
    "rmsprop": OptimizerKind(optim.RMSprop, 1),
    "rmsprop-momentum": OptimizerKind(optim.RMSprop, 2, {"momentum": 0.9}),
    "rmsprop-centered": OptimizerKind(optim.RMSprop, 2, {"centered": True}),
    "rmsprop-centered-momentum": OptimizerKind(optim.RMSprop, 3, {"centered": True, "momentum": 0.9}),
    "adafactor": OptimizerKind(optim.Adafactor, 0),  # sums of rows and columns: see `optimizer_state_elements`
}

OPTIMIZERS = ("none", *OPTIMIZER_KINDS)
"""What `optimizer_state_elements` knows."""

_SETTINGS = {name for kind in OPTIMIZER_KINDS.values() for name in kind.settings}


def optimizer_name(optimizer: str | torch.optim.Optimizer) -> str:
    """The name in `OPTIMIZERS` of an optimizer, or of one with the same kind and settings of its state.

    Groups of parameters may have different settings; then the one with the most state counts.

    Raises:
        ValueError: no name of `OPTIMIZERS`, and no optimizer of these kinds.
    """
    wrapped = optimizer
    while type(wrapped).__module__.partition(".")[0] != "torch" and isinstance(
        getattr(wrapped, "optimizer", None), optim.Optimizer
    ):
        wrapped = wrapped.optimizer  # type: ignore[union-attr] # such as accelerate's
    if not isinstance(wrapped, optim.Optimizer):
        if isinstance(wrapped, str) and wrapped in OPTIMIZERS:
            return wrapped
        is_class = isinstance(wrapped, type) and issubclass(wrapped, optim.Optimizer)
        hint = f", give {getattr(wrapped, '__name__', '')}(model.parameters())" if is_class else ""
        raise ValueError(f"unknown optimizer {wrapped!r}{hint} (known are {', '.join(OPTIMIZERS)})")
    used = {name for name in _SETTINGS if any(group.get(name) for group in wrapped.param_groups)}
    for ancestor in type(wrapped).__mro__:
        alike = {name: kind for name, kind in OPTIMIZER_KINDS.items() if kind.maker is ancestor}
        for name, kind in alike.items():
            if {*kind.settings} == used & {setting for other in alike.values() for setting in other.settings}:
                return name
    raise ValueError(
        f"the state of {type(wrapped).__module__}.{type(wrapped).__name__} is not known, "
        f"name an optimizer that keeps as much: {', '.join(OPTIMIZERS)}"
    )


def optimizer_state_bytes(optimizer: str, parameter_bytes: int, shape: Sequence[int]) -> int:
    """Bytes of optimizer state for one trained parameter of `shape`, in the parameter's own dtype.

    Counts the state tensors alone, not the step counter (4 bytes a parameter tensor) nor gradients.

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    elements = math.prod(shape)
    return optimizer_state_elements(optimizer, shape) * parameter_bytes // elements if elements else 0


def optimizer_state_elements(optimizer: str, shape: Sequence[int]) -> int:
    """Numbers that an optimizer keeps for one trained parameter of `shape`, the step counter left out.

    "adafactor" keeps only the sums of rows and columns of the second moment of a matrix, and of a vector all of it
    (Shazeer and Stern, Adafactor, 2018, algorithms 4 and 5).

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    elements = math.prod(shape)
    if optimizer == "none":
        return 0
    if optimizer == "adafactor":
        return elements // shape[-1] + elements // shape[-2] if len(shape) > 1 and elements else elements
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZER_KINDS[optimizer].tensors * elements
