"""Whole weights in safetensors files, read into the parts that this rank holds."""

from __future__ import annotations

from pathlib import Path

import torch

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoints.participants import participants
from autopar.runtime.initial_values.sources import SafetensorsSource
from autopar.runtime.ranks.module import RankedModule


def load_weight_files(folder: Path, module: RankedModule) -> None:
    """Read a placed module's parameters and buffers from all safetensors files of `folder`. Collective.

    One name is enough for a tensor that has several. Raises CheckpointError if there are no files, or a tensor lacks.
    """
    names, state = module.names(), module.state_dict()

    def read() -> None:
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(f"{folder} has neither safetensors files nor a directory of autopar.save")
        source = SafetensorsSource(folder)
        shapes = source.shapes()
        saved = {first: name for name, first in names.items() if name in shapes}  # the name in the files
        targets = {}
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            alias = saved.get(names.get(name, name))
            if alias is None:
                raise CheckpointError(f"the safetensors files of {folder} lack '{name}'")
            if shapes[alias] != tuple(tensor.shape):
                raise InputError(
                    f"'{alias}' of {folder} has shape {shapes[alias]}, in the model {tuple(tensor.shape)}; build the "
                    "model that was saved"
                )
            targets[alias] = tensor
        with torch.no_grad():
            source.fill(targets)

    participants().done(f"the weights in {folder} cannot be loaded", read)
