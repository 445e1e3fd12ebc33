"""Saving: every rank writes its parts, and rank 0 declares the directory complete once all of it is on disk.

```
   the caller      collect (asynchronous: copy)     ┐
                                                    ├─ the same on all ranks, over a process group of its own
   or a thread     write parts, checksums, manifest ┘
```
One save is under way at a time: the next one, a load, and the end of the process wait for it (saving.py).
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from autopar.errors import AutoparError, CheckpointError, InputError
from autopar.runtime.checkpoints import contents, optimizer_states
from autopar.runtime.checkpoints.directories import File, complete, folder_of, partial_of, start
from autopar.runtime.checkpoints.optimizer_class import class_of, optimizer_fact, unwrapped
from autopar.runtime.checkpoints.packing import holds_parts, packed, unpacked
from autopar.runtime.checkpoints.participants import Participants, participants
from autopar.runtime.checkpoints.random_states import random_states
from autopar.runtime.checkpoints.reading import alone_warning_off
from autopar.runtime.checkpoints.saving import Saving, write_in_thread
from autopar.runtime.ranks.agreement import compare
from autopar.runtime.ranks.faults.watcher import watched
from autopar.runtime.ranks.module import RankedModule

_METADATA = ".metadata"


@watched("save")
def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> Saving:
    """Save a checkpoint of this step to `directory`/step-00000100. Every rank calls it; each writes what it holds.

    It holds parameters, buffers and optimizer states in the original names, whatever the plan, the states of the random
    number generators, and `extra`. `autopar.load` loads it into any other plan, or into the plain model. It counts as
    complete once all of it is on disk with checksums; until then its directory is called `...partial`.

    Args:
        directory: of all checkpoints of a run, on a file system that all ranks share.
        model: what `parallelize` returned, or any module.
        optimizer: made from its parameters.
        step: number of steps that are done, at least 0. A complete checkpoint of the same step is replaced.
        extra: values by name: what has `state_dict()` (schedulers, scalers, data loaders) is saved by it, all else is
            pickled. Where ranks have different ones, each rank's is saved.
        asynchronous: copy everything, return, and write in a thread, while training goes on. Only one save is under way
            at a time: the next save, `load`, `wait()` of what is returned, and the end of the process wait for it.
            Before `torch.distributed.destroy_process_group()`, call `wait()`.

    Raises: InputError for arguments that do not fit, or differ between ranks; CheckpointError if it cannot be written
    (asynchronous: by `wait()`, or by the next save or load), or on ranks, if the first call has yet to read the states
    of the optimizer that was loaded.
    """
    check_arguments(directory, model, optimizer, extra)
    if not is_step(step):
        raise InputError(f"step must be the number of steps that are done, a whole number of at least 0, got {step!r}")
    saving = Saving(folder_of(Path(directory).absolute(), step), step)
    writing = _collected(saving, model, optimizer, dict(extra or {}), asynchronous=asynchronous)
    if asynchronous:
        write_in_thread(saving, writing.write)
    else:
        writing.write()
    return saving


def check_arguments(directory: object, model: object, optimizer: object, extra: object) -> None:
    """Raise InputError for what `save` and `load` do not take."""
    if not isinstance(directory, (str, os.PathLike)):
        raise InputError(f"directory must be a path, got {type(directory).__name__}")
    if not os.fspath(directory):
        raise InputError("directory must be a path, got '', which names none; the current directory is '.'")
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")

    if extra is not None and not (isinstance(extra, Mapping) and all(isinstance(name, str) for name in extra)):
        raise InputError("extra must be a dict from names to values, such as {'scheduler': scheduler}")


def is_step(step: object) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def _collected(
    saving: Saving,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    *,
    asynchronous: bool,
) -> _Writing:
    """What this rank writes, and an empty directory to write it to. Collective."""
    team, failed = participants("save"), f"{saving.path} cannot be saved"
    advice = "give every rank the same directory and step"
    compare(team, {"the checkpoint that they save": (str(saving.path), advice)} | optimizer_fact(optimizer))
    entries: dict[str, Any] = {}

    if isinstance(model, RankedModule) and model.lacks_values:
        raise InputError(
            "the model was built without values, which it gets at its first call; call it before saving, or give "
            "parallelize example_args="
        )

    def collect() -> tuple[bytes, optimizer_states.SmallStates | None, list[list[str]]]:
        of_model = contents.model_tensors(model)
        for key, value in of_model.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise InputError(
                    f"'{key.removeprefix(contents.MODEL)}' of the model is on the meta device and has no values to "
                    "save: save the model once it has them, for example after the first call of what "
                    "parallelize(model, init_fn=) returned"
                )
        entries.update(of_model)
        if isinstance(model, RankedModule):
            _check_has_values(saving, model, optimizer)
        small = None
        if optimizer is not None:
            if isinstance(model, RankedModule):
                model.follow(optimizer)
            tensors, small = optimizer_states.collect(model, optimizer)
            small.kind = class_of(optimizer)
            entries.update(tensors)
        if asynchronous:
            copies = contents.own_copies(entries)
            entries.update(copies)
        states = {name: _state_of(value) for name, value in extra.items()}
        if team.group is not None:
            _check_whole(saving, model, extra, states)
        return packed(states), small, contents.tied_names(model)

    found = team.each(failed, collect)
    own, (_, first, _) = found[team.rank], found[0]
    differs = any(one[0] != found[0][0] for one in found)
    mine = contents.RankTraining(random_states(), unpacked(own[0]) if differs else None)
    entries[contents.training_of_rank(team.rank)] = packed(mine)
    of_ranks = [one[1] for one in found if one[1] is not None]
    small = team.done(failed, lambda: None if first is None else first.joined(of_ranks))
    if team.rank == 0:
        ties = contents.joined_ties(one[2] for one in found)
        all_ranks = contents.Training(saving.step, team.size, small, unpacked(own[0]), differs, ties)
        entries[contents.TRAINING] = packed(all_ranks)
    team.first(failed, lambda: start(saving.path))
    return _Writing(saving.path, team, entries)


def _check_has_values(saving: Saving, model: RankedModule, optimizer: torch.optim.Optimizer | None) -> None:
    states = optimizer is not None and model.still_waits(unwrapped(optimizer))
    if states or model.still_waits(model):
        raise CheckpointError(
            f"{saving.path} cannot be saved: the {'optimizer' if states else 'model'}'s "
            f"{'states' if states else 'values'} come from a checkpoint that was loaded before the model's first call, "
            "which reads them, and that call has not been made, or has failed; call the model once before save, or "
            "give parallelize example_args=, so that load reads them at once"
        )


def _check_whole(saving: Saving, model: nn.Module, extra: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Raise CheckpointError for extra values with which another plan could not go on: parts of this rank."""
    own = {id(p) for p in model.parameters()} if isinstance(model, RankedModule) else set()
    for name, value in extra.items():
        refused = f"{saving.path} cannot be saved: extra has {name!r}, of type {type(value).__name__}, "
        if isinstance(value, torch.optim.Optimizer) and any(
            id(p) in own for group in value.param_groups for p in group["params"]
        ):
            raise CheckpointError(
                f"{refused}an optimizer of the model's parameters, which are spread over ranks, and a checkpoint takes "
                f"one optimizer: save it to a directory of its own, autopar.save(another_directory, model, {name}, "
                "step=...), and load both directories"
            )
        if holds_parts(states[name]):
            raise CheckpointError(
                f"{refused}with DTensors, of which each rank has a part: no other plan could go on with them; give "
                "whole tensors (tensor.full_tensor())"
            )


