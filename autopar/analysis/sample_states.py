r"""Where the samples of a batch are in a value, and how one operator changes that.

A batch of B samples is split into micro-batches, and each micro-batch passes through the graph alone. The state of a
value says how the value for the whole batch relates to the values for its micro-batches:

```
   Unbatched   the value is the same for every batch
   Split       one dimension has outer * B * inner entries; those of sample b are at (o * B + b) * inner + i
   Sum         the value is the sum of the micro-batches' values
   Mean        the value is the mean of the micro-batches' values, weighted by their numbers of samples
   Extent      the value is a number that depends on B alone
   Mixed       an operator combined different samples: none of the above holds
   Unproven    the graph alone does not show which of these holds
```

`follow` applies one operator by its rule (index notation, see `rules.notation`):

1. If operands are Split, find the index of the rule that contains the samples. It must be the same index in all Split
   operands, otherwise the operator combines different samples: Mixed.
2. The kind of that index gives the state of the results: kept -> Split, summed -> Sum, averaged -> Mean,
   whole -> Mixed.
3. Without Split operands, a Sum stays a Sum if the operator is linear in it, and a Mean stays a Mean if the operator is
   affine in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from autopar.analysis.rules.calls import quotient
from autopar.analysis.rules.indexing import PLACES
from autopar.analysis.rules.notation import Dims, IndexKind, Rule, Size
from autopar.analysis.rules.views import MOVES, RESHAPES
from autopar.capture.cleanup import cross_entropy_arguments

BATCH = sympy.Symbol("B", integer=True, positive=True)  # samples in the whole batch, or in a micro-batch


@dataclass(frozen=True)
class Unbatched:
    """The value is the same for every batch."""


@dataclass(frozen=True)
class Split:
    """Dimension `dim` has outer * B * inner entries; those of sample b are at (o * B + b) * inner + i."""

    dim: int
    outer: int = 1
    inner: int = 1
    positions: bool = False  # the entries are the samples' positions 0, 1, 2, ... in the batch, as from arange(B)


@dataclass(frozen=True)
class Sum:
    """The value is the sum of the micro-batches' values."""


@dataclass(frozen=True)
class Mean:
    """The value is the mean of the micro-batches' values, weighted by their numbers of samples."""

    counted: fx.Node | None = None  # a cross-entropy, which weighs by the number of targets that it does not ignore


@dataclass(frozen=True)
class Extent:
    """The value is a number that depends on the size of the batch alone."""

    size: Size


@dataclass(frozen=True)
class Mixed:
    """`node` combined different samples."""

    node: fx.Node
    why: str = "mixes samples: its output depends on which samples share a batch"
    lasting: bool = False  # no later operator takes the samples apart again, as one may that sorts them back


@dataclass(frozen=True)
class Unproven:
    """The graph alone does not show what `node` does to the samples."""

    node: fx.Node
    why: str


State = Unbatched | Split | Sum | Mean | Extent | Mixed | Unproven
DIVIDES = "divides by a number computed from the values of the whole batch"
_FOLDS = "folds the batch dimension in a way that the proof cannot follow"
# The shares of micro-batches in such a mean follow from values, and a model's graph has no place for them.
NUMBERS = "adds means over different numbers of values"
IGNORES = "averages over a number of targets that depends on their values"
SELECTS = "averages over a number of entries that depends on values"
_USES_COUNT = "computes with the number of samples"
DIVISIONS = ("div", "divide", "true_divide")
_PRODUCTS = ("mul", "multiply")
_PIECES = ("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unfold")


@dataclass(frozen=True)
class _BatchIndex:
    """The index of a rule that contains the samples: it has outer * B * inner entries."""

    index: str
    outer: int
    inner: int


def varies(size: Size) -> bool:
    """Whether a size depends on the size of the batch."""
    return isinstance(size, sympy.Basic) and BATCH in size.free_symbols


def multiple(size: Size) -> int | None:
    """c for a size c * B; None for any other size."""
    ratio = quotient(size, BATCH) if varies(size) else None
    return ratio if isinstance(ratio, int) else None


