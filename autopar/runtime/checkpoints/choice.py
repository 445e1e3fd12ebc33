"""Which checkpoint of a directory is loaded: the newest one whose files are all as they were written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import CheckpointError, InputError, warn
from autopar.runtime.checkpoints import directories
from autopar.runtime.checkpoints.participants import Participants
from autopar.runtime.ranks.one_message import on_all_ranks


def choose(team: Participants, directory: str | os.PathLike[str], step: int | None, *, required: bool) -> Path | None:
    """The newest undamaged checkpoint in `directory`, or that of `step`; `directory` may be that of a single one.

    Collective: ranks share the reading. A warning names those that are skipped, why, and what is used. Raises
    CheckpointError, unless not `required`, where there is none.
    """
    root = Path(directory).absolute()
    if directories.is_checkpoint(root):
        root, step = root.parent, directories.step_of(root)
    _check_same_directory(team, root)
    found = team.first(f"the checkpoints in {root} cannot be listed", lambda: _listed(root, step))
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


def _check_same_directory(team: Participants, root: Path) -> None:
    roots = team.gathered(str(root))
    others = [rank for rank, theirs in enumerate(roots) if theirs != roots[0]]
    if others:
        raise on_all_ranks(
            InputError(
                f"ranks load from different directories: {roots[0]} on rank 0, {roots[others[0]]} on rank {others[0]}; "
                "give every rank the same"
            )
        )


def _listed(root: Path, step: int | None) -> list[Path]:
    if not root.is_dir():
        return []
    return [folder for folder in directories.candidates(root) if step in (None, directories.step_of(folder))]


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
