"""Which checkpoint of a directory is loaded: the newest one whose files are all as they were written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from autopar.errors import CheckpointError, InputError, warn
from autopar.runtime.checkpoints import directories
from autopar.runtime.checkpoints.participants import Participants
from autopar.runtime.ranks.agreement import Facts, compare
from autopar.runtime.ranks.one_message import on_all_ranks


def choose(
    team: Participants,
    directory: str | os.PathLike[str],
    step: int | None,
    *,
    required: bool,
    facts: Facts = MappingProxyType({}),
) -> Path | None:
    """The newest undamaged checkpoint in `directory`, or that of `step`; `directory` may be that of a single one.

    Collective: ranks share the reading. A warning names those that are skipped, why, and what is used. Raises
    InputError where ranks differ in what they choose, or in `facts` beside it; CheckpointError where `directory` is a
    file, and, unless not `required`, where there is none.
    """
    root = Path(directory).absolute()
    own = {
        "the directory of the checkpoint": str(root),
        "the step of the checkpoint": "the newest" if step is None else repr(step),
        "required": repr(required),
    }
    compare(team, {name: (value, "give every rank the same") for name, value in own.items()} | dict(facts))
    root, step, found = team.first(f"the checkpoints in {root} cannot be listed", lambda: _listed(root, step))
    skipped: list[str] = []
    for folder in found:
        problems = [p for p in team.gathered(_problem(folder, team)) if p]
        if not problems:
            _say(team, skipped, f"loading {folder}, which is complete")
            return folder
        skipped.append(f"{folder} ({problems[0]})")
    if required:
        wanted = f"no checkpoint of step {step} in {root}" if step is not None else f"no checkpoint in {root}"
        if skipped:
            raise on_all_ranks(CheckpointError(f"there is {wanted} that can be loaded: {_unusable(skipped)}"))
        raise on_all_ranks(CheckpointError(f"there is {wanted}; autopar.save(directory, ...) makes them"))
    _say(team, skipped, "there is no earlier one, so nothing is loaded")
    return None


def _listed(root: Path, step: int | None) -> tuple[Path, int | None, list[Path]]:
    """Where checkpoints are looked for, of which step, and what there is; `root` may be one checkpoint itself."""
    named = directories.step_of(root)
    own = directories.step_inside(root) if named is None else named
    if own is not None and step not in (None, own):
        instead = "leave step out" if named is None else f"give {root.parent}"
        raise InputError(f"{root} is the checkpoint of step {own}, not of step={step}: {instead}")
    if named is not None:
        root, step = root.parent, named
    elif own is not None:
        return root, own, [root]
    if not root.is_dir():
        nearest = next(path for path in (root, *root.parents) if path.exists())
        if not nearest.is_dir():
            raise CheckpointError(f"{nearest} is a file, not a directory of checkpoints as autopar.save makes them")
        return root, step, []
    return root, step, [one for one in directories.candidates(root) if step in (None, directories.step_of(one))]


def _problem(folder: Path, team: Participants) -> str:
    """Why a checkpoint cannot be used, as far as this rank looks: each checks its share of the files."""
    try:
        files = directories.manifest_of(folder)
    except ValueError as error:
        return str(error)
    share = sorted(files, key=lambda file: file.n_bytes)[team.rank :: team.size]
    return next((problem for file in share if (problem := file.problem(folder))), "")


def _unusable(skipped: Sequence[str]) -> str:
    return "; ".join(skipped)


def _say(team: Participants, skipped: Sequence[str], then: str) -> None:
    if skipped and team.rank == 0:
        what = "a checkpoint cannot be used" if len(skipped) == 1 else f"{len(skipped)} checkpoints cannot be used"
        warn(f"{what}: {_unusable(skipped)}; {then}")
