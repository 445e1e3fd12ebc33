"""What a loss is called on to be studied: the model's outputs by their sizes, and which dimensions of targets may count
samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.analysis.batch_proof import OutputCombination
from autopar.analysis.batching import Batching
from autopar.analysis.rules.calls import size_of
from autopar.capture.node_names import describe
from autopar.capture.program import Program
from autopar.errors import InputError


class UnknownOutput(Exception):
    """The outputs of the model cannot be described well enough to follow the loss."""


def candidate_dims(
    leaves: Sequence[Any], target_dim: int | Sequence[int | None] | None, default_dims: Sequence[int], batch: int
) -> list[int | None]:
    """For every flat target leaf, the dimension that may count samples. Raises InputError for a `target_dim` that does
    not fit."""
    if isinstance(target_dim, Sequence):
        if len(target_dim) != len(leaves):
            raise InputError(f"target_dim has {len(target_dim)} entries, but the target has {len(leaves)} leaves")
        given: list[int | None] = list(target_dim)
        for i, (leaf, dim) in enumerate(zip(leaves, given, strict=True)):
            fits = isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim()
            if dim is not None and (not fits or leaf.shape[dim] != batch):
                shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise InputError(f"target_dim[{i}] is {dim}, but that target is {shape} and the batch is {batch}")
        return given
    dims = default_dims if target_dim is None else (target_dim,)

    def first(leaf: Any) -> int | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        return next((dim for dim in dims if -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == batch), None)

    return [first(leaf) for leaf in leaves]


@dataclass(frozen=True)
class OutputLeaf:
    """One flat output of the model."""

    value: Any  # a constant; None for tensors
    shape: tuple[Any, ...] | None  # sizes; sympy expressions of the batch
    dtype: torch.dtype | None
    device: torch.device | None
    how: OutputCombination

    def example(self, symbols: Mapping[sympy.Symbol, int]) -> Any:
        """The leaf for a batch of another size: values do not matter, sizes do."""
        if self.shape is None:
            return self.value
        sizes = [int(s.xreplace(symbols)) if isinstance(s, sympy.Basic) else s for s in self.shape]
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)


def example_outputs(program: Program, batching: Batching) -> list[OutputLeaf]:
    """The flat outputs of the model. Raises UnknownOutput."""
    flat = list(program.graph.output_node().args[0])[: program.n_outputs]  # type: ignore[arg-type]
    found = []
    for node, how in zip(flat, batching.outputs, strict=False):
        if not isinstance(node, fx.Node):
            found.append(OutputLeaf(node, None, None, None, how))
            continue
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise UnknownOutput(f"the size of the output of {describe(node)} is not known")
        shape = tuple(size_of(s) for s in value.shape)
        if how.combine == "cat" and not isinstance(shape[how.batch_dim or 0], sympy.Symbol):
            raise UnknownOutput(f"the output of {describe(node)} has several entries per sample along the batch")
        found.append(OutputLeaf(None, shape, value.dtype, value.device, how))
    return found


def where_targets_are(outputs: Sequence[OutputLeaf], targets: Sequence[Any]) -> list[OutputLeaf]:
    """The outputs on the device of the targets: the last stage brings both together, wherever the model was captured.

    Targets on several devices change nothing: what counts them could not be computed.
    """
    devices = {x.device for x in targets if isinstance(x, torch.Tensor)}
    if len(devices) != 1:
        return list(outputs)
    (device,) = devices
    return [leaf if leaf.shape is None else replace(leaf, device=device) for leaf in outputs]
