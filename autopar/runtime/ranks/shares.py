"""The batch of a call whose samples are spread over the ranks: every rank passes samples of its own.

```
   rank 0 passes    a b c        the batch     a b c d e       micro-batch 0: a b c    micro-batch 1: d e
   rank 1 passes    d e          stage 0 on rank 0 reads all five; the targets go to the rank of the last stage
```
The batch is the samples of rank 0, then those of rank 1, and so on. A rank gets from the others what the micro-batches
of its own stages read; until a call's signature is captured and placed, it gets all.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.call_inputs import find_batch, flattened
from autopar.errors import InputError, warn
from autopar.options import BatchDim
from autopar.runtime.ranks.agreement import CallAgreement, CallKind, CallLeaves, content_of, described
from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.ranks.messages.channels import Pending
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.captures import BoundCall, CallArguments
from autopar.runtime.signatures.loss_splits import default_target_dims

Span = tuple[int, int]  # numbers of samples in the batch: the first, and the one after the last

_OWN = "every rank must make the same calls, each with its own samples, padded to the same sizes (data='per-rank')"


@dataclass(frozen=True)
class Shares:
    """How many samples each rank passed."""

    sizes: tuple[int, ...]
    rank: int  # this one

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def own(self) -> int:
        return self.sizes[self.rank]

    @property
    def start(self) -> int:
        """The number in the batch of this rank's first sample."""
        return sum(self.sizes[: self.rank])

    @property
    def spans(self) -> list[Span]:
        """For every rank, its first sample's number and the one after its last."""
        ends = list(accumulate(self.sizes))
        return [(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


@dataclass
class SharedCall:
    """A call with the whole batch. This rank may have only its own samples until `complete` and `fetch`."""

    arguments: CallArguments
    shares: Shares
    inputs: list[Any]  # flat, with room for the whole batch
    targets: list[Any]
    input_dims: list[int | None]  # the dimension that counts samples; None: every rank has all of the leaf
    target_dims: list[int | None]
    is_complete: bool = False  # this rank has all samples

    def complete(self, world: World) -> None:
        """Get all samples on all ranks. Collective."""
        if self.is_complete:
            return
        everything = [(0, self.shares.total)]
        self._exchange(world, lambda leaf, rank: everything)
        self.is_complete = True

    def fetch(self, world: World, bound: BoundCall, sizes: Sequence[int], *, trains: bool) -> None:
        """Get what the micro-batches of this rank's stages read, as far as it is not here. Collective.

        `sizes`: samples of each micro-batch. `trains`: the last stage computes the loss, and reads the targets.
        """
        if self.is_complete:
            return
        executable = bound.signature.executable
        assert isinstance(executable, RankExecutable)
        readers = _readers(executable, len(sizes))
        last = executable.n_stages - 1
        counted = bound.loss_split.count.leaves if trains and bound.loss_split and bound.loss_split.count else ()
        everyone = {index if where == "input" else len(self.inputs) + index for where, index in counted}
        stages: dict[int, list[int]] = defaultdict(list)  # that read a leaf
        for stage in executable.lowered.stages:
            for index in stage.model_inputs:
                stages[index].append(stage.index)
        for place in range(len(self.targets) if trains else 0):
            stages[len(self.inputs) + place].append(last)
        ends = list(accumulate(sizes))

        def wanted(leaf: int, rank: int) -> list[Span]:
            if leaf in everyone:
                return [(0, self.shares.total)]
            microbatches = sorted({i for stage in stages[leaf] for i in readers[stage].get(rank, ())})
            return _joined((ends[i] - sizes[i], ends[i]) for i in microbatches)

        self._exchange(world, wanted)

    def _exchange(self, world: World, wanted: Callable[[int, int], Sequence[Span]]) -> None:
        """Send every rank the samples that it wants. `wanted(leaf, rank)`: their numbers, as spans."""
        posted: list[tuple[Pending, torch.Tensor]] = []  # a tensor must live until its transfer has ended
        arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        channel, own, tag = world.host_channel(), self.shares.rank, 0
        dims = [*self.input_dims, *self.target_dims]
        for place, (leaf, dim) in enumerate(zip([*self.inputs, *self.targets], dims, strict=True)):
            if dim is None:
                continue
            for target in range(world.size):
                spans = wanted(place, target)
                for source, span in enumerate(self.shares.spans):
                    for start, stop in _overlap(span, spans) if source != target else ():
                        tag += 1
                        if own not in (source, target):
                            continue
                        part = leaf.detach().narrow(dim, start, stop - start)
                        if own == source:
                            sent = part.cpu().contiguous()
                            posted.append((channel.send(_bytes(sent), target, tag), sent))
                        else:
                            sent = torch.empty(part.shape, dtype=part.dtype)
                            posted.append((channel.receive(_bytes(sent), source, tag), sent))
                            arrived.append((part, sent))
        for work, _ in posted:
            work.wait()
        for part, sent in arrived:
            part.copy_(sent)


def _readers(executable: RankExecutable, n_microbatches: int) -> list[dict[int, list[int]]]:
    """For every stage, by rank the micro-batches that it runs there."""
    found: list[dict[int, list[int]]] = []
    for stage in range(executable.n_stages):
        by_rank: defaultdict[int, list[int]] = defaultdict(list)
        for microbatch in range(n_microbatches):
            for rank in executable.routes.ranks[executable.replica(stage, microbatch).slot]:
                by_rank[rank].append(microbatch)
        found.append(by_rank)
    return found


def _joined(spans: Iterator[Span]) -> list[Span]:
    """Ascending spans, with neighbours made one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _overlap(span: Span, wanted: Sequence[Span]) -> list[Span]:
    both = [(max(span[0], start), min(span[1], stop)) for start, stop in wanted]
    return [(start, stop) for start, stop in both if start < stop]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that every backend sends."""
    return tensor.reshape(-1).view(torch.uint8)


class ShareAgreement:
    """Makes the calls of all ranks, each with its own samples, into one call with the whole batch."""

    def __init__(self, world: World, model: nn.Module, batch_dim: BatchDim, agreement: CallAgreement) -> None:
        self._world, self._model, self._batch_dim = world, model, batch_dim
        self._agreement = agreement
        self._warned = False

    def joined(self, kind: CallKind, call: CallArguments) -> SharedCall:
        """The call with room for all samples, and this rank's own filled in. Collective.

        Raises InputError on all ranks where the calls do not fit together.
        """
        inputs, spec = flattened(call.args, call.kwargs)
        leaves = CallLeaves(self._model, call)
        found = self._dims(call, inputs, leaves.values[len(inputs) :])
        unknown: list[int | None] = [None] * len(leaves.values)
        dims, n = found if isinstance(found, tuple) else (unknown, -1)
        due, error = self._agreement.is_content_due(kind, leaves), found if isinstance(found, InputError) else None
        shares, dims = self._agreed_shares(kind, leaves, dims, n, error, due=due)
        wholes = [
            leaf if dim is None else _with_room(leaf, dim, shares)
            for leaf, dim in zip(leaves.values, dims, strict=True)
        ]
        k = len(inputs)
        args, kwargs = torch_private.tree_unflatten(wholes[:k], spec)
        target = torch_private.tree_unflatten(wholes[k:], torch_private.tree_flatten(call.target)[1])
        arguments = call._replace(args=args, kwargs=kwargs, target=target)
        return SharedCall(arguments, shares, wholes[:k], wholes[k:], dims[:k], dims[k:])

    def _dims(
        self, call: CallArguments, inputs: list[Any], targets: list[Any]
    ) -> tuple[list[int | None], int] | InputError:
        """The dimensions that count samples, as this rank sees them, and its number of samples."""
        try:
            kwargs = dict(sorted(call.kwargs.items()))
            dims, n = find_batch(self._model, call.args, kwargs, inputs, self._batch_dim, may_be_empty=True)
            return [*dims, *_target_dims(call, targets, n, self._batch_dim)], n
        except InputError as error:
            return error

    def _agreed_shares(
        self,
        kind: CallKind,
        leaves: CallLeaves,
        dims: list[int | None],
        n: int,
        error: InputError | None,
        *,
        due: bool,
    ) -> tuple[Shares, list[int | None]]:
        """The number of samples of every rank, and the dimensions that count them on all ranks."""
        world = self._world
        split, common = _contents(leaves.values, dims) if due else (0, 0)
        shapes = zlib.crc32(repr([tuple(kind), leaves.structure, *map(_shape, leaves.values, dims)]).encode())
        found = self._agreement.gathered_numbers([shapes, common, n, split])
        if n < 0 or any(theirs[:2] != found[0][:2] or theirs[2] < 0 for theirs in found):
            dims = self._common_dims(kind, leaves, dims, error)
            shapes_of = list(map(_shape, leaves.values, dims))
            contents = [content_of(x, 0) if _is_common(x, d) else 0 for x, d in zip(leaves.values, dims, strict=True)]
            known = world.gathered((tuple(kind), leaves.structure, shapes_of, contents))
            if any(theirs != known[0] for theirs in known):
                self._agreement.refuse(kind, leaves, shapes_of, contents, _OWN)
        sizes = [theirs[2] for theirs in found]
        equal = len({theirs[3] for theirs in found}) == 1 and all(sizes)
        if due and equal and any(dim is not None for dim in dims) and not self._warned and world.rank == 0:
            self._warned = True
            warn(
                "every rank passed the same samples, and with data='per-rank' they count once for each rank: give "
                "every rank its own (torch.utils.data.DistributedSampler), or use data='whole'"
            )
        return Shares(tuple(sizes), world.rank), dims

    def _common_dims(
        self, kind: CallKind, leaves: CallLeaves, dims: list[int | None], error: InputError | None
    ) -> list[int | None]:
        """A tensor that has the size of the batch by chance on some ranks only belongs to no sample."""
        found = self._world.gathered((None if error is None else str(error), len(dims), dims))
        wrong = next(((rank, text) for rank, (text, _, _) in enumerate(found) if text is not None), None)
        if wrong is not None:
            self._world.outcome(f"reading the batch ({kind})", _raising(error))
        if any(count != len(dims) for _, count, _ in found):
            self._agreement.refuse(kind, leaves, list(map(_shape, leaves.values, dims)), [0] * len(dims), _OWN)
        return [dim if all(theirs[place] == dim for _, _, theirs in found) else None for place, dim in enumerate(dims)]


def _raising(error: InputError | None) -> Any:
    def work() -> None:
        if error is not None:
            raise error

    return work


def _shape(leaf: Any, dim: int | None) -> str:
    """As `described`, without the size that counts samples."""
    if dim is None:
        return described(leaf)
    sizes = ["samples" if place == dim else str(size) for place, size in enumerate(leaf.shape)]
    return f"({', '.join(sizes)}) {leaf.dtype}{' that requires a gradient' * leaf.requires_grad}"


def _is_common(leaf: Any, dim: int | None) -> bool:
    """Whether a leaf is a tensor that all ranks have alike."""
    return isinstance(leaf, torch.Tensor) and dim is None


def _contents(leaves: Sequence[Any], dims: Sequence[int | None]) -> tuple[int, int]:
    """Checksums of the tensors that are split over ranks, and of those that all ranks have alike."""
    split = common = 0
    for leaf, dim in zip(leaves, dims, strict=True):
        if _is_common(leaf, dim):
            common = content_of(leaf, common)
        elif isinstance(leaf, torch.Tensor):
            split = content_of(leaf, split)
    return split, common


def _target_dims(call: CallArguments, targets: Sequence[Any], n: int, batch_dim: BatchDim) -> list[int | None]:
    """As `study_loss` takes them for the whole batch, for this rank's samples."""
    given = call.target_dim
    if isinstance(given, Sequence):
        if len(given) != len(targets):
            raise InputError(f"target_dim has {len(given)} entries, but the target has {len(targets)} leaves")
        return [
            None if dim is None else _fitting(leaf, dim, n, i)
            for i, (leaf, dim) in enumerate(zip(targets, given, strict=True))
        ]
    tried = default_target_dims(batch_dim) if given is None else (given,)
    return [_first(leaf, tried, n) for leaf in targets]


def _first(leaf: Any, dims: Sequence[int], n: int) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    fits = (dim % leaf.dim() for dim in dims if -leaf.dim() <= dim < leaf.dim())
    return next((dim for dim in fits if leaf.shape[dim] == n), None)


def _fitting(leaf: Any, dim: int, n: int, place: int) -> int:
    fits = isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim()
    if not fits or leaf.shape[dim] != n:
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
        raise InputError(f"target_dim[{place}] is {dim}, but that target is {shape} and this rank has {n} samples")
    number: int = dim % leaf.dim()
    return number


def _with_room(leaf: torch.Tensor, dim: int, shares: Shares) -> torch.Tensor:
    """A tensor for the whole batch, with this rank's samples in their places. What no stage here reads is never
    written, so that the system gives it no memory (a GPU does: pass samples on the CPU)."""
    shape = list(leaf.shape)
    shape[dim] = shares.total
    whole = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
    whole.narrow(dim, shares.start, shares.own).copy_(leaf.detach())
    return whole.requires_grad_(leaf.requires_grad)
