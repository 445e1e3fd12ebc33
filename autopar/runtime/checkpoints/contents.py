"""What a checkpoint holds: tensors in the model's own names, and one small value a rank.

| key | what |
|---|---|
| `model.<name>` | an entry of `state_dict()`; a DTensor where a rank has a part |
| `optimizer.state.<name>.<state>` | see optimizer_states.py |
| `training` | a `Training`: step, groups of the optimizer, extra values, tied names |
| `training.rank<i>` | a `RankTraining`: random number generators, and extra values where ranks differ |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar.capture import torch_private_ranks
from autopar.errors import InputError
from autopar.runtime.checkpoints.optimizer_states import SmallStates
from autopar.runtime.checkpoints.packing import packed, unpacked

MODEL = "model."
TRAINING = "training"


@dataclass
class Training:
    """What is the same for all ranks."""

    step: int
    n_ranks: int
    optimizer: SmallStates | None  # None: saved without an optimizer
    extra: dict[str, Any]  # rank 0's
    extra_differs: bool  # whether other ranks have other extra values
    tied: list[list[str]] = field(default_factory=list)  # names of one and the same parameter


@dataclass
class RankTraining:
    """What each rank has of its own."""

    random: dict[str, Any]
    extra: dict[str, Any] | None  # None: as all ranks


def training_of_rank(rank: int) -> str:
    return f"{TRAINING}.rank{rank}"


def model_tensors(model: nn.Module) -> dict[str, Any]:
    """Entries of this rank's `state_dict()`, by their key in a checkpoint."""
    return {MODEL + name: value for name, value in model.state_dict().items()}


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, as far as this rank has it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(aliases) for aliases in names.values() if len(aliases) > 1)


def joined_ties(ranks: Iterable[list[list[str]]]) -> list[list[str]]:
    return [list(names) for names in sorted({tuple(names) for one in ranks for names in one})]


def own_copies(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that later training steps do not change; tied names share one."""
    copies: dict[tuple[Any, ...], Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return unpacked(packed(value))  # as it would be saved
        local = (value.to_local() if isinstance(value, DTensor) else value).detach()
        key = (local.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in copies or not local.numel():
            new = local.to("cpu", copy=True)
            if isinstance(value, DTensor):
                mesh = torch_private_ranks.mesh_of_host(value.device_mesh)
                new = DTensor.from_local(
                    new, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
                )
            copies[key] = new
        return copies[key]

    return {key: copied(value) for key, value in entries.items()}


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype] | None]  # by name; None: no tensor


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """Of whole tensors, by name in the model."""
    return {
        key.removeprefix(MODEL): (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        for key, value in tensors.items()
    }


def saved_shapes(metadata: Metadata) -> Shapes:
    return {
        key.removeprefix(MODEL): (tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(MODEL)
    }


def check_same_model(folder: Any, saved: Shapes, own: Shapes, saved_ties: object, own_ties: object) -> None:
    """Raise InputError that names what differs between a checkpoint and the model that it should go into."""
    differences = []
    missing, surplus = [n for n in own if n not in saved], [n for n in saved if n not in own]
    if missing:
        differences.append(f"it lacks {_some(missing)}")
    if surplus:
        differences.append(f"it has {_some(surplus)}, which the model lacks")
    for place, what in enumerate(("shape", "dtype")):
        found = []
        for name, mine in own.items():
            theirs = saved.get(name)
            if mine is not None and theirs is not None and mine[place] != theirs[place]:
                found.append(f"'{name}' ({theirs[place]}, in the model {mine[place]})")
        if found:
            differences.append(f"the {what} differs of {_few(found)}")
    if not differences and saved_ties != own_ties:
        differences.append(f"other parameters are tied: {saved_ties or 'none'}, in the model {own_ties or 'none'}")
    if differences:
        raise InputError(
            f"{folder} is a checkpoint of another model: {'; '.join(differences)}; build the model that was saved"
        )


def _some(names: list[str]) -> str:
    return _few([f"'{name}'" for name in names])


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
