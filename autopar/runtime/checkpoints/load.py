"""Loading a checkpoint: into any plan, or into the plain model.

```
   choose (choice.py) ── of this model? of this optimizer? ── extra values ── optimizer ── model ── random numbers
```
All checks come before the first value is written: one that fails leaves model and optimizer as they were.

Under torchrun the parameters are placed at the first call, and the optimizer's states are read then: before, every rank
would need room for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import InputError, warn
from autopar.runtime.checkpoints import contents, directories, optimizer_states
from autopar.runtime.checkpoints.choice import choose
from autopar.runtime.checkpoints.contents import RankTraining, Training
from autopar.runtime.checkpoints.directories import File
from autopar.runtime.checkpoints.optimizer_class import (
    check_same_class,
    optimizer_fact,
    unwrapped,
    warn_of_unknown_class,
)
from autopar.runtime.checkpoints.participants import Participants, participants
from autopar.runtime.checkpoints.random_states import restore_random_states
from autopar.runtime.checkpoints.reading import metadata_of, read, training_of, training_of_rank
from autopar.runtime.checkpoints.save import check_arguments, is_step
from autopar.runtime.ranks.agreement import Facts
from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.module import RankedModule
from autopar.runtime.ranks.one_message import on_all_ranks


@dataclass(frozen=True)
class _Found:
    """What this rank reads of a checkpoint before it changes anything."""

    folder: Path
    files: tuple[File, ...]
    metadata: Metadata
    training: Training
    of_rank: RankTraining  # of rank 0 where the number of ranks has changed

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self.training.extra if self.of_rank.extra is None else self.of_rank.extra)


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
        directory: as in `save`, or the directory of one step, which may have been copied or linked to any name.
        model: as in `save`.
        optimizer: of the class that was saved. One that was made before the first call under torchrun gets its states
            then.
        step: the checkpoint of this step instead of the newest.
        extra: objects that continue from the states that were saved under the same names, by their `load_state_dict()`.
            All values that were saved are in the returned `Checkpoint.extra`. Where other ranks had other values and
            the number of ranks has changed, those of rank 0.
        random_state: continue the random number generators, so that dropout goes on as if nothing had happened.
        required: raise an error where there is no checkpoint; otherwise None is returned.

    Raises: CheckpointError if there is none that can be used; InputError for one of another model or optimizer, with
    what differs, and for arguments that do not fit, or differ between ranks. Model and optimizer are as they were then.
    """
    check_arguments(directory, model, optimizer, extra)
    if step is not None and not is_step(step):
        raise InputError(
            "step must be the number of steps that were done when the checkpoint was saved, a whole number of at least "
            f"0, or None for the newest, got {step!r}"
        )
    team, continued = participants("load"), extra or {}
    facts = _facts(model, optimizer, continued, random_state)
    folder = choose(team, directory, step, required=required, facts=facts)
    if folder is None:
        return None
    failed = f"{folder} cannot be loaded"
    found = team.done(failed, lambda: _described(team, folder, model, optimizer, continued))
    _check_model(team, folder, model, found)
    options = [] if optimizer is None else _options(team, failed, model, optimizer, found)
    if team.rank == 0:
        _say(team, folder, optimizer, found.training)
    values = team.done(failed, lambda: _load_extra(found, continued))
    with optimizer_states.kept_on_error(optimizer):
        if optimizer is not None:
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                group.update(saved)
            _load_states(model, optimizer, found)
        load_model = partial(_read_now, found, failed, partial(_load_model, folder, model))
        if isinstance(model, RankedModule) and (model.lacks_values or model.still_waits(model)):
            model.when_placed(load_model, of=model)
        else:
            load_model()
    if random_state:
        restore_random_states(found.of_rank.random)
    return Checkpoint(folder, found.training.step, values)


def _facts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], random_state: bool
) -> Facts:
    """What ranks must agree on beside the checkpoint that they choose."""
    place = "the module itself"
    if isinstance(model, RankedModule):
        place = f"what parallelize returned, {'after' if model.placed else 'before'} its first call"
    return {
        "the model": (place, "give every rank what parallelize returned, after the same calls, or the module itself"),
        **optimizer_fact(optimizer),
        "the names in extra": (", ".join(map(repr, sorted(extra))) or "none", "give every rank the same"),
        "random_state": (repr(bool(random_state)), "give every rank the same"),
    }


