"""The strategy of every operator of a sharded stage: the plan's placements, completed by the operator's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.rules.notation import Rule
from autopar.analysis.rules.table import bind, rule_name
from autopar.analysis.rules.views import FACTORIES
from autopar.errors import PlanError
from autopar.sharding.layouts import PARTIAL, REPLICATE, Placements, fits
from autopar.sharding.local import takes_sizes
from autopar.sharding.stage_sharding import StageSharding, strategy_text
from autopar.sharding.strategies import OperatorPlacements, Strategy, repeated, strategies, strategy_with

# Means over the targets that count; parts of a batch have different numbers of them.
_COUNTED = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
_ATTENTION = "scaled_dot_product_attention"  # operands: queries, keys, values and, if the call passes one, a mask
_MOST_NAMED = 12


@dataclass(frozen=True)
class StrategyChoice:
    """How the devices do one operator."""

    strategy: Strategy
    operands: tuple[int, ...]  # of the rule's operands those that are tensors of the graph
    cuts: tuple[bool, ...]  # by axis: devices along it do different work, rather than the same on other addends


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node makes, as export recorded them."""
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, torch.Tensor)]


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads, in the order of its arguments; a tensor that it reads twice appears twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, ordered_kwargs(node)), lambda n: found.append(n) if is_tensor(n) else None)
    return found


