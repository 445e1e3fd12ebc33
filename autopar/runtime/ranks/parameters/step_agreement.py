"""Whether all ranks make the same optimizer steps: otherwise the copies of a parameter drift apart without a word.

```
   w on ranks 0, 1       rank 0   SGD lr=0.1, a step      rank 1   SGD lr=0.2, a step      refused at the next call
   v on ranks 2, 3       rank 2   a step                  rank 3   no step                 refused at the next call
```
With every call, ranks compare a checksum of the steps since the last one: of all parameters that several ranks hold,
copies and parts alike, which optimizer stepped them with which options. Now and then they compare the values of copies
(due.py). Copies get the same gradient and the same update, so that they have the same bits. An optimizer's kernels may
round differently where a rank has other parameters beside: of that, there is a warning alone.

Stages that share no parameter cannot drift apart: see whole_steps.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.capture import torch_private_ranks
from autopar.errors import InputError, warn
from autopar.runtime.ranks.due import Due
from autopar.runtime.ranks.faults.failure import names as names_of
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.holders import Holding
from autopar.runtime.ranks.parameters.steps import EVERYWHERE, Step, checksum, difference, options_of
from autopar.runtime.ranks.parameters.whole_steps import WholeSteps
from autopar.runtime.ranks.world import World

_SAMPLE = 1000  # entries of a copy
_ROUNDING = 1e-3  # share of the largest entry up to which copies may differ by rounding
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class StepAgreement:
    """Of one model on one rank, once the parameters are placed."""

    def __init__(
        self,
        world: World,
        names: Mapping[int, str],
        holdings: Mapping[int, Mapping[int, Holding]],
        own: Mapping[int, torch.Tensor],
    ) -> None:
        """As FrozenParameters. Collective."""
        self._world, self._due, self._has_warned = world, Due(), False
        holders = {key: tuple(sorted(holdings.get(key) or range(world.size))) for key in names}
        self._shared = [ranks for ranks in dict.fromkeys(holders.values()) if len(ranks) > 1]
        places = {ranks: place for place, ranks in enumerate(self._shared)}
        here = {key: p for key, p in own.items() if key in names}
        self._names = {id(p): names[key] for key, p in here.items()}
        # By id of this rank's parameters that other ranks hold, too: the place in `_shared`.
        self._place_of = {id(p): places[holders[key]] for key, p in here.items() if holders[key] in places}
        self._first_names = [next(name for key, name in names.items() if holders[key] == one) for one in self._shared]
        together = {key: holdings[key][world.rank].together for key in here if key in holdings}
        everywhere = sorted({ranks for theirs in world.gathered({*together.values()}) for ranks in theirs})
        self._alike = alike = world.gathered(_hardware(world.device))  # other hardware may round differently
        self._copies = [ranks for ranks in everywhere if len(ranks) > 1 and len({alike[rank] for rank in ranks}) == 1]
        self._copied = [(together[key], here[key]) for key in names if together.get(key) in self._copies]
        self.whole = WholeSteps(world, [p for key, p in here.items() if key in holdings])
        self._steps: list[list[Step]] = [[] for _ in self._shared]  # since the last call, by place in `_shared`

    def add_shared_by_all(self, parameters: Sequence[torch.Tensor]) -> None:
        """From the next call on, also compare these parameters, which all ranks hold and train."""
        ranks = tuple(range(self._world.size))
        self.whole.add(parameters)
        if len(ranks) > 1 and len(set(self._alike)) == 1:
            self._copies += [ranks] if ranks not in self._copies else []
            self._copied += [(ranks, parameter) for parameter in parameters]

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        self.whole.stepped(optimizer)
        kind = type(optimizer).__name__
        for group in optimizer.param_groups:
            counts = Counter(map(self._place_of.get, map(id, group["params"])))
            # None: of this rank alone, or of another model.
            places = {place: n for place, n in counts.items() if place is not None}
            if places:  # options that the optimizer knows: users may have added what differs between ranks
                options = options_of(optimizer.defaults, group)
                for place, n in places.items():
                    self._steps[place].append(Step(kind, options, n))

    def numbers(self) -> list[int]:
        """What this rank's steps and copies are like; as many numbers on all ranks."""
        # In any order: an optimizer a parameter steps as its gradient comes.
        shared = [checksum(sorted(steps)) for steps in self._steps]
        return [self.whole.number(), *shared, *(self._values() if self._due.now() else ())]

    def _values(self) -> list[int]:
        """By ranks with the same copies, a checksum of this rank's."""
        found = list(self._bits())
        return [checksum([bits for of, _, bits in found if of == ranks]) for ranks in self._copies]

    def _bits(self) -> Iterator[tuple[tuple[int, ...], str, list[int]]]:
        """For this rank's copies that are trained: ranks with the same, name, checksums. A GPU is waited for once."""
        copies = [(ranks, p) for ranks, p in self._copied if p.requires_grad and p.numel()]
        if copies:
            found = torch.stack([_checksums(p) for _, p in copies]).tolist()
            yield from ((ranks, self._names[id(p)], bits) for (ranks, p), bits in zip(copies, found, strict=True))

    def agree(self, everyone: Sequence[Sequence[int]]) -> None:
        """Raise InputError on all ranks where their steps or copies differ. `everyone`: what `numbers` gave, by rank.
        Collective where they differ."""
        columns = list(zip(*everyone, strict=True))
        for place, (ranks, column) in enumerate(zip(self._shared, columns[1:], strict=False)):
            if len({column[rank] for rank in ranks}) > 1:
                self._refuse_steps(place, ranks)
        self.whole.agree(columns[0])
        for ranks, column in zip(self._copies, columns[1 + len(self._shared) :], strict=False):
            if len({column[rank] for rank in ranks}) > 1:
                self._refuse_values(ranks)
        for steps in self._steps:
            steps.clear()

    def _refuse_steps(self, place: int, ranks: Sequence[int]) -> None:
        found = self._world.gathered(self._steps[place])
        raise on_all_ranks(
            InputError(
                f"ranks differ in the optimizer's steps for '{self._first_names[place]}' and all else of "
                f"which {names_of(ranks)} have copies or parts: {difference(found, ranks)}; "
                f"{EVERYWHERE}"
            )
        )

    def _refuse_values(self, ranks: Sequence[int]) -> None:
        """Raise InputError on all ranks, unless rounding explains the difference: then rank 0 warns, once."""
        found = self._world.gathered([(name, bits) for of, name, bits in self._bits() if of == ranks])
        rows = zip(*(found[rank] for rank in ranks), strict=True)
        (name, own), *others = next(row for row in rows if any(one != row[0] for one in row))
        apart = [rank for rank, (_, bits) in zip(ranks[1:], others, strict=True) if bits != own]
        here = next((p for _, p in self._copied if self._names[id(p)] == name), None)
        samples = self._world.gathered(None if here is None else _sample(here))
        share = max(_distance(samples[ranks[0]], samples[rank]) for rank in apart)
        message = (
            f"the copies of '{name}' on {names_of(ranks)} have drifted apart: {names_of(apart)} from rank {ranks[0]}, "
            f"by {share:.1g} of the largest of some entries"
        )
        if share > _ROUNDING:
            raise on_all_ranks(
                InputError(
                    f"{message}. Optimizers differ between ranks, or a rank alone has changed values or gradients: "
                    "change them alike on every rank"
                )
            )
        if not self._has_warned and self._world.rank == 0:
            warn(f"{message}, as where the optimizer's kernels round differently on them")
        self._has_warned = True


