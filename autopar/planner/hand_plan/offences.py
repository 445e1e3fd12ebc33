"""What the degrees of a hand plan do not allow, counted; see `mesh_strategies`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from autopar.analysis.rules.notation import IndexKind, Rule
from autopar.plan.degrees import Degrees
from autopar.planner.hand_plan.cut_sizes import CutSizes, is_product
from autopar.planner.intra_op.redistributions import OUTPUT, TensorUse
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.planner.intra_op.zero_storage import zero_offences
from autopar.sharding.layouts import PARTIAL, Placements
from autopar.sharding.stage_sharding import Stored
from autopar.sharding.strategies import REPEATED, Strategy

# Of a matrix or an attention that is not cut, and of a normalization over parts of its rows: more than what gathering
# and scattering around them count.
_SEVERE = 16
_MOST_NAMED = 4


@dataclass(frozen=True)
class _Operator:
    """What the offences of an operator's strategies depend on."""

    node: fx.Node
    rule: Rule | None
    read: tuple[tuple[int, int], ...]  # place of an operand that has samples, and the dimension that counts them
    made: int | None  # the dimension of the results that counts samples
    matrices: tuple[int, ...]  # places of operands that are matrices, of products and of tables
    heads: Mapping[str, int] | None  # of the products of attention, see `CutSizes.heads`

    def sampled(self, one: Strategy) -> Iterator[tuple[int, Placements]]:
        """Of every operand and result with samples, the dimension that counts them and the placements."""
        yield from ((dim, one.inputs[place]) for place, dim in self.read)
        if self.made is not None:
            yield from ((self.made, cut) for cut in one.outputs)