def _state_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else copy.copy(value)


@dataclass(frozen=True)
class _Writing:
    """Everything that one rank needs to write its part of a checkpoint."""

    folder: Path
    team: Participants
    entries: dict[str, Any]

    def write(self) -> None:
        """Collective. Raises CheckpointError, the same on all ranks."""
        team, failed = self.team, f"{self.folder} cannot be saved"
        try:
            team.each(failed, self._write_parts)
            files = [file for found in team.each(failed, self._written) for file in found]
            team.first(failed, lambda: self._complete(files))
        except AutoparError:
            if team.rank == 0:
                shutil.rmtree(partial_of(self.folder), ignore_errors=True)
            raise

    def _write_parts(self) -> None:
        """This rank's file; rank 0's metadata follow when all ranks have written theirs."""
        alone_warning_off()
        dcp.save(
            self.entries,
            storage_writer=FileSystemWriter(partial_of(self.folder)),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=self.team.group,
            no_dist=self.team.group is None,
        )

    def _written(self) -> list[File]:
        """What this rank wrote, with checksums of what is on disk."""
        own = sorted(partial_of(self.folder).glob(f"__{self.team.rank}_*"))
        return [File.of(path) for path in own + [partial_of(self.folder) / _METADATA] * (self.team.rank == 0)]

    def _complete(self, files: list[File]) -> None:
        lacking = [file.name for file in files if not (partial_of(self.folder) / file.name).exists()]
        if lacking:
            raise CheckpointError(
                f"{self.folder} cannot be saved: rank 0 does not see {lacking[0]}, which another rank wrote; give a "
                "directory on a file system that all ranks share"
            )
        complete(self.folder, files, self.team.size)