def _described(
    team: Participants,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
) -> _Found:
    """What there is. Raises InputError for what was not saved, and for what cannot take it."""
    training = training_of(folder)
    unknown = [name for name in extra if name not in training.extra]
    if unknown:
        known = ", ".join(map(repr, training.extra)) or "none"
        raise InputError(f"{folder} has no extra value {unknown[0]!r}; it has {known}")
    for name, value in extra.items():
        if not hasattr(value, "load_state_dict"):
            raise InputError(
                f"extra has {name!r}, of type {type(value).__name__}, which has no load_state_dict() to continue from "
                f"the saved value: leave it out, and read the value from what load returns, as .extra[{name!r}]"
            )
    if optimizer is not None and training.optimizer is None:
        raise InputError(f"{folder} was saved without an optimizer; leave optimizer out, or load another step")
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise InputError(
                f"'{name}' of the model is on the meta device, where it has no memory for values: build the model on "
                "another device, or call model.to_empty(device='cpu') before load (and give values to buffers that "
                "state_dict() lacks)"
            )
    of_rank = training_of_rank(folder, team.rank if training.n_ranks == team.size else 0)
    return _Found(folder, directories.manifest_of(folder), metadata_of(folder), training, of_rank)


def _check_model(team: Participants, folder: Path, model: nn.Module, found: _Found) -> None:
    mine = contents.shapes_of(contents.model_tensors(model)), contents.tied_names(model)
    own: contents.Shapes = {}
    ties, saved = [], contents.saved_shapes(found.metadata)
    for shapes, names in team.gathered(mine):
        own |= {name: one for name, one in shapes.items() if name not in own or saved.get(name) != one}
        ties.append(names)
    try:
        contents.check_same_model(folder, saved, own, found.training.tied, contents.joined_ties(ties))
    except InputError as error:
        raise on_all_ranks(error) from None


def _options(
    team: Participants, failed: str, model: nn.Module, optimizer: torch.optim.Optimizer, found: _Found
) -> list[dict[str, Any]]:
    """What the optimizer's groups get. Raises InputError or CheckpointError for an optimizer that does not fit."""
    small = found.training.optimizer
    assert small is not None

    def groups() -> list[list[str]]:
        check_same_class(found.folder, small, found.metadata, optimizer)
        if isinstance(model, RankedModule):
            model.follow(optimizer)
        return optimizer_states.group_names(model, optimizer)

    of_ranks = team.each(failed, groups)  # a rank may have no parameters of a group
    return team.done(failed, lambda: optimizer_states.saved_options(optimizer_states.joined_names(of_ranks), small))


def _say(team: Participants, folder: Path, optimizer: torch.optim.Optimizer | None, training: Training) -> None:
    """What may not go on as it was."""
    if optimizer is not None and training.optimizer is not None:
        warn_of_unknown_class(folder, training.optimizer, optimizer)
    if training.extra_differs and training.n_ranks != team.size:
        warn(
            f"the extra values of {folder} differed between its {training.n_ranks} ranks, and {team.size} load it: all "
            "of them get those of rank 0"
        )


def _load_extra(found: _Found, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all extra values."""
    values = found.extra
    for name, value in extra.items():
        value.load_state_dict(values[name])
    return values


def _load_states(model: nn.Module, optimizer: torch.optim.Optimizer, found: _Found) -> None:
    """Of the optimizer: now, or on ranks when the parameters are placed. Collective each time."""
    small, failed = found.training.optimizer, f"the optimizer's states in {found.folder} cannot be loaded"
    assert small is not None

    def states() -> None:
        """With the options that the groups have by then."""
        if isinstance(model, RankedModule):
            model.follow(optimizer)
        large = optimizer_states.targets(model, optimizer, found.metadata, small)
        read(found.folder, optimizer_states.by_key(large))
        optimizer_states.restore(model, optimizer, large, small)

    def load_states() -> None:
        with optimizer_states.kept_on_error(optimizer):
            _read_now(found, failed, states)

    if isinstance(model, RankedModule):
        model.when_placed(load_states, of=unwrapped(optimizer))
    else:
        load_states()


def _read_now(found: _Found, failed: str, do: Callable[[], None]) -> None:
    """Read from a checkpoint, which an earlier call may have found. Collective. Raises CheckpointError if it has been
    replaced since."""

    def checked() -> None:
        directories.check_unchanged(found.folder, found.files)
        do()

    participants().done(failed, checked)


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
