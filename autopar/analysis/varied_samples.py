"""Other values for the inputs of an example, on which a split into micro-batches must hold, too.

What one example shows may be due to its values: no entry is masked, no target is ignored, no two samples are equal. A
model that divides by a number of entries or targets then seems to treat every sample by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.analysis.rules.table import rule_name
from autopar.analysis.rules.views import MOVES
from autopar.capture.cleanup import aten, cross_entropy_arguments
from autopar.capture.program import Program

_KEEPS = (*MOVES, "pad", "constant_pad_nd", "cat", "to", "_to_copy", "clone", "contiguous", "alias", "detach")
_COUNTS = (aten.ne.Scalar, aten.sym_size.int)  # what reads targets beside their cross-entropy


def varied(program: Program, samples: Sequence[Any], seed: int) -> list[Any]:
    """Values for the flat inputs that a model takes if it takes `samples`: no number gets larger or leaves its column.

    Some samples occur twice (with an even seed), or samples exchange their entries at each place. Flags are drawn anew,
    and targets that a cross-entropy alone reads may be those that it ignores.
    """
    generator = torch.Generator().manual_seed(seed)
    result = []
    for node, spec, x in zip(program.graph.find_nodes(op="placeholder"), program.inputs, samples, strict=True):
        if spec.batch_dim is not None:
            rows = x.shape[spec.batch_dim]
            own = [rows if d == spec.batch_dim else 1 for d in range(x.dim())] if seed % 2 == 0 else x.shape
            source = torch.randint(rows, own, generator=generator, device="cpu").expand(x.shape)
            drawn = torch.rand(x.shape, generator=generator, device="cpu").to(x.device)
            is_flag = bool(((x == 0) | (x == 1)).all())
            x = (drawn < 0.5).to(x.dtype) if is_flag else x.gather(spec.batch_dim, source.to(x.device))
            ignored = _ignored(node)
            x = x if ignored is None else x.masked_fill(drawn < 0.3, ignored)
        result.append(x)
    return result


def _ignored(node: fx.Node) -> int | None:
    """The number that marks what a cross-entropy ignores, if `node` has its targets and nothing else reads them."""
    numbers, pending = set[int](), [node]
    while pending:
        values = pending.pop()
        for user in values.users:
            arguments = cross_entropy_arguments(user)
            if arguments is not None and arguments.target is values:
                numbers.add(arguments.ignore_index)
            elif rule_name(user) in _KEEPS:
                pending.append(user)
            elif user.target not in _COUNTS and user.op != "output":
                return None
    return numbers.pop() if len(numbers) == 1 else None
