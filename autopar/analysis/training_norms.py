"""Batch norms that normalise by the statistics of their input, and so by those of each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import fx, nn

from autopar.capture.cleanup import aten
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.node_names import module_path


class TrainingNorm(NamedTuple):
    """A batch norm that normalises by the statistics of its input."""

    path: str  # of its module
    nested: bool  # in a block under an autocast or no_grad of the model's own

    def __str__(self) -> str:
        return f"'{self.path}'"


def training_norms(module: fx.GraphModule, *, nested: bool = False) -> Iterator[tuple[fx.Node, TrainingNorm]]:
    """Operators that normalise by the statistics of their input batch, those in nested blocks included."""
    for node in module.graph.nodes:
        if _is_training_batch_norm(node, module):
            yield node, TrainingNorm(module_path(node) or node.name, nested)
        elif (block := nested_block(node)) is not None:
            yield from training_norms(block[0], nested=True)


def _is_training_batch_norm(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether `node` normalises by the statistics of its input batch."""
    if node.target is aten.batch_norm.default:
        return bool(node.args[5])
    if node.op == "call_module":
        child = module.get_submodule(str(node.target))
        return isinstance(child, nn.modules.batchnorm._BatchNorm) and (child.training or child.running_mean is None)
    return False


def least_samples(norms: Iterable[fx.Node]) -> int:
    """Samples in the smallest micro-batch: torch refuses batch norms of one value per channel, whose output is zero."""
    inputs = [n.args[0] for n in norms]
    # symbolic_trace records no shapes: then any may have one value per channel.
    shapes = [n.meta["val"].shape if "val" in n.meta else () for n in inputs if isinstance(n, fx.Node)]
    return 2 if any(math.prod(shape[2:]) == 1 for shape in shapes) else 1
