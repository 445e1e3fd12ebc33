"""Whole tensors out of a checkpoint, without a model: as a dict, or as a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoints.choice import choose
from autopar.runtime.checkpoints.contents import MODEL
from autopar.runtime.checkpoints.participants import Participants
from autopar.runtime.checkpoints.reading import metadata_of, read


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by their original names, read by this process. Raises CheckpointError."""
    entries = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata_of(folder).state_dict_metadata.items()
        if key.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    read(folder, entries)
    return {key.removeprefix(MODEL): tensor for key, tensor in entries.items()}


def export(directory: str | os.PathLike[str], file: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Write the model's tensors of the newest complete checkpoint, or of that of `step`, to a safetensors file.

    Returns the checkpoint that was read. Tied names are written once each. Raises CheckpointError if there is none,
    InputError if the file cannot be written or safetensors is not installed.
    """
    target = Path(file)
    if target.suffix != ".safetensors":
        raise InputError(f"{target}: the file is written as safetensors; give a name that ends in .safetensors")
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise InputError('export needs safetensors: pip install "autopar[safetensors]"') from None
    folder = choose(Participants(0, 1, None), directory, step, required=True)
    assert folder is not None
    tensors = whole_tensors(folder)
    temporary = target.with_name(target.name + ".partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror or error}") from error
    except Exception as error:  # safetensors has its own for some of them
        raise CheckpointError(f"{folder} cannot be written as safetensors: {error}") from error
    return folder
