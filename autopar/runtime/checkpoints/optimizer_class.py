"""Of which class the optimizer of a checkpoint was: another class reads its states wrongly, or not at all.

Not even Adam and AdamW are exchanged: loading gives the groups their saved options, and the two apply `weight_decay` in
different ways, so what goes on exactly is only the class that was saved.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import InputError, warn
from autopar.runtime.checkpoints.optimizer_states import SmallStates, state_keys

_TORCH = "torch.optim."
# What each class keeps of a parameter that it has stepped; with a question mark: under some options. For checkpoints
# without the class, which earlier versions saved.
_STATES = {
    "Adadelta": "step square_avg acc_delta",
    "Adafactor": "step row_var? col_var? variance?",
    "Adagrad": "step sum",
    "Adam": "step exp_avg exp_avg_sq max_exp_avg_sq?",
    "AdamW": "step exp_avg exp_avg_sq max_exp_avg_sq?",
    "Adamax": "step exp_avg exp_inf",
    "ASGD": "step eta mu ax",
    "LBFGS": "func_evals n_iter d? t? old_dirs? old_stps? ro? H_diag? prev_flat_grad? prev_loss? al?",
    "Muon": "momentum_buffer",
    "NAdam": "step mu_product exp_avg exp_avg_sq",
    "RAdam": "step exp_avg exp_avg_sq",
    "RMSprop": "step square_avg momentum_buffer? grad_avg?",
    "Rprop": "step prev step_size",
    "SGD": "momentum_buffer",
    "SparseAdam": "step exp_avg exp_avg_sq",
}


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What a wrapper without states of its own, as Accelerate's, wraps."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner.state is optimizer.state:
        return unwrapped(inner)
    return optimizer


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """`torch.optim.SGD`, or the full name of another class. A wrapper counts as what it wraps."""
    kind = type(unwrapped(optimizer))
    if getattr(torch.optim, kind.__name__, None) is kind:
        return _TORCH + kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def optimizer_fact(optimizer: torch.optim.Optimizer | None) -> dict[str, tuple[str, str]]:
    """What ranks that save or load together must agree on, as `compare` takes it."""
    value = "none" if optimizer is None else class_of(optimizer)
    return {"the optimizer": (value, "give every rank its optimizer, all of the same class, or give none to any rank")}


def check_same_class(folder: Path, small: SmallStates, metadata: Metadata, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError where the checkpoint's optimizer is of another class; where the checkpoint does not say which,
    where it has states that this class does not keep."""
    own, saved = class_of(optimizer), small.kind
    if saved and not _is_same(saved, own):
        raise InputError(
            f"the optimizer in {folder} is of class {saved}, this one is of class {own}: make one of class {saved}, or "
            "leave optimizer out to load the model alone"
        )
    if not saved and (name := _misfit(own, small, metadata)):
        raise InputError(
            f"the optimizer in {folder} is of another class than {own}: its states of '{name}' are "
            f"{_listed(_state_names(small, metadata)[name])}, and {own} keeps {_listed(_kept(own)[1])}; make one of "
            "the class that was saved, or leave optimizer out to load the model alone"
        )


def warn_of_unknown_class(folder: Path, small: SmallStates, optimizer: torch.optim.Optimizer) -> None:
    """Warn if a checkpoint does not name the class of its optimizer."""
    if not small.kind:
        warn(
            f"{folder} is of an earlier version of autopar, which did not save the optimizer's class: it is loaded as "
            f"{class_of(optimizer)}, and training goes on exactly only if that was the class"
        )


def _is_same(saved: str, own: str) -> bool:
    """Classes outside of torch may have moved to another module."""
    if saved.startswith(_TORCH) or own.startswith(_TORCH):
        return saved == own
    return saved.rpartition(".")[2] == own.rpartition(".")[2]


def _misfit(own: str, small: SmallStates, metadata: Metadata) -> str:
    """The first parameter whose saved states are not those of the class `own`; "" if there is none."""
    if own.removeprefix(_TORCH) not in _STATES:
        return ""
    always, every = _kept(own)
    found = _state_names(small, metadata).items()
    return next((name for name, states in found if not always <= states <= every), "")


def _kept(own: str) -> tuple[set[str], set[str]]:
    """Names of the states that a class of torch always keeps, and of all that it may keep."""
    names = _STATES[own.removeprefix(_TORCH)].split()
    return {name for name in names if not name.endswith("?")}, {name.removesuffix("?") for name in names}


def _state_names(small: SmallStates, metadata: Metadata) -> dict[str, set[str]]:
    """Names of the saved states, by parameter."""
    found = {name: set(values) for name, values in small.values.items()}
    for name, states in state_keys(metadata, small).items():
        found.setdefault(name, set()).update(key for key in states if "[" not in key)  # those are items of a list
    return found


def _listed(names: set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
