"""The gradients of a call's inputs and targets on all ranks: every rank runs what comes before the pipelined module.

```
   rank 0   x -> stage 0 -> ..   dx of micro-batches 0 and 2    \
   rank 1   x -> stage 0 -> ..   dx of micro-batches 1 and 3     +  summed: every rank goes on with the whole gradient
   rank 2   x ............. -> stage 1, which reads x, too: dx  /
```
Every rank of a mesh has the gradient of what its stage reads; that of its first rank counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.step.call import CallTensors, PipelineCall


def needing_gradients(call: PipelineCall) -> list[int]:
    """The flat inputs and targets that require a gradient, the same on all ranks."""
    return [
        index
        for index, pieces in enumerate((*call.inputs, *call.target_pieces))
        if any(isinstance(piece, torch.Tensor) and piece.requires_grad for piece in pieces)
    ]


def share_input_gradients(
    indices: Sequence[int], call: PipelineCall, tensors: CallTensors, executable: RankExecutable
) -> None:
    """After all backwards, have every rank hold the sums over all ranks in `tensors`. Collective."""
    world = executable.world
    for key in [key for key in tensors.input_gradients if not executable.computes_first(key[2], key[1])]:
        del tensors.input_gradients[key]
    own = {index: tensors.input_gradient(index) for index in indices}
    tensors.input_gradients.clear()
    has = world.gathered_numbers([int(own[index] is not None) for index in indices])
    for place, index in enumerate(indices):
        if not any(theirs[place] for theirs in has):
            continue
        pieces, dim, mine = call.pieces(index), call.split_dim(index), own[index]
        if mine is None:
            mine = torch.zeros_like(pieces[0] if dim is None else torch.cat([piece.detach() for piece in pieces], dim))
        whole = world.all_reduced(mine.contiguous())
        parts = [whole] if dim is None else whole.split(list(call.sizes), dim)
        for microbatch, part in enumerate(parts):
            tensors.input_gradients[index, microbatch, 0] = part
