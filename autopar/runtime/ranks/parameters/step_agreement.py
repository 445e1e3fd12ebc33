"""Whether all ranks make the same optimizer steps: otherwise the copies of a parameter drift apart without a word.

```
   w on ranks 0, 1       rank 0   SGD lr=0.1, a step      rank 1   SGD lr=0.2, a step      refused at the next call
   v on ranks 2, 3       rank 2   a step                  rank 3   no step                 refused at the next call
```
With every call, ranks compare a checksum of the steps since the last one: of all parameters that several ranks hold,
copies and parts alike, which optimizer stepped them with which options. Now and then they compare the values of copies
(due.py). Copies get the same gradient and the same update, so that they have the same bits. An optimizer's kernels may
round differently where a rank has other parameters beside: of that, there is a warning alone.

Stages that share no parameter cannot drift apart, and may be trained in different ways. But an optimizer that was made
with the whole model's parameters, before they were placed, is one optimizer: if it is the only one, ranks also compare
its steps and learning rates. Optimizers change other options by themselves (Prodigy), each rank by its own gradients.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor

from autopar.capture import torch_private_ranks
from autopar.errors import InputError, warn
from autopar.runtime.ranks.due import Due
from autopar.runtime.ranks.faults.failure import names as names_of
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.holders import Holding
from autopar.runtime.ranks.world import World

_SAMPLE = 1000  # entries of a copy
_ROUNDING = 1e-3  # share of the largest entry up to which copies may differ by rounding
_NOT_COMPARED = 0  # in the place of a checksum
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_EVERYWHERE = (
    "every rank must make the same steps, with the same optimizer, learning rate and options (not under "
    "`if rank == 0:`, and schedulers that follow a metric need the same metric on all ranks)"
)


class Step(NamedTuple):
    """A step with one of an optimizer's groups, as far as it concerns parameters that the same ranks hold."""

    kind: str  # the optimizer's class
    options: tuple[tuple[str, str], ...]  # names and values
    n: int = 0  # parameters


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
        alike = world.gathered(_hardware(world.device))  # another one may round otherwise
        self._copies = [ranks for ranks in everywhere if len(ranks) > 1 and len({alike[rank] for rank in ranks}) == 1]
        self._copied = [(together[key], here[key]) for key in names if together.get(key) in self._copies]
        self._whole: WeakSet[torch.optim.Optimizer] = WeakSet()  # made with parameters from before the placing
        # Since the last call: steps by place in `_shared`, and those of the optimizers in `_whole`.
        self._steps: list[list[Step]] = [[] for _ in self._shared]
        self._whole_steps: list[Step] = []

    def is_of_whole_model(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made with parameters from before the placing, as on all ranks."""
        self._whole.add(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        kind, is_whole = type(optimizer).__name__, optimizer in self._whole
        for group in optimizer.param_groups:
            if is_whole:
                self._whole_steps.append(Step(kind, _options(["lr"], group)))
            counts = Counter(map(self._place_of.get, map(id, group["params"])))
            # None: of this rank alone, or of another model.
            places = {place: n for place, n in counts.items() if place is not None}
            if places:  # options that the optimizer knows: users may have added what differs between ranks
                options = _options(optimizer.defaults, group)
                for place, n in places.items():
                    self._steps[place].append(Step(kind, options, n))

    def numbers(self) -> list[int]:
        """What this rank's steps and copies are like; as many numbers on all ranks."""
        whole = _checksum(self._whole_steps) if self._is_one_optimizer() else _NOT_COMPARED
        # In any order: an optimizer a parameter steps as its gradient comes.
        shared = [_checksum(sorted(steps)) for steps in self._steps]
        return [whole, *shared, *(self._values() if self._due.now() else ())]

    def _is_one_optimizer(self) -> bool:
        """Whether one optimizer has the whole model's parameters, and some of this rank's."""
        found = [group for optimizer in self._whole for group in optimizer.param_groups]
        return len(self._whole) == 1 and any(id(p) in self._names for group in found for p in group["params"])

    def _values(self) -> list[int]:
        """By ranks with the same copies, a checksum of this rank's."""
        found = list(self._bits())
        return [_checksum([bits for of, _, bits in found if of == ranks]) for ranks in self._copies]

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
        compared = [rank for rank, number in enumerate(columns[0]) if number != _NOT_COMPARED]
        if len({columns[0][rank] for rank in compared}) > 1:
            found = self._world.gathered(self._whole_steps)
            raise on_all_ranks(
                InputError(f"ranks differ in the optimizer's steps: {_difference(found, compared)}; {_EVERYWHERE}")
            )
        for ranks, column in zip(self._copies, columns[1 + len(self._shared) :], strict=False):
            if len({column[rank] for rank in ranks}) > 1:
                self._refuse_values(ranks)
        self._whole_steps.clear()
        for steps in self._steps:
            steps.clear()

    def _refuse_steps(self, place: int, ranks: Sequence[int]) -> None:
        found = self._world.gathered(self._steps[place])
        raise on_all_ranks(
            InputError(
                f"ranks differ in the optimizer's steps for '{self._first_names[place]}' and all else of "
                f"which {names_of(ranks)} have copies or parts: {_difference(found, ranks)}; "
                f"{_EVERYWHERE}"
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


def _difference(found: Sequence[Sequence[Step]], ranks: Sequence[int]) -> str:
    """What differs between the steps of the first of `ranks` and those of another. `found`: by rank."""
    a, b = ranks[0], next(rank for rank in ranks if sorted(found[rank]) != sorted(found[ranks[0]]))
    counts = Counter(found[a]), Counter(found[b])
    here, there = (next(iter(one - other), None) for one, other in (counts, counts[::-1]))
    if here is None or there is None:
        return f"{len(found[a])} on rank {a}, {len(found[b])} on rank {b}, since the last call"
    if here.kind != there.kind:
        return f"{here.kind} on rank {a}, {there.kind} on rank {b}"
    options = zip(here.options, there.options, strict=True)
    (name, mine), (_, theirs) = next(((m, t) for m, t in options if m != t), (("", ""), ("", "")))
    if name:
        return f"{here.kind} has {name}={mine} on rank {a}, {name}={theirs} on rank {b}"
    return f"{here.kind} has {here.n} of such parameters on rank {a}, {there.n} on rank {b}"


def _options(names: Sequence[str] | Mapping[str, Any], group: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _text(group.get(name))) for name in names)


def _text(value: Any) -> str:
    """The same on all ranks for equal values. The host does not wait for a GPU to know one."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist()) if value.device.type == "cpu" else f"a tensor on {value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _checksum(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


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
