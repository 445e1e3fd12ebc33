"""The same strategies with less memory: gathered activations are kept as shards, and gathered again in the backward.

    norm --- x [shards] --- all-gather --- x [whole] --- queries, keys, values, whose weights' gradients need x

    keeps x             bytes of x             seconds of the gather
    keeps the shards    bytes of x / devices   twice these: before the readers' backward x is gathered once more

`lower.regather` runs it, and `before_gathers` says for both what is kept. As a whole mesh does so or does not, the
search for strategies need not know: it is a variant of what it has found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from autopar.planner.intra_op.redistributions import ChosenUse, Collective, TensorUse
from autopar.planner.intra_op.strategy_search import KeptShard, Sharding, ShardingProblem
from autopar.sharding.layouts import Placements, parts
from autopar.sharding.redistribution import before_gathers
from autopar.sharding.stage_sharding import Passage


def regathered(problem: ShardingProblem, found: Sharding) -> Sharding:
    """The solution `found` of a problem with the variant above; `found` itself where nothing is gathered and kept."""
    if not problem.task.training or found.keeping is not None:
        return found
    return _Regathering(problem, found).applied()


class _Gather(NamedTuple):
    """The gathers at the end of a use's steps."""

    use: TensorUse
    passed: tuple[Placements, ...]
    first: int  # the place in `passed` where they begin
    made: bool  # nothing comes before them

    @property
    def kept(self) -> KeptShard:
        return KeptShard(self.passed[self.first], self.made)


class _Regathering:
    def __init__(self, problem: ShardingProblem, found: Sharding) -> None:
        self._task, self._facts, self._found = problem.task, problem.facts, found
        self._uses: dict[tuple[str, str], list[ChosenUse]] = defaultdict(list)  # by (tensor that is read, reader)
        for chosen in found.uses:
            if not (chosen.use.constant or chosen.use.shared):
                self._uses[chosen.use.item, chosen.use.reader].append(chosen)

    def applied(self) -> Sharding:
        kept: dict[tuple[str, str, Placements], KeptShard] = {}
        readers: dict[TensorUse, list[str]] = defaultdict(list)
        gathers: dict[TensorUse, _Gather] = {}
        for name in self._found.strategies:
            for item, layout, gather in self._kept_by(self._facts.node(name)):
                kept[item, name, layout] = gather.kept
                gathers[gather.use] = gather
                if name not in readers[gather.use]:
                    readers[gather.use].append(name)
        if not gathers:
            return self._found
        again = [self._collective(gather, tuple(readers[use])) for use, gather in gathers.items()]
        seconds, saved = math.fsum(one.seconds for one in again), self._saved_bytes(kept)
        return replace(
            self._found,
            collectives=(*self._found.collectives, *again),
            seconds=self._found.seconds + seconds,
            each=self._found.each + seconds,
            nbytes=self._found.nbytes - saved,
            kept=kept,
            keeping=self._found,
        )

    def _kept_by(self, node: fx.Node) -> Iterator[tuple[str, Placements, _Gather]]:
        """(tensor, layout, gathers) of the gathered tensors that an operator keeps."""
        strategy = self._found.strategies[node.name]
        for operand, place in self._facts.kept_operands(node):
            if place is None:
                continue
            layout = strategy.inputs[place]
            for item in self._items(operand):
                gather = self._gather(item, node.name, layout)
                if gather is not None:
                    yield item, layout, gather

    def _items(self, operand: fx.Node) -> list[str]:
        """The tensors that the copies of a layer read as this operand: the first, and the others."""
        return list(dict.fromkeys([operand.name, self._task.again.get(operand.name, operand.name)]))

    def _gather(self, item: str, reader: str, layout: Placements) -> _Gather | None:
        """The gathers that make a tensor what `reader` reads in `layout`, also where it reads a view of their result;
        None where others made it so, or nothing did."""
        chosen = next((one for one in self._uses.get((item, reader), ()) if one.into[0] == layout), None)
        if chosen is None:
            return None
        via = chosen.use.via
        shared = Passage(chosen.passage.forward[:1]) if via is None else self._passages[via]
        for use, passed, before in ((chosen.use, chosen.passage.forward, shared.forward), (via, shared.forward, ())):
            first = before_gathers(passed)
            if use is not None and first < len(passed) - 1:
                return _Gather(use, passed, first, made=first == 0 and len(before) < 2)
            if len(passed) > 1:
                return None
        node = self._facts.node(item)
        source = self._facts.viewed(node)
        if source is None or item not in self._found.strategies:
            return None
        ruled = self._facts.with_rule(node)
        place = ruled.place(node.all_input_nodes.index(source))
        if place is None:
            return None
        read = self._found.strategies[item].inputs[place]
        found = (self._gather(one, item, read) for one in self._items(source))
        return next((one for one in found if one is not None), None)

    @cached_property
    def _passages(self) -> Mapping[TensorUse, Passage]:
        return {chosen.use: chosen.passage for chosen in self._found.uses}

    def _collective(self, gather: _Gather, readers: tuple[str, ...]) -> Collective:
        use, passed = gather.use, gather.passed
        steps = use.table.path(passed[0], passed[-1])[gather.first :]
        ends = use.tensor, use.item, use.reader
        return Collective(*ends, backward=True, once=False, times=use.times, steps=steps, regathered_for=readers)

    def _saved_bytes(self, kept: Mapping[tuple[str, str, Placements], KeptShard]) -> float:
        """Bytes on each device that are not kept, of all micro-batches in flight."""
        mesh, found = self._found.mesh.shape, 0.0
        for name, strategy in self._found.strategies.items():
            node, copies = self._facts.node(name), self._task.copies.get(name, 1)
            operands = {place: operand for operand, place in self._facts.kept_operands(node)}
            for place, nbytes in self._facts.saved(node):
                if place is None or place not in operands:
                    continue
                layout, items = strategy.inputs[place], self._items(operands[place])
                counts: Sequence[int] = (copies,) if len(items) == 1 else (1, copies - 1)
                for item, count in zip(items, counts, strict=True):
                    if (shard := kept.get((item, name, layout))) is not None:
                        found += count * nbytes * (1 / parts(layout, mesh) - 1 / parts(shard.layout, mesh))
        return found * self._task.in_flight
