"""Gradients on ranks are dense: DTensors have no sparse parts."""

from __future__ import annotations

import torch

from autopar.errors import PlanError
from autopar.lower.stages import Lowered

_SPARSE = 4  # place of `sparse` among the arguments of an embedding


def check_dense(lowered: Lowered) -> None:
    """Raise PlanError for an embedding whose weight would get a sparse gradient."""
    for stage in lowered.stages:
        names = {piece.attribute: piece.name for piece in stage.pieces}
        for node in stage.module.graph.nodes:
            if node.target is torch.ops.aten.embedding.default and node.args[_SPARSE:] and node.args[_SPARSE]:
                weight = str(getattr(node.args[0], "target", ""))
                raise PlanError(
                    f"'{names.get(weight, weight)}' has sparse gradients, and one process a device adds up dense ones: "
                    "use nn.Embedding(sparse=False) and a dense optimizer in the place of SparseAdam, or give devices="
                )