def _checksums(parameter: torch.Tensor) -> torch.Tensor:
    """Three numbers of a rank's copy, which no order of summation changes: all bits, and the least and the largest
    entry as integers, since equal entries leave no trace in the first."""
    real = _real(parameter)
    bits = real.view(_INTEGERS[real.element_size()])
    least, largest = torch.aminmax(bits)
    whole = torch.hash_tensor(bits).view(torch.int64)
    return torch.stack([whole, least.long(), largest.long()])


def _real(parameter: torch.Tensor) -> torch.Tensor:
    """A rank's copy, in real numbers. A view."""
    local = torch_private_ranks.part_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    return torch.view_as_real(local) if local.is_complex() else local


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """Some of the entries of a rank's copy, on the CPU."""
    entries = _real(parameter).flatten()
    return entries[:: entries.numel() // _SAMPLE + 1].double().cpu()


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, as a share of the largest entry; inf where only one of two entries is finite."""
    finite = a.isfinite()
    if not finite.equal(b.isfinite()):
        return math.inf
    a, b = a[finite], b[finite]
    return 0.0 if a.equal(b) else float((a - b).abs().max() / torch.stack([a, b]).abs().max())


def _hardware(device: torch.device) -> tuple[str, str, int]:
    """What may change how a rank rounds."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