def ordered_kwargs(node: fx.Node) -> dict[str, Any]:
    """Keyword arguments in the order of the schema, which is the order of the rule's operands."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else list(node.kwargs)
    return {name: node.kwargs[name] for name in names if name in node.kwargs}


class StrategyChoices:
    """The strategies of the operators of one stage."""

    def __init__(
        self, sharding: StageSharding, keys: Mapping[str, str], whole: set[fx.Node], *, of_other_call: bool = False
    ) -> None:
        """`keys`: of operators, by name of the node. `whole`: nodes that every device does all of in any case.
        `of_other_call`: the placements are of another call, in which a key may name another operator."""
        self._sharding, self._keys, self._whole = sharding, keys, whole
        self._of_other_call = of_other_call
        self.undivided: list[str] = []  # keys of operators that cannot be cut as planned
        self._found: dict[fx.Node, StrategyChoice | None] = {}

    def of(self, node: fx.Node) -> StrategyChoice:
        """Raises PlanError for placements that no strategy of the operator has."""
        if node not in self._found:
            self._found[node] = self._named(node)
        found = self._found[node]
        if found is None or node in self._whole:
            count = len(operands_of(node))
            whole = repeated(count, max(1, len(tensors_of(node))), len(self._sharding.mesh))
            return StrategyChoice(whole, tuple(range(count)), (False,) * len(self._sharding.mesh))
        return found

    def leave(self, nodes: set[fx.Node]) -> None:
        """Let every device do all of these operators."""
        self._whole |= nodes

    def _named(self, node: fx.Node) -> StrategyChoice | None:
        key = self._keys.get(node.name)
        wanted = self._sharding.strategy_of.get(key) if key is not None else None
        results = tensors_of(node)
        known = results and all(n.meta.get("val") is not None for n in node.all_input_nodes)
        rule = bind(node) if known and wanted is not None else None
        if wanted is None or rule is None or len(rule.outputs) != len(results):
            return None
        places = tuple(i for i, operand in enumerate(rule.operands) if is_tensor(operand))
        if [rule.operands[i] for i in places] != operands_of(node):
            return None
        match = self._completed(rule, wanted)
        if match is None and rule_name(node) == _ATTENTION:
            match = self._with_another_mask(rule, wanted)
        if match is None and self._of_other_call:
            match = self._with_same_results(rule, wanted)
        if match is None:
            example = bind(node, _as_in_example)
            if example is not None and self._completed(example, wanted) is not None:
                return None  # only batches of some sizes can be cut like this
            tensors = [o.meta["val"] if is_tensor(o) else None for o in rule.operands]
            if self._of_other_call or not self._comes_apart(wanted, (tensors, results)):
                self.undivided.append(str(key))  # other operators, lengths or image sizes can be cut like this
                return None
            every = strategies(self._even(rule), self._sharding.mesh)
            few = "; ".join(map(strategy_text, every[:_MOST_NAMED])) + (" ..." if len(every) > _MOST_NAMED else "")
            text = strategy_text(wanted)
            raise PlanError(f"{key} has no strategy '{text}' on a mesh of shape {self._sharding.mesh}; it has {few}")
        if not _legal(node, rule, match, results):
            return None
        return StrategyChoice(match, places, tuple(axis in rule.kinds for axis in match.axes))

    def _comes_apart(self, layouts: Sequence[Sequence[Placements]], tensors: Sequence[Sequence[Any]]) -> bool:
        """Whether the sizes of all operands and results can be cut like this."""
        return all(
            tensor is None or self._fits(layout, tensor)
            for side, known in zip(layouts, tensors, strict=True)
            for layout, tensor in zip(side, known, strict=False)
        )

    def _fits(self, layout: Placements, tensor: torch.Tensor) -> bool:
        return fits(
            layout, [n if isinstance(n, int) else self._sharding.size for n in tensor.shape], self._sharding.mesh
        )

    def _completed(self, rule: Rule, wanted: OperatorPlacements) -> Strategy | None:
        return strategy_with(self._even(rule), wanted, self._sharding.mesh)

    def _with_another_mask(self, rule: Rule, wanted: OperatorPlacements) -> Strategy | None:
        """The strategy with the same placements of queries, keys, values and results. For calls that pass another mask
        than the call that the plan was made for, or none."""
        every = strategies(self._even(rule), self._sharding.mesh)
        same = (one for one in every if (one.inputs[:3], one.outputs) == (wanted.inputs[:3], wanted.outputs))
        return next(same, None)

    def _with_same_results(self, rule: Rule, wanted: OperatorPlacements) -> Strategy | None:
        """The strategy with the same placements of results, and the most of the same of operands."""
        every = [one for one in strategies(self._even(rule), self._sharding.mesh) if one.outputs == wanted.outputs]

        def alike(one: Strategy) -> int:
            return sum(a == b for a, b in zip(one.inputs, wanted.inputs, strict=False))

        return max(every, key=alike, default=None)

    def _even(self, rule: Rule) -> Rule:
        """Sizes that depend on the batch as if every mesh could cut them: `share` checks that when the stage runs."""
        return replace(rule, sizes={i: s if isinstance(s, int) else self._sharding.size for i, s in rule.sizes.items()})


def _as_in_example(node: fx.Node) -> Any:
    """The value of a node for the batch that was captured."""

    def fixed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [fixed(v) for v in value]
        if isinstance(value, torch.Tensor):
            return torch.empty([fixed(n) for n in value.shape], dtype=value.dtype, device="meta")
        return value.node.hint if isinstance(value, torch.types.py_sym_types) else value

    return fixed(node.meta.get("val"))


def _legal(node: fx.Node, rule: Rule, one: Strategy, results: Sequence[torch.Tensor]) -> bool:
    """Whether calls on local parts compute what the strategy promises."""
    sides = [
        *zip(one.inputs, [o.meta["val"] if is_tensor(o) else None for o in rule.operands], strict=True),
        *zip(one.outputs, results, strict=True),
    ]
    for layout, tensor in sides:
        if PARTIAL in layout and not (isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point):
            return False
    if one.special:
        return True
    if one.scale != 1 and rule_name(node) in _COUNTED:
        return False
    inside = {i for dims in rule.inputs for dim in dims for i in dim}
    new = any(axis in rule.kinds and axis not in inside for axis in one.axes)
    return not new or rule_name(node) in FACTORIES or takes_sizes(node.target)


def is_whole(layout: Sequence[int]) -> bool:
    return all(code == REPLICATE for code in layout)