def follow(
    node: fx.Node, name: str, rule: Rule, states: Sequence[State], shapes: Sequence[tuple[Size, ...]]
) -> list[State]:
    """The states of the results of one operator call.

    Args:
        node: the call.
        name: of the operator, as in the table of rules.
        rule: for this call; its sizes are ints or expressions in BATCH.
        states: one per operand of the rule; none is Unproven.
        shapes: of the results, in the same sizes.
    """

    def everywhere(state: State) -> list[State]:
        return [state] * len(shapes)

    places = range(len(states))[PLACES.get(name, slice(0))]
    if name in DIVISIONS and isinstance(states[0], Sum) and isinstance(states[1], Sum) and not any(rule.inputs[1]):
        return everywhere(Mean(node))  # a ratio of sums: a mean in which the divisor gives the weights
    if name in DIVISIONS and isinstance(states[1], (Sum, Mean, Mixed)) and not isinstance(states[0], Mixed):
        return everywhere(Mixed(node, DIVIDES))
    for i, state in enumerate(states):
        if isinstance(state, Mixed):
            routed = Unproven(node, "chooses rows by a value computed from several samples")
            return everywhere(routed if i in places else state)
    if any(isinstance(state, Split) for state in states):
        results = _follow_samples(node, name, rule, states, places, len(shapes))
    else:
        results = everywhere(_follow_totals(node, name, rule, states))
    return [_checked(node, rule, i, state, shape) for i, (state, shape) in enumerate(zip(results, shapes, strict=True))]


def _checked(node: fx.Node, rule: Rule, output: int, state: State, shape: tuple[Size, ...]) -> State:
    """`state`, unless the result's sizes contradict it: B must occur in the Split dimension and in no other."""
    along = [d for d, size in enumerate(shape) if varies(size)]
    if isinstance(state, (Mixed, Unproven)):
        return state
    if isinstance(state, Split):
        if shape[state.dim] != state.outer * BATCH * state.inner:
            return Unproven(node, _FOLDS)
        return state if along == [state.dim] else Mixed(node)
    if not along:
        return state
    new = [(d, place) for d in along if (place := _fresh(rule, rule.outputs[output][d])) is not None]
    if len(along) > 1 or not new or not isinstance(state, Unbatched):
        return Mixed(node)
    return Split(along[0], new[0][1].outer, new[0][1].inner)


def _fresh(rule: Rule, dim: tuple[str, ...]) -> _BatchIndex | None:
    """The batch index that only the result has (`expand`, `zeros`): all samples get equal entries. None without one."""
    for place, index in enumerate(dim):
        count = multiple(rule.sizes[index])
        if (
            count is not None
            and rule.kinds[index] is IndexKind.KEPT
            and not any(index in d for t in rule.inputs for d in t)
        ):
            outer, inner = (_product(rule, part) for part in (dim[:place], dim[place + 1 :]))
            return None if outer is None or inner is None else _BatchIndex(index, outer, inner * count)
    return None


def _product(rule: Rule, indices: Sequence[str]) -> int | None:
    """Number of entries of several indices folded together; None if it depends on the batch."""
    result = 1
    for index in indices:
        if not isinstance(rule.sizes[index], int):
            return None
        result *= rule.sizes[index]
    return result


