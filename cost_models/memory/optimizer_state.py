"""What an optimizer keeps for every parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

OPTIMIZER_STATE: dict[str, int] = {
    "none": 0,
    "sgd": 0,
    "momentum": 1,  # the velocity
    "adam": 2,  # the first and second moment
    "adamw": 2,
}
"""Tensors of a parameter's own shape and dtype that an optimizer keeps for it, as torch.optim allocates them."""


OPTIMIZERS = (*OPTIMIZER_STATE, "adafactor")
"""What `optimizer_state_elements` knows."""


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

    Beside the optimizers of `OPTIMIZER_STATE` there is "adafactor": of the second moment of a matrix it keeps the sums
    of rows and columns alone, and of a vector all of it (Shazeer and Stern, Adafactor, 2018, algorithms 4 and 5).

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    elements = math.prod(shape)
    if optimizer == "adafactor":
        return elements // shape[-1] + elements // shape[-2] if len(shape) > 1 and elements else elements
    if optimizer not in OPTIMIZER_STATE:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZER_STATE[optimizer] * elements
