"""Deferred batch norm on ranks: every rank learns what all micro-batches put aside, and merges it as one process does.

```
   rank 0, stage 0    micro-batches 0, 2:  n, mean, var of its norms  \\
   rank 1, stage 0    micro-batches 1, 3:  n, mean, var                > two exchanges -> the same update everywhere
   rank 2, stage 1    micro-batches 0..3:  n, mean, var of its norms  /
```
The counts are numbers of the hosts. Means and variances are added up over the ranks: each comes from one rank and is
zero on the others, in 64 bits, so that the sum has its bits. A rank may keep running statistics of a norm that it does
not run (a plan may put the operator that counts batches elsewhere), so every rank gets all of them.
"""

from __future__ import annotations

import torch

from autopar.lower.deferred_batch_norm import Statistics
from autopar.runtime.ranks.executable import RankExecutable

_DTYPES = (torch.float32, torch.float64)  # of moments (deferred_batch_norm)


def share_statistics(statistics: Statistics, executable: RankExecutable, n_microbatches: int) -> None:
    """Give `statistics` on every rank what all ranks put aside. Collective."""
    world = executable.world
    norms = [(stage.index, norm) for stage in executable.lowered.stages for norm in stage.deferred]
    places = [(stage, norm, microbatch) for stage, norm in norms for microbatch in range(n_microbatches)]
    mine = {
        place: moments
        for place, (stage, norm, microbatch) in enumerate(places)
        if executable.computes_first(stage, microbatch) and (moments := statistics.of(norm.key, microbatch)) is not None
    }
    numbers = [0] * (2 * len(places))
    for place, (count, mean, _) in mine.items():
        numbers[2 * place : 2 * place + 2] = count, _DTYPES.index(mean.dtype)
    found = [max(theirs) for theirs in zip(*world.gathered_numbers(numbers), strict=True)]
    widths = [2 * executable.whole_tensor(norm.mean).numel() for _, norm, _ in places]
    values = torch.zeros(sum(widths), dtype=torch.float64, device=world.device)
    for place, row in enumerate(values.split(widths)):
        if place in mine:
            row.copy_(torch.cat(mine[place][1:]))
    shared = world.all_reduced(values)
    for place, ((_, norm, microbatch), row) in enumerate(zip(places, shared.split(widths), strict=True)):
        count, dtype = found[2 * place : 2 * place + 2]
        if count:
            mean, var = row.to(_DTYPES[dtype]).chunk(2)
            statistics.add(norm.key, microbatch, (count, mean, var))
