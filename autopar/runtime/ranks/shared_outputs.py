"""The outputs of a call's micro-batches, from the ranks that computed them to all ranks.

```
   all ranks    what every output is: one exchange of small objects
   each owner   its small tensors in one row of bytes ......... the same messages however many micro-batches
                its large tensors, and those of GPUs, by themselves
```
Every collective over gloo costs about 100 us, whatever it carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.ranks.messages.packing import MOST_PACKED, Packing, SentTensor
from autopar.runtime.ranks.world import World
from autopar.runtime.step.outputs import OutputCollector
from autopar.runtime.step.transfers import as_leaf

_Place = tuple[int, int]  # micro-batch, position among its flat outputs


class _Described(NamedTuple):
    """An output, as all ranks know it."""

    tensor: SentTensor | None  # None: `value`
    on_cpu: bool
    requires_grad: bool
    value: Any


class SharedOutputs(OutputCollector):
    """Keeps the outputs of this rank's micro-batches until all ranks share them."""

    def __init__(self, like: OutputCollector) -> None:
        super().__init__(like.outputs, like.sizes, like.device)
        self._own: dict[int, list[Any]] = {}

    def add(self, values: Sequence[Any], microbatch: int) -> None:
        self._own[microbatch] = [as_leaf(value) for value in values]

    def share(self, executable: RankExecutable) -> None:
        """Collective: every rank gets the outputs of all micro-batches, in their order."""
        world, count = executable.world, len(self.sizes)
        owners = [executable.owner(microbatch) for microbatch in range(count)]
        mine = {i: self._own[i] for i, owner in enumerate(owners) if owner == world.rank}
        self._own.clear()
        facts = world.gathered({i: list(map(_described, values)) for i, values in mine.items()})
        known = {(i, n): one for i in range(count) for n, one in enumerate(facts[owners[i]][i])}
        tensors: dict[_Place, torch.Tensor] = {}
        for owner in sorted(set(owners)):
            theirs = {
                place: one for place, one in known.items() if one.tensor is not None and owners[place[0]] == owner
            }
            own = {(i, n): mine[i][n].detach().contiguous() for i, n in theirs} if owner == world.rank else None
            tensors |= _from_owner(world, owner, theirs, own)
        for i in range(count):
            found = [
                one.value if one.tensor is None else tensors[i, n].requires_grad_(one.requires_grad)
                for n, one in enumerate(facts[owners[i]][i])
            ]
            super().add(found, i)


def _from_owner(
    world: World, owner: int, known: Mapping[_Place, _Described], own: Mapping[_Place, torch.Tensor] | None
) -> dict[_Place, torch.Tensor]:
    """The tensors of one rank on all of them. Collective. `own`: on that rank, these tensors."""
    found: dict[_Place, torch.Tensor] = {}
    places = list(known)
    small = {
        number: one.tensor
        for number, one in enumerate(known.values())
        if one.tensor is not None and one.on_cpu and one.tensor.nbytes <= MOST_PACKED
    }
    if small:
        packing = Packing.of(0, small, MOST_PACKED)
        row = packing.row() if own is None else packing.packed([], {n: own[places[n]] for n in small})
        world.broadcast(row, owner)
        found = {places[number]: tensor.clone() for number, tensor in packing.unpacked(row).items()}
    for number, (place, one) in enumerate(known.items()):
        if number in small:
            continue
        assert one.tensor is not None, "values that are no tensors came with their descriptions"
        if own is not None:
            found[place] = own[place]
        else:
            device = torch.device("cpu") if one.on_cpu else world.device
            found[place] = torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device=device)
        world.broadcast(found[place], owner)
    return found


def _described(value: Any) -> _Described:
    if not isinstance(value, torch.Tensor):
        return _Described(None, True, False, value)
    tensor = SentTensor(tuple(value.shape), value.dtype)
    return _Described(tensor, value.device.type == "cpu", value.requires_grad, None)