def _locate(rule: Rule, dims: Dims, state: Split) -> _BatchIndex | None:
    """The index that contains the samples, among those that the Split dimension is folded from; None if several do."""
    dim = dims[state.dim]
    for place, index in enumerate(dim):
        outer, inner = (_product(rule, part) for part in (dim[:place], dim[place + 1 :]))
        if not varies(rule.sizes[index]) or outer is None or inner is None:
            continue
        if state.outer % outer or state.inner % inner:
            return None
        located = _BatchIndex(index, state.outer // outer, state.inner // inner)
        return located if rule.sizes[index] == located.outer * BATCH * located.inner else None
    return None


def _follow_samples(
    node: fx.Node, name: str, rule: Rule, states: Sequence[State], places: range, n_outputs: int
) -> list[State]:
    """The states of the results where at least one operand is Split (steps 1 and 2 above)."""
    own = states[0]
    if name in PLACES and isinstance(own, Split):
        owned = _own_rows(rule, states, places, own)
        if isinstance(owned, str):
            return [Unproven(node, owned) if owned else Mixed(node)] * n_outputs
        rule, states = owned
    located: dict[int, _BatchIndex] = {}  # by operand
    for i, state in enumerate(states):
        if isinstance(state, Split):
            place = _locate(rule, rule.inputs[i], state)
            if place is None:
                return [Unproven(node, _FOLDS)] * n_outputs
            located[i] = place
        elif isinstance(state, Extent):
            return [Unproven(node, _USES_COUNT)] * n_outputs
        elif not isinstance(state, Unbatched):
            return [Mixed(node)] * n_outputs
    (place, *others), positions = located.values(), any(isinstance(s, Split) and s.positions for s in states)
    if any(other.index != place.index for other in others) or (positions and name not in MOVES and name not in _COPIES):
        return [Mixed(node)] * n_outputs
    if any(other != place for other in others):
        return [Unproven(node, "folds the batch dimension of its operands in different orders")] * n_outputs
    kind = rule.kinds[place.index]
    if name == "batch_norm" and place.index in rule.inputs[0][0]:
        kind = IndexKind.KEPT  # the caller decides how training statistics are computed
    if kind is IndexKind.KEPT:
        return [_spread(rule, dims, place, positions) or Mixed(node) for dims in rule.outputs]
    counts = name in _COUNTING and len(rule.inputs[1]) < len(rule.inputs[0])
    averages = not any(rule.outputs[0]) and any(place.index in dim for dims in rule.inputs[1:2] for dim in dims)
    if counts and averages and kind is IndexKind.WHOLE:
        return [Mean(node)] * n_outputs  # each target has the weight of its class
    if kind is IndexKind.AVERAGED:
        return [Mean(node if counts else None)] * n_outputs
    if kind is IndexKind.SUMMED:
        once = any(i not in located for i in rule.addends)  # every micro-batch would add this term again
        return [Mixed(node) if once else Sum()] * n_outputs
    if name in RESHAPES:
        return [Unproven(node, _FOLDS)] * n_outputs
    if name in _PIECES and place.outer * place.inner > 1:
        return [Unproven(node, "takes a part of a folded batch dimension")] * n_outputs
    return [Mixed(node)] * n_outputs


_COPIES = ("clone", "contiguous", "detach", "alias", "to", "lift_fresh_copy")
_COUNTING = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")


def _spread(rule: Rule, dims: Dims, place: _BatchIndex, positions: bool) -> Split | None:
    """The Split state of a result that has the batch index; None if it has not."""
    for d, dim in enumerate(dims):
        if place.index in dim:
            at = dim.index(place.index)
            outer, inner = _product(rule, dim[:at]), _product(rule, dim[at + 1 :])
            if outer is not None and inner is not None:
                return Split(d, outer * place.outer, inner * place.inner, positions)
    return None


def _own_rows(rule: Rule, states: Sequence[State], places: range, own: Split) -> tuple[Rule, list[State]] | str:
    """The rule and states for x[arange(B), j], where every sample takes from its own rows.

    The rule of indexing needs all of an indexed dimension (`[k]`). But if the indices of the batch dimension are the
    samples' own positions, that dimension is kept, and the index tensor is used up:

        x[k0, k1], i -> i     becomes     x[b, k1], b -> b

    Returns this rule and its states, or the given ones if the batch dimension is not indexed. If samples take rows of
    other samples, returns the reason; "" if the operator combines them.
    """
    place = _locate(rule, rule.inputs[0], own)
    plain = [replace(s, positions=False) if isinstance(s, Split) and i in places else s for i, s in enumerate(states)]
    if place is None or rule.kinds[place.index] is not IndexKind.WHOLE:
        positions = any(isinstance(states[i], Split) and states[i].positions for i in places)  # type: ignore[union-attr]
        return "" if positions else (rule, plain)
    indexed = [d for d, dim in enumerate(rule.inputs[0]) if dim and rule.kinds[dim[0]] is IndexKind.WHOLE]
    number = indexed.index(own.dim) if own.dim in indexed and len(indexed) == len(places) else None
    if number is None:
        return "takes rows of other samples"
    index = states[places[number]]
    if isinstance(index, Unbatched):
        return ""
    if not (isinstance(index, Split) and index.positions) or (place.outer, place.inner) != (1, 1):
        return "takes rows by computed indices"
    batch = rule.inputs[places[number]][index.dim][0]

    def renamed(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(batch if i == place.index else i for i in dim) for dim in dims) for dims in tensors)

    kinds = {**rule.kinds, batch: IndexKind.KEPT}
    return replace(rule, inputs=renamed(rule.inputs), outputs=renamed(rule.outputs), kinds=kinds), plain


