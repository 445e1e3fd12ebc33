"""Optimizers over the parameters of a rank: torch's own, whose states DTensors cut as the parameters.

Optimizers that work on every entry by itself (AdamW, SGD, ...), or through operators that DTensors compute over all
ranks (norms and products of matrices: Muon, LAMB), give what one process gives. Those below do not, and are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import InputError

# torch's steps of these write into tensors whose placement the operator would have to change.
WHOLE_ONLY = (torch.optim.Adafactor, torch.optim.Rprop)
# These make states by torch.zeros(shape): plain tensors, which torch does not mix with gradients that are DTensors.
_WITH_PLAIN_STATES = ("transformers.optimization.Adafactor",)
# Of the fused kernels, torch gives DTensors those of these alone.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_AT_ONCE = ("foreach", "fused")  # options by which torch steps the parameters of a group together


def check_works(optimizer: torch.optim.Optimizer, names: Mapping[int, str], n_groups: int) -> None:
    """Raise InputError for an optimizer that cannot step this rank's parameters.

    `names`: by id of the parameter. `n_groups`: of ranks, that hold different stages.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    kind = type(optimizer).__name__
    if parameters and isinstance(optimizer, torch.optim.LBFGS) and n_groups > 1:
        raise InputError(
            "torch.optim.LBFGS measures one step along all parameters, and these ranks hold different stages: use "
            "another optimizer, or a plan of one stage (Plan.by_hand(data=...))"
        )
    plain = next((name for name in map(_full_name, type(optimizer).__mro__) if name in _WITH_PLAIN_STATES), None)
    if parameters and plain is not None:
        raise InputError(
            f"{plain} cannot step the parameters of ranks, which are DTensors: it makes plain tensors as states. Use "
            'AdamW or SGD (optim="adamw_torch" or "sgd" of TrainingArguments), or torch.optim.Adafactor with a plan '
            "that leaves parameters and states whole"
        )
    if parameters and not isinstance(optimizer, _FUSED) and any(group.get("fused") for group in optimizer.param_groups):
        raise InputError(
            f"torch.optim.{kind} with fused=True cannot step the parameters of ranks, which are DTensors: leave fused "
            "out, or use Adam or AdamW, which can"
        )
    for group in optimizer.param_groups:
        option = next((name for name in _AT_ONCE if group.get(name)), None)
        stepped = [p for p in group["params"] if p.grad is not None]
        other = next((p for p in stepped if not isinstance(p, DTensor)), None)
        if option is not None and other is not None and len(stepped) > 1 and any(id(p) in names for p in stepped):
            raise InputError(
                f"torch.optim.{kind} with {option}=True steps all parameters of a group at once, and torch does not "
                f"mix those of ranks, which are DTensors, with others, such as one of shape {tuple(other.shape)}: give "
                f"the others a parameter group of their own, or leave {option} out"
            )
    if isinstance(optimizer, WHOLE_ONLY):
        cut = next((p for p in parameters if is_cut(p)), None)
        if cut is not None:
            raise InputError(
                f"torch.optim.{kind} cannot step parts of a parameter, and this rank stores '{names[id(cut)]}' as "
                f"{tuple(cut.placements)} on a mesh of shape {tuple(cut.device_mesh.shape)}: use AdamW or SGD, "
                "or a plan that leaves parameters and states whole (Plan.by_hand with zero=0 and tensor=1, or "
                "max_shards=1)"
            )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether a rank has a part of it only."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(isinstance(one, Shard) and n > 1 for one, n in zip(parameter.placements, sizes, strict=True))


def all_optimizers() -> list[torch.optim.Optimizer]:
    """All that there are: torch keeps no list of them, and one may zero or unscale gradients before its first step."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
