"""How a plan, which knows neither reports nor searches, answers print(), explain(), report() and diff(), and is made by
hand.

Other modules register their function for a type: report/ registers texts, planner/ explanations, `plan/diff.py`
differences. Importing `autopar` imports them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any

from autopar.errors import InputError


@singledispatch
def shown(value: Any) -> str:
    """The text that `print(value)` shows."""
    raise NotImplementedError(f"no report is registered for {type(value).__name__}")


@singledispatch
def explained(value: Any) -> Any:
    """Why the value was chosen."""
    raise NotImplementedError(f"nothing explains {type(value).__name__}")


@singledispatch
def inside_explained(value: Any, path: str) -> Any:
    """Why the part of the value at `path` was chosen."""
    raise NotImplementedError(f"nothing explains parts of {type(value).__name__}")


@singledispatch
def compared(before: Any, after: Any) -> Any:
    """What `after` decides differently from `before`."""
    raise NotImplementedError(f"nothing compares {type(before).__name__}")


@singledispatch
def step_parts(value: Any) -> dict[str, float]:
    """By its name, the seconds of each part of the predicted step; empty where nothing is predicted."""
    raise NotImplementedError(f"nothing predicts {type(value).__name__}")


@singledispatch
def traced(value: Any, path: Path, rank: int | None) -> None:
    """Write the value's step as a Chrome trace."""
    raise NotImplementedError(f"nothing traces {type(value).__name__}")


@singledispatch
def snapshotted(value: Any, path: Path) -> None:
    """Write the memory of the value's step as PyTorch's memory snapshot."""
    raise NotImplementedError(f"nothing takes a snapshot of {type(value).__name__}")


@singledispatch
def drawn(value: Any, path: Path) -> None:
    """Write a figure of the value."""
    raise NotImplementedError(f"nothing draws {type(value).__name__}")


@singledispatch
def reported(value: Any, **wanted: Any) -> Any:
    """The `Report` of the value."""
    raise NotImplementedError(f"no report is registered for {type(value).__name__}")


@singledispatch
def by_hand(model: Any, devices: Any, degrees: Mapping[str, Any], **call: Any) -> Any:
    """The plan with these degrees for a call of the model."""
    raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")


@singledispatch
def priced_like(before: Any, after: Any, *, zero: int | None = None, n_microbatches: int | None = None) -> Any:
    """`after` with predictions for the model, call and devices that `before` was priced for.

    `zero`: the stage of ZeRO that it gets before, with `n_microbatches`, or with what follows for its replicas.
    """
    raise NotImplementedError(f"nothing prices {type(before).__name__}")


@singledispatch
def priced_for(model: Any, devices: Any, plan: Any, **call: Any) -> Any:
    """`plan` with predictions for a call of the model on the devices."""
    raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def printable(text: str) -> str:
    """The text with escapes such as `\\x1b` for characters that a terminal would act on or not show.

    Plan files come from anywhere, and a terminal obeys the control characters in what it prints.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