def _follow_totals(node: fx.Node, name: str, rule: Rule, states: Sequence[State]) -> State:
    """The state of the results where no operand is Split (step 3 above)."""
    sums = {i for i, s in enumerate(states) if isinstance(s, Sum)}
    means = {i for i, s in enumerate(states) if isinstance(s, Mean)}
    extents = [i for i, s in enumerate(states) if isinstance(s, Extent)]
    if extents:
        if len(states) == 2 and extents == [1] and (sums or means) and name in (*DIVISIONS, *_PRODUCTS) and rule.linear:
            return _scaled(node, states[0], states[1].size, name in DIVISIONS)  # type: ignore[union-attr]
        return Mixed(node) if sums or means else Unproven(node, _USES_COUNT)
    if not sums and not means:
        return Unbatched()
    if sums and not means and any(sums == group for group in rule.linear):
        return Sum()
    if means and not sums and any(means <= group for group in rule.linear):
        counted = {_averaged(s.counted): s.counted for s in states if isinstance(s, Mean)}
        return Mean(*counted.values()) if len(counted) == 1 else Mixed(node, NUMBERS)
    return Mixed(node)


def _averaged(counted: fx.Node | None) -> object:
    """What `Mean.counted` averages over: equal for cross-entropies of the same targets, as of several heads."""
    arguments = None if counted is None else cross_entropy_arguments(counted)
    if arguments is None or arguments.weight is not None:
        return counted
    return arguments.target, arguments.ignore_index


def _scaled(node: fx.Node, state: State, size: Size, divides: bool) -> State:
    """A Sum divided by a multiple of B is a Mean, and a Mean multiplied by a multiple of B is a Sum."""
    factor = 1 / sympy.sympify(size) if divides else sympy.sympify(size)
    if isinstance(state, Sum) and not varies(sympy.cancel(factor * BATCH)):
        return Mean()
    if isinstance(state, Mean) and state.counted is None and not varies(sympy.cancel(factor / BATCH)):
        return Sum()
    return Mixed(node)


def pieces(state: object, dim: int, lengths: Sequence[Size], start: Size = 0) -> list[State] | None:
    """The states of consecutive pieces along dimension `dim`, from entry `start` on, with these lengths.

    None unless `dim` is the dimension of a Split and every piece contains all samples equally often.
    """
    if not isinstance(state, Split) or state.dim != dim or state.positions:
        return None
    unit = BATCH * state.inner
    counts = [quotient(length, unit) if varies(length) else None for length in lengths]
    if not all(isinstance(count, int) for count in counts) or (
        start != 0 and not isinstance(quotient(start, unit), int)
    ):
        return None
    return [replace(state, outer=count) for count in counts if isinstance(count, int)]


def strided(state: object, dim: int, length: Size, start: Size, step: int) -> State | None:
    """The state of every `step`-th entry along dimension `dim`, from entry `start` on, `length` entries in all.

    None unless `dim` is the dimension of a Split, and the slice takes the same entries of every sample.
    """
    if not isinstance(state, Split) or state.dim != dim or state.positions or state.inner % step:
        return None
    every = length * step == state.outer * BATCH * state.inner and isinstance(start, int) and 0 <= start < step
    return replace(state, inner=state.inner // step) if every else None


def concatenated(states: Sequence[object], dim: int) -> State | None:
    """The state of a concatenation along `dim`; None unless `dim` is the dimension of a Split in all operands."""
    splits = [s for s in states if isinstance(s, Split) and s.dim == dim and not s.positions]
    if not splits or len(splits) < len(states) or len({s.inner for s in splits}) > 1:
        return None
    return replace(splits[0], outer=sum(s.outer for s in splits))