@dataclass(frozen=True)
class Offences:
    """Of the strategies of one problem's operators, the layouts of its parameters, and moves between them.

    Severe are a matrix or an attention that is not cut and a normalization over parts of its rows. A tensor that moves
    between operators counts one for each direction; so does an operator that replicas cut otherwise than by samples.
    """

    problem: ShardingProblem
    degrees: Degrees
    batch_dims: Mapping[str, int | None]  # by node
    keys: Mapping[str, str]  # node -> operator key

    @cached_property
    def sizes(self) -> CutSizes:
        """What the tensor axis may cut."""
        return CutSizes(self.problem.task, self.problem.facts, self.batch_dims, self.keys)

    @cached_property
    def data(self) -> int | None:
        """The axis of the replicas."""
        return 0 if self.degrees.data > 1 else None

    @cached_property
    def tensor(self) -> int | None:
        """The axis that cuts tensors."""
        return len(self.degrees.mesh) - 1 if self.degrees.tensor > 1 else None

    def of_strategy(self, name: str, one: Strategy) -> int:
        """Of an operator's strategy."""
        seen = self._seen(name)
        offences = 0
        if self.data is not None:
            sampled = [(dim, cut[self.data]) for dim, cut in seen.sampled(one)]
            offences += any(code != dim for dim, code in sampled)
            offences += not sampled and one.axes[self.data] != REPEATED
        if self.tensor is not None:
            offences += any(cut[self.tensor] == dim for dim, cut in seen.sampled(one))
            offences += _SEVERE * self._is_severe(seen, one)
        return offences

    def _is_severe(self, seen: _Operator, one: Strategy) -> bool:
        """Whether a matrix or an attention is not cut, or a normalization works on parts of its rows."""
        assert self.tensor is not None
        if seen.matrices or seen.rule is None:
            return any(one.inputs[place][self.tensor] < 0 for place in seen.matrices)
        if seen.heads is not None:
            return bool(seen.heads) and one.axes[self.tensor] not in seen.heads
        return _adds_up(seen.node, seen.rule, one.axes[self.tensor])

    def _seen(self, name: str) -> _Operator:
        """An operator, for all its strategies."""
        if name not in self._operators:
            ruled = self.problem.facts.with_rule(self.problem.facts.node(name))
            read = [(place, one) for place, one in enumerate(ruled.operands) if isinstance(one, fx.Node)]
            dims = [(place, self.batch_dims.get(one.name)) for place, one in read]
            matrices = tuple(
                place for place, one in read if self.sizes.is_matrix(one) and _is_reduced(ruled.rule, place)
            )
            is_attention = ruled.rule is not None and not matrices and is_product(ruled.node)
            self._operators[name] = _Operator(
                ruled.node,
                ruled.rule,
                tuple((place, dim) for place, dim in dims if dim is not None),
                self.batch_dims.get(name),
                matrices,
                self.sizes.heads(name, ruled.rule) if is_attention and ruled.rule is not None else None,
            )
        return self._operators[name]

    @cached_property
    def _operators(self) -> dict[str, _Operator]:
        return {}

    def of_storage(self, name: str, options: tuple[Stored, ...]) -> np.ndarray:
        """[options] of how a parameter lies: along the replicas as near to ZeRO's stage as its sizes allow.

        ZeRO cuts no buffers: they have no gradient and no state.
        """
        axes = () if self.data is None else (self.data,)
        return zero_offences(options, axes, self.degrees.zero if name in self._trained else 0)

    @cached_property
    def _trained(self) -> set[str]:
        named = self.problem.task.module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter.requires_grad}

    def of_moves(self, use: TensorUse) -> np.ndarray:
        """[layouts made, layouts read] of moving a tensor, and its gradient, along the tensor axis.

        Equal uses share one array.
        """
        key = (use.outs, use.ins, use.origin, use.gradient, use.reader == OUTPUT)
        if key not in self._moves:
            self._moves[key] = self._of_moves(use)
        return self._moves[key]

    @cached_property
    def _moves(self) -> dict[tuple[object, ...], np.ndarray]:
        return {}

    def _of_moves(self, use: TensorUse) -> np.ndarray:
        offences = np.zeros((len(use.outs), len(use.ins)))
        if self.tensor is None or use.origin == "input" or use.reader == OUTPUT:
            return offences
        if use.origin == "activation" and self.degrees.sequence_parallel:
            return offences
        for i, out in enumerate(use.outs):
            for j, (layout, gradient) in enumerate(use.ins):
                if use.origin == "parameter":
                    offences[i, j] = out.layout[self.tensor] != layout[self.tensor] and layout[self.tensor] != PARTIAL
                else:
                    made, wanted = out
                    offences[i, j] = not self._only_adds(made, layout)
                    offences[i, j] += use.gradient and not self._only_adds(gradient, wanted)
        return offences

    def _only_adds(self, before: Placements, after: Placements) -> bool:
        assert self.tensor is not None
        a, b = before[self.tensor], after[self.tensor]
        return a == b or (a < 0 and b < 0)

    # -- what cannot be followed ----------------------------------------------------------------------------------

    def notes(self, found: Sharding) -> Iterator[str]:
        """What the model does not let the degrees cut."""
        if self.tensor is None:
            return
        n = self.degrees.tensor
        severe = [name for name, one in found.strategies.items() if self.of_strategy(name, one) >= _SEVERE]
        if severe:
            text = f"every one of tensor={n} devices does all of {self._few(severe)}, or adds up over parts in it"
            yield f"{text}: the model leaves no other choice"
        moved = []
        for chosen in found.uses:
            use = chosen.use
            i, j = use.outs.index(chosen.out), use.ins.index(chosen.into)
            if use.origin == "activation" and use.gradient and self.of_moves(use)[i, j] and use.tensor not in moved:
                moved.append(use.tensor)
        if moved:
            yield f"tensor={n} devices exchange what {self._few(moved)} returns: its readers cannot go on with parts"

    def _few(self, names: list[str]) -> str:
        every = list(dict.fromkeys(self.keys.get(name, name) for name in names))
        more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
        return ", ".join(every[:_MOST_NAMED]) + more


def _adds_up(node: fx.Node, rule: Rule, index: str) -> bool:
    """Whether an operator that is cut along `index` adds up over it, as a normalization over parts of its rows does.

    Losses do so, too, over parts of the classes.
    """
    if index not in rule.kinds:
        return False
    if index in rule.together:
        return "norm" in str(node.target)
    return rule.kinds[index] in (IndexKind.SUMMED, IndexKind.AVERAGED)


def _is_reduced(rule: Rule | None, place: int) -> bool:
    """Whether a result lacks an index of an operand, as products and tables do: not sums with learned positions, which
    all tensor devices have whole (megatron/model/language_model.py, Embedding, 2021 to 2023)."""
    if rule is None:
        return True
    made = {index for dims in rule.outputs for dim in dims for index in dim}
    return any(index not in made for dim in rule.inputs[place] for index in dim)
