"""The gradients of a rank's parameters, reduced over the ranks that share them, bucket by bucket.

```
   stage 1   B0 ... B3 |          its last backward here: its buckets start, while other stages go on
   stage 0      B0 ... B3 |
                       [reduce_scatter over the row] ........ [all_reduce over the column]     ZeRO 1
                       [all_reduce over the column] .......                                    stored as it is read
   ZeRO 2: B0 ... [reduce_scatter of its last bucket] B1 ...  [all_reduce over the column]
```
Every rank of a group starts the same collectives in the same order: buckets start in their fixed order, each once it
and those before it are complete, and what follows (over columns, after rows) starts after all of them. A rank without a
gradient takes part with zeros. The last numbers of every bucket count the ranks that have one: a parameter for which no
rank has a gradient gets none, as in one process. On GPUs the hosts add up these counts beside the bucket, so that none
waits for its GPU to know them; so they do for a large parameter, whose gradient is then scattered without being copied.
Parameters that all ranks have frozen take no part.

Under ZeRO 2 a bucket of a micro-batch starts within the backward, once autograd has all of its gradients and those of
the buckets before it, and one travels at a time. So a device need not hold all gradients of a stage. The ranks of a row
are devices of one mesh, which run the same backward in the same order, so that they may wait for each other there.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from autopar.lower import process_groups
from autopar.runtime.ranks.gradients.buckets import Bucket, Entry, joined
from autopar.runtime.stages.device_tensors import ParameterLeaf

_CPU = torch.device("cpu")


class GradientSums:
    """Of the stages that one executable has on this rank."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        leaves: Iterable[tuple[int, ParameterLeaf]],
        device: torch.device = _CPU,
        carrier: torch.device = _CPU,
    ) -> None:
        """`leaves`: (stage, leaf of one of its parameters) of this rank, in a fixed order. `device`: of the gradients.
        `carrier`: where they must be to travel."""
        self._buckets = tuple(buckets)
        self._device, self._carrier = device, carrier
        # By bucket: whether the counts are part of it. A large parameter's gradient is scattered without being copied.
        self._counts_inside = [
            carrier.type == "cpu" and not (bucket.large and bucket.row is not None) for bucket in self._buckets
        ]
        self._leaves: defaultdict[int, list[tuple[int, ParameterLeaf]]] = defaultdict(list)  # by parameter
        for stage, leaf in leaves:
            self._leaves[leaf.key].append((stage, leaf))
        self._readers = [
            frozenset(stage for entry in bucket.entries for stage, _ in self._leaves.get(entry.key, ()))
            for bucket in self._buckets
        ]
        self._entries = [bucket.entries for bucket in self._buckets]  # that take part, of every bucket
        self._left_out: frozenset[int] = frozenset()  # by parameter, all others of the buckets
        self.frozen: frozenset[int] = frozenset()  # by parameter
        self.waited = False  # the execution adds up gradients of accumulate(), of frozen parameters, too
        self._in_buckets = {entry.key for bucket in self._buckets for entry in bucket.entries}
        # Inside accumulate(), gradients of these stay as they are: ranks add them up, and store all of what they read.
        self.apart = False
        self.apart_keys = frozenset(e.key for bucket in self._buckets if bucket.row is None for e in bucket.entries)
        self.waiting: dict[int, torch.Tensor] = {}  # by parameter, what accumulate() has left apart so far
        self._left: Counter[int] = Counter()  # by stage: backward actions to come
        # Whether collectives start after all actions (`begin`).
        self._start_at_end = False
        self._next = 0  # bucket to start
        self._started: dict[int, torch.Tensor] = {}  # by bucket: what its first collective gives
        self._has: dict[int, list[float]] = {}  # by bucket, 1 for every parameter that has a gradient here
        self._counts: dict[int, torch.Tensor] = {}  # by bucket: the same, of the ranks of its first collective
        # By bucket, of micro-batches: (sum so far, what travels).
        self._scattered: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._travelling: int | None = None  # the last bucket that was scattered, if it may still travel
        # By stage that reads some: the scattered buckets in order, and how many of them this backward has started.
        self._order: defaultdict[int, list[int]] = defaultdict(list)
        self._n_started: Counter[int] = Counter()
        # By (bucket, stage): the parameters whose gradients this backward has added up.
        self._arrived: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._hooks = [
            leaf.tensor.register_post_accumulate_grad_hook(_arrival(self, number, stage, entry.key))
            for number, bucket in enumerate(self._buckets)
            if bucket.scattered
            for entry in bucket.entries
            for stage, leaf in self._leaves.get(entry.key, ())
        ]
        for number, bucket in enumerate(self._buckets):
            for stage in self._readers[number] if bucket.scattered else ():
                self._order[stage].append(number)

    def close(self) -> None:
        """Remove the hooks: other sums are about to follow the same leaves."""
        for hook in self._hooks:
            hook.remove()

    def is_shared(self, key: int) -> bool:
        """Whether other ranks read a parameter, too."""
        return key in self._in_buckets

    def leave_out(self, frozen: frozenset[int], *, waiting: bool) -> None:
        """In the next execution, leave out parameters that are frozen or that the execution does not read. All ranks
        that hold a parameter must leave out the same ones.

        `waiting`: gradients of `accumulate()` are to be added up, of parameters that may be frozen by now.
        """
        if (frozen, waiting) == (self.frozen, self.waited):
            return
        self.frozen, self.waited = frozen, waiting
        left_out = frozenset(
            entry.key
            for bucket in self._buckets
            for entry in bucket.entries
            if entry.key in frozen and not (waiting and bucket.row is None)
        )
        self._left_out = left_out
        self._entries = [tuple(e for e in bucket.entries if e.key not in left_out) for bucket in self._buckets]

    def begin(self, backwards: Iterable[int]) -> None:
        """An execution starts. `backwards`: the stage of every backward action that this rank will do."""
        self._drop()
        self._left = Counter(backwards)
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL a collective starts only once all its ranks have come to it, and NCCL's
        # may hold up all that the GPU gets later (exchanges.py). A rank that waited there in the middle of its actions
        # could be the one from which another rank needs a message.
        checked = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._start_at_end = checked or (self._carrier.type == "cuda" and len(self._left) > 1)

    def is_last(self, stage: int) -> bool:
        """Whether the backward action of a stage that is about to end is its last one here."""
        return self._left[stage] == 1

    def after_backward(self, stage: int) -> None:
        """A backward action of a stage has ended: start what is complete."""
        self._left[stage] -= 1
        self._scatter_next(stage, complete=True)
        del self._n_started[stage]
        self._arrived.clear()
        if not self._start_at_end:
            self._start(complete=False)

    def end_actions(self) -> None:
        """All actions have ended: start what is left. Ranks without a backward action start all of it here, before any
        collective of another group, so that all ranks start the collectives of different groups in one order."""
        self._start(complete=True)

    def finish(self) -> dict[int, torch.Tensor]:
        """The sums by id of the parameter, each of the part that this rank stores. Collective."""
        self._start(complete=True)
        flat = {number: process_groups.finished(pending) for number, pending in self._started.items()}
        counts = {number: process_groups.finished_numbers(pending) for number, pending in self._counts.items()}
        self._started.clear()
        self._counts.clear()
        over_columns: dict[int, torch.Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            if number in flat and bucket.column is not None and bucket.row is not None:
                if not bucket.scattered:
                    over_columns[number] = process_groups.started_all_reduce(flat[number], bucket.column.name)
                if number in counts:
                    self._counts[number] = process_groups.started_sum(counts[number], bucket.column.name)
        found: dict[int, torch.Tensor] = {}
        for number, bucket in enumerate(self._buckets):
            if number in over_columns:
                process_groups.finished(over_columns[number])
            if number in self._counts:
                counts[number] = process_groups.finished_numbers(self._counts.pop(number))
            if number in flat:
                whole = flat.pop(number).to(self._device)
                _cut(bucket, self._entries[number], whole, counts.get(number), found)
        for key, leaves in self._leaves.items():
            alone = key not in self._in_buckets or (self.apart and key in self.apart_keys)
            if key in self._left_out:
                _taken(leaves)  # as above
            elif alone and (gradient := _taken(leaves)) is not None:
                found[key] = gradient
        return found

    def _start(self, *, complete: bool) -> None:
        """Start the first collective of the buckets that are next in order. `complete`: all backwards have ended."""
        while self._next < len(self._buckets):
            number, bucket = self._next, self._buckets[self._next]
            # If only other ranks read a bucket, this rank sends zeros, after its last backward: other ranks may wait
            # for messages of earlier actions.
            readers = self._readers[number] or frozenset(self._left)
            if not complete and any(self._left[stage] > 0 for stage in readers):
                return
            self._next += 1
            entries = self._entries[number]
            if not entries or (self.apart and bucket.row is None):
                continue
            if bucket.scattered:
                flat = self._sum(number)
                if flat is None:  # no stage of this rank reads it in this execution
                    numel = sum(entry.shape.numel() // bucket.n for entry in entries)
                    numel += len(entries) if self._counts_inside[number] else 0
                    flat = torch.zeros(numel, dtype=bucket.dtype, device=self._carrier)
            else:
                flat = self._flat(number, None)
            if bucket.row is not None and not bucket.scattered:
                flat = process_groups.started_reduce_scatter(flat, bucket.row.size, bucket.row.name)
            elif bucket.column is not None:
                flat = process_groups.started_all_reduce(flat, bucket.column.name)
            self._started[number] = flat
            if not self._counts_inside[number]:
                first = bucket.row or bucket.column
                assert first is not None, "a bucket is of several ranks"
                has = self._has.pop(number, [0.0] * len(entries))
                self._counts[number] = process_groups.started_sum(has, first.name)

    def _flat(self, number: int, stage: int | None) -> torch.Tensor:
        """This rank's gradients of a bucket, which leaves then no longer have: one block for each rank of its row.

        `stage`: of its leaves alone.
        """
        bucket, entries = self._buckets[number], self._entries[number]
        gradients = []
        for entry in entries:
            leaves = self._leaves.get(entry.key, ())
            own = _taken([(s, leaf) for s, leaf in leaves if stage is None or s == stage])
            if entry.key in self.frozen:
                own = None  # frozen since the forward: the graph had it, and nobody gets it
            before = self.waiting.pop(entry.key, None)
            gradients.append(own if before is None else before if own is None else before + own)
        has = [float(g is not None) for g in gradients]
        inside = []
        if self._counts_inside[number]:
            inside.append(torch.tensor(has, dtype=bucket.dtype))
        else:
            before_here = self._has.get(number, has)  # of the micro-batches before, where each is scattered
            self._has[number] = [max(pair) for pair in zip(before_here, has, strict=True)]
        whole = [
            torch.zeros(entry.shape, dtype=bucket.dtype, device=self._carrier) if g is None else g.to(self._carrier)
            for entry, g in zip(entries, gradients, strict=True)
        ]
        del gradients
        if bucket.row is None:  # the sum is written in place, and others may hold the memory of a gradient
            return torch.cat([tensor.reshape(-1) for tensor in (*whole, *inside)])
        parts = []
        for place in range(bucket.row.size):
            parts += [entry.part(g, place) for entry, g in zip(entries, whole, strict=True)]
            parts += inside
        return joined(parts)

    def arrived(self, number: int, stage: int, key: int) -> None:
        """A stage's backward has added up the gradient of a parameter in a scattered bucket."""
        assert key not in self._arrived[number, stage], "one backward accumulates every gradient once"
        self._arrived[number, stage].add(key)
        self._scatter_next(stage, complete=False)

    def _scatter_next(self, stage: int, *, complete: bool) -> None:
        """Start to scatter the buckets of a stage that are next in order. `complete`: its backward has ended."""
        order = self._order[stage]
        while self._n_started[stage] < len(order):
            number = order[self._n_started[stage]]
            if not complete and any(e.key not in self._arrived[number, stage] for e in self._entries[number]):
                return
            self._n_started[stage] += 1
            self._scatter(number, stage)

    def _scatter(self, number: int, stage: int) -> None:
        """Start to scatter the gradients of one micro-batch, once those that were scattered before have arrived."""
        bucket = self._buckets[number]
        if not self._entries[number]:
            return
        assert bucket.row is not None
        if self._travelling is not None:
            self._scattered[self._travelling] = self._sum(self._travelling), None
        before = self._sum(number)
        flat = self._flat(number, stage)
        self._scattered[number] = before, process_groups.started_reduce_scatter(flat, bucket.row.size, bucket.row.name)
        self._travelling = number

    def _sum(self, number: int) -> torch.Tensor | None:
        """Of the micro-batches whose gradients were scattered so far; None if there was none."""
        before, travelling = self._scattered.pop(number, (None, None))
        if travelling is None:
            return before
        arrived = process_groups.finished(travelling)
        return arrived if before is None else before.add_(arrived)

    def _drop(self) -> None:
        """Drop gradients that no rank has taken: the call before ended with an error on all ranks."""
        scattered = (travelling for _, travelling in self._scattered.values() if travelling is not None)
        for pending in [*self._started.values(), *self._counts.values(), *scattered]:
            process_groups.finished(pending)
        self._started.clear()
        self._counts.clear()
        self._has.clear()
        self._scattered.clear()
        self._travelling = None
        self._n_started.clear()
        self._arrived.clear()
        self._next = 0


def _arrival(sums: GradientSums, number: int, stage: int, key: int) -> Callable[[torch.Tensor], None]:
    """A hook of a leaf in bucket `number`. It does not keep `sums` alive, because the leaves may outlive them."""
    found = weakref.ref(sums)

    def hook(_: torch.Tensor) -> None:
        if (one := found()) is not None:
            one.arrived(number, stage, key)

    return hook


def _taken(leaves: Iterable[tuple[int, ParameterLeaf]]) -> torch.Tensor | None:
    """The sum of the leaves' gradients, which they then no longer have."""
    total = None
    for _, leaf in leaves:
        gradient = leaf.take_gradient()
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _cut(
    bucket: Bucket,
    entries: Sequence[Entry],
    flat: torch.Tensor,
    counts: Sequence[float] | None,
    found: dict[int, torch.Tensor],
) -> None:
    """The gradients in the flat sum of a bucket's `entries`, of parameters that have one on some rank.

    `counts`: for every entry, of how many ranks; None: they follow the gradients.
    """
    sizes = [entry.shape.numel() // bucket.n for entry in entries]
    sums = flat.split(sizes if counts is not None else [*sizes, len(sizes)])
    numbers = sums[len(sizes)].tolist() if counts is None else counts
    for entry, total, count in zip(entries, sums, numbers, strict=False):
        if count:
            found[entry.key] = total.view([stop - start for start, stop in entry.holding.own])
