"""Loading a checkpoint: into any plan, or into the plain model.

```
   choose (choice.py) ── is it of this model? ── parameters, buffers ── optimizer ── extra values, random numbers
```
Under torchrun the parameters are placed at the first call, and the optimizer's states are read then: before, every rank
would need room for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import InputError, warn
from autopar.runtime.checkpoints import contents, optimizer_states
from autopar.runtime.checkpoints.choice import choose
from autopar.runtime.checkpoints.contents import Training
from autopar.runtime.checkpoints.participants import Participants, participants
from autopar.runtime.checkpoints.random_states import restore_random_states
from autopar.runtime.checkpoints.reading import metadata_of, read, training_of, training_of_rank
from autopar.runtime.checkpoints.save import check_model_and_optimizer, wait_for_saving
from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.one_message import on_all_ranks


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded: the number of steps that were done, and what `save` was given as `extra` (or its state)."""

    path: Path
    step: int
    extra: dict[str, Any]


@watched("load")
def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
    random_state: bool = True,
    required: bool = True,
) -> Checkpoint | None:
    """Load the newest complete checkpoint of `directory` into a model and its optimizer. Every rank calls it.

    The plan may be another one than when it was saved, with other ranks or in one process, or `model` the plain model.
    A checkpoint with a file that is missing, cut off or changed, or one whose saving did not end, is skipped with a
    warning. Load only what you trust: checkpoints of torch.distributed contain pickles.

    Args:
        directory: as in `save`, or the directory of one step.
        model, optimizer: as in `save`. An optimizer made before the first call under torchrun gets its states then.
        step: the checkpoint of this step instead of the newest.
        extra: what continues from the values that were saved under the same names, by its `load_state_dict()`. All
            values that were saved are in the returned `Checkpoint.extra`. Where other ranks had other values and the
            number of ranks has changed, those of rank 0.
        random_state: continue the random number generators, so that dropout goes on as if nothing had happened.
        required: raise an error where there is no checkpoint; otherwise None is returned.

    Raises: CheckpointError if there is none that can be used; InputError for one of another model, with what differs.
    """
    check_model_and_optimizer(model, optimizer)
    wait_for_saving()
    team = participants("load")
    folder = choose(team, directory, step, required=required)
    if folder is None:
        return None
    failed = f"{folder} cannot be loaded"
    metadata, training = team.done(failed, lambda: _described(folder, extra, optimizer))
    _check_model(team, folder, model, metadata, training)
    if isinstance(model, RankedModule) and model.lacks_values:
        model.when_placed(lambda: team.done(failed, lambda: _load_model(folder, model)))
    else:
        team.done(failed, lambda: _load_model(folder, model))
    if optimizer is not None:
        _load_optimizer(team, folder, model, optimizer, metadata, training)
    values = team.done(failed, lambda: _load_rest(team, folder, training, extra or {}, random_state))
    return Checkpoint(folder, training.step, values)


def _described(
    folder: Path, extra: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None
) -> tuple[Metadata, Training]:
    """What there is. Raises InputError for what was not saved."""
    training = training_of(folder)
    unknown = [name for name in extra or {} if name not in training.extra]
    if unknown:
        known = ", ".join(map(repr, training.extra)) or "none"
        raise InputError(f"{folder} has no extra value {unknown[0]!r}; it has {known}")
    if optimizer is not None and training.optimizer is None:
        raise InputError(f"{folder} was saved without an optimizer; leave optimizer out, or load another step")
    return metadata_of(folder), training


def _check_model(team: Participants, folder: Path, model: nn.Module, metadata: Metadata, training: Training) -> None:
    mine = contents.shapes_of(contents.model_tensors(model)), contents.tied_names(model)
    own: contents.Shapes = {}
    ties, saved = [], contents.saved_shapes(metadata)
    for shapes, names in team.gathered(mine):
        own |= {name: one for name, one in shapes.items() if name not in own or saved.get(name) != one}
        ties.append(names)
    try:
        contents.check_same_model(folder, saved, own, training.tied, contents.joined_ties(ties))
    except InputError as error:
        raise on_all_ranks(error) from None


def _load_model(folder: Path, model: nn.Module) -> None:
    """Parameters and buffers, in place."""
    entries = contents.model_tensors(model)
    read(folder, entries)
    state = {key.removeprefix(contents.MODEL): value for key, value in entries.items()}
    if isinstance(model, RankedModule) and model.placed:
        of_modules = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        if of_modules:  # get_extra_state()
            model.unwrap().load_state_dict(of_modules, strict=False)
    else:
        model.load_state_dict(state)  # for modules whose state_dict() has other tensors than their own


def _load_optimizer(
    team: Participants,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    metadata: Metadata,
    training: Training,
) -> None:
    """Now, or on ranks when the parameters are placed. Collective each time."""
    small = training.optimizer
    assert small is not None

    def options() -> None:
        if isinstance(model, RankedModule):
            model.follow(optimizer)
        optimizer_states.restore_options(model, optimizer, small)

    def states() -> None:
        """With the options that the groups have by then."""
        if isinstance(model, RankedModule):
            model.follow(optimizer)
        tensors = optimizer_states.targets(model, optimizer, metadata)
        read(folder, dict(tensors))
        optimizer_states.restore(model, optimizer, tensors, small)

    def load_states() -> None:
        team.done(f"the optimizer's states in {folder} cannot be loaded", states)

    team.done(f"{folder} cannot be loaded", options)
    if isinstance(model, RankedModule) and not model.placed:
        model.when_placed(load_states)
    else:
        load_states()


def _load_rest(
    team: Participants, folder: Path, training: Training, extra: Mapping[str, Any], random_state: bool
) -> dict[str, Any]:
    """Extra values and random numbers. Returns all extra values."""
    same_ranks = training.n_ranks == team.size
    of_rank = training_of_rank(folder, team.rank if same_ranks else 0)
    values = dict(training.extra if of_rank.extra is None else of_rank.extra)
    if training.extra_differs and not same_ranks and team.rank == 0:
        warn(
            f"the extra values of {folder} differed between its {training.n_ranks} ranks, and {team.size} load it: all "
            "of them get those of rank 0"
        )
    for name, value in extra.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(values[name])
    if random_state:
        restore_random_states(of_rank.random)
    return values
