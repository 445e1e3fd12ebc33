"""Reading a checkpoint's entries: by every process for itself, so that none waits for another."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import CheckpointError, first_line
from autopar.runtime.checkpoints import contents
from autopar.runtime.checkpoints.packing import unpacked


def metadata_of(folder: Path) -> Metadata:
    """Which entries there are, and where. Raises CheckpointError."""
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # of unpickling: any
        raise CheckpointError(f"{folder} cannot be read: {first_line(error)}") from error


def read(folder: Path, entries: dict[str, Any]) -> None:
    """Fill the tensors of `entries` in place, and replace its other values. Raises CheckpointError.

    A DTensor gets this rank's part, whatever the parts were when they were saved.
    """
    alone_warning_off()
    try:
        dcp.load(
            entries,
            storage_reader=FileSystemReader(folder),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except CheckpointException as error:  # a BaseException
        causes = "; ".join(first_line(cause) for cause, _ in error.failures.values())
        raise CheckpointError(f"{folder} cannot be read: {causes}") from error


def alone_warning_off() -> None:
    """torch warns wherever one process saves or loads by itself. (`catch_warnings` is not for threads.)"""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def training_of(folder: Path) -> contents.Training:
    """Raises CheckpointError."""
    entries: dict[str, Any] = {contents.TRAINING: b""}
    read(folder, entries)
    found: contents.Training = unpacked(entries[contents.TRAINING])
    return found


def training_of_rank(folder: Path, rank: int) -> contents.RankTraining:
    """Raises CheckpointError."""
    entries: dict[str, Any] = {contents.training_of_rank(rank): b""}
    read(folder, entries)
    found: contents.RankTraining = unpacked(entries[contents.training_of_rank(rank)])
    return found
