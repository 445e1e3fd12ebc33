r"""Where the samples of a batch are in what an operator returns, from where they are in what it reads.

A batch of B samples is split into micro-batches, and every micro-batch runs through the graph alone. What a value of
the whole batch then is to those of the micro-batches is its state:

```
   Same       it does not depend on the samples, nor on how many there are
   Split      a dimension has outer * B * inner entries; sample b's are those at (o * B + b) * inner + i
   Sum        it is the sum of the micro-batches' values
   Mean       it is their mean, weighted by samples
   Extent     a number that is a function of B alone
   Mixed      samples met: nothing of the above
   Open       nobody can tell from the graph alone
```

`follow` does one operator by its rule. Let b be the index of the rule in which the samples are, the same in all
operands that are Split, or samples meet. Then b kept gives Split, summed Sum, averaged Mean, whole Mixed. Without
Split operands a Sum survives what is linear in it, and a Mean what is affine.
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

BATCH = sympy.Symbol("B", integer=True, positive=True)  # samples in the whole batch, or in a micro-batch


@dataclass(frozen=True)
class Unbatched:
    """Does not depend on the samples, nor on how many there are."""


@dataclass(frozen=True)
class Split:
    """Dimension `dim` has outer * B * inner entries; sample b's are those at (o * B + b) * inner + i."""

    dim: int
    outer: int = 1
    inner: int = 1
    numbers: bool = False  # the entries are the samples' numbers 0, 1, 2, ... within the batch


@dataclass(frozen=True)
class Sum:
    """The sum of the micro-batches' values."""


@dataclass(frozen=True)
class Mean:
    """The mean of the micro-batches' values, weighted by samples."""

    counted: fx.Node | None = None  # a cross-entropy that weighs by targets instead: those that it does not ignore


@dataclass(frozen=True)
class Extent:
    """A number that is a function of the size of the batch alone."""

    size: Size


@dataclass(frozen=True)
class Mixed:
    """Samples met at `node`."""

    node: fx.Node
    why: str = "mixes samples: the output depends on which samples share a batch"


@dataclass(frozen=True)
class Unproven:
    """Nobody can tell from the graph what `node` does to the samples."""

    node: fx.Node
    why: str


State = Unbatched | Split | Sum | Mean | Extent | Mixed | Unproven
_DIVIDES = "divides by what depends on the values of the whole batch"
_DIVISIONS = ("div", "divide", "true_divide")
_PRODUCTS = ("mul", "multiply")
_SLICES = ("slice", "narrow", "select", "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unfold")


@dataclass(frozen=True)
class _Place:
    """An index of a rule with outer * B * inner entries."""

    index: str
    outer: int
    inner: int


def varies(size: Size) -> bool:
    """Whether a size depends on that of the batch."""
    return isinstance(size, sympy.Basic) and BATCH in size.free_symbols


def multiple(size: Size) -> int | None:
    """c of a size c * B."""
    found = quotient(size, BATCH) if varies(size) else None
    return found if isinstance(found, int) else None


def follow(
    node: fx.Node, name: str, rule: Rule, states: Sequence[State], shapes: Sequence[tuple[Size, ...]]
) -> list[State]:
    """The states of the results of `node`, an operator called `name`.

    `states`: of the rule's operands, none of them Open. Sizes in `rule` and `shapes` (of the results) are in BATCH.
    """

    def everywhere(state: State) -> list[State]:
        return [state] * len(shapes)

    places = range(len(states))[PLACES.get(name, slice(0))]
    if name in _DIVISIONS and isinstance(states[1], (Sum, Mean, Mixed)) and not isinstance(states[0], Mixed):
        return everywhere(Mixed(node, _DIVIDES))
    for i, state in enumerate(states):
        if isinstance(state, Mixed):
            routed = Unproven(node, "chooses rows by what was computed from several samples")
            return everywhere(routed if i in places else state)
    if any(isinstance(state, Split) for state in states):
        results = _follow_samples(node, name, rule, states, places, len(shapes))
    else:
        results = everywhere(_follow_totals(node, name, rule, states))
    return [_checked(node, rule, i, state, shape) for i, (state, shape) in enumerate(zip(results, shapes, strict=True))]


def _checked(node: fx.Node, rule: Rule, output: int, state: State, shape: tuple[Size, ...]) -> State:
    """`state`, if the sizes of the result are such: samples along no dimension, or exactly the one that it says."""
    along = [d for d, size in enumerate(shape) if varies(size)]
    if isinstance(state, (Mixed, Unproven)):
        return state
    if isinstance(state, Split):
        if shape[state.dim] != state.outer * BATCH * state.inner:
            return Unproven(node, "folds the batch in a way that cannot be followed")
        return state if along == [state.dim] else Mixed(node)
    if not along:
        return state
    new = [(d, place) for d in along if (place := _fresh(rule, rule.outputs[output][d])) is not None]
    if len(along) > 1 or not new or not isinstance(state, Unbatched):
        return Mixed(node)
    return Split(along[0], new[0][1].outer, new[0][1].inner)


def _fresh(rule: Rule, dim: tuple[str, ...]) -> _Place | None:
    """Where an index with the batch's entries is that no operand has: all its entries are alike."""
    for place, index in enumerate(dim):
        count = multiple(rule.sizes[index])
        if (
            count is not None
            and rule.kinds[index] is IndexKind.KEPT
            and not any(index in d for t in rule.inputs for d in t)
        ):
            outer, inner = (_product(rule, part) for part in (dim[:place], dim[place + 1 :]))
            return None if outer is None or inner is None else _Place(index, outer, inner * count)
    return None


def _product(rule: Rule, indices: Sequence[str]) -> int | None:
    """Entries of several indices together, None if they depend on the batch."""
    result = 1
    for index in indices:
        if not isinstance(rule.sizes[index], int):
            return None
        result *= rule.sizes[index]
    return result


def _locate(rule: Rule, dims: Dims, state: Split) -> _Place | None:
    """The index in which the samples are: among those that their dimension is folded from."""
    dim = dims[state.dim]
    for place, index in enumerate(dim):
        outer, inner = (_product(rule, part) for part in (dim[:place], dim[place + 1 :]))
        if not varies(rule.sizes[index]) or outer is None or inner is None:
            continue
        if state.outer % outer or state.inner % inner:
            return None
        found = _Place(index, state.outer // outer, state.inner // inner)
        return found if rule.sizes[index] == found.outer * BATCH * found.inner else None
    return None


def _follow_samples(
    node: fx.Node, name: str, rule: Rule, states: Sequence[State], places: range, n_outputs: int
) -> list[State]:
    own = states[0]
    if name in PLACES and isinstance(own, Split):
        owned = _own_rows(rule, states, places, own)
        if isinstance(owned, str):
            return [Unproven(node, owned) if owned else Mixed(node)] * n_outputs
        rule, states = owned
    found: dict[int, _Place] = {}
    for i, state in enumerate(states):
        if isinstance(state, Split):
            place = _locate(rule, rule.inputs[i], state)
            if place is None:
                return [Unproven(node, "folds the batch in a way that cannot be followed")] * n_outputs
            found[i] = place
        elif isinstance(state, Extent):
            return [Unproven(node, "depends on how many samples there are")] * n_outputs
        elif not isinstance(state, Unbatched):
            return [Mixed(node)] * n_outputs
    (place, *others), numbers = found.values(), any(isinstance(s, Split) and s.numbers for s in states)
    if any(other.index != place.index for other in others) or (numbers and name not in MOVES and name not in _COPIES):
        return [Mixed(node)] * n_outputs
    if any(other != place for other in others):
        return [Unproven(node, "folds the batch in two ways")] * n_outputs
    kind = rule.kinds[place.index]
    if name == "batch_norm" and place.index in rule.inputs[0][0]:
        kind = IndexKind.KEPT  # in training, what to do about its statistics is the caller's choice
    if kind is IndexKind.KEPT:
        return [_spread(rule, dims, place, numbers) or Mixed(node) for dims in rule.outputs]
    if kind is IndexKind.AVERAGED:
        counts = name in _COUNTING and len(rule.inputs[1]) < len(rule.inputs[0])
        return [Mean(node if counts else None)] * n_outputs
    if kind is IndexKind.SUMMED:
        once = any(i not in found for i in rule.addends)  # a term that every micro-batch would add again
        return [Mixed(node) if once else Sum()] * n_outputs
    if name in RESHAPES:
        return [Unproven(node, "folds the batch in a way that cannot be followed")] * n_outputs
    if name in _SLICES and place.outer * place.inner > 1:
        return [Unproven(node, "takes a part of a folded batch")] * n_outputs
    return [Mixed(node)] * n_outputs


_COPIES = ("clone", "contiguous", "detach", "alias", "to", "lift_fresh_copy")
_COUNTING = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")


def _spread(rule: Rule, dims: Dims, place: _Place, numbers: bool) -> Split | None:
    """The samples in a result that has their index."""
    for d, dim in enumerate(dims):
        if place.index in dim:
            at = dim.index(place.index)
            outer, inner = _product(rule, dim[:at]), _product(rule, dim[at + 1 :])
            if outer is not None and inner is not None:
                return Split(d, outer * place.outer, inner * place.inner, numbers)
    return None


def _own_rows(rule: Rule, states: Sequence[State], places: range, own: Split) -> tuple[Rule, list[State]] | str:
    """x[arange(B), j]: every sample takes from its own rows, as if the batch were no dimension that is indexed.

    Returns the rule in which the batch is kept and states in which its numbers are used up; or why that is not so: ""
    where samples meet.
    """
    place = _locate(rule, rule.inputs[0], own)
    plain = [replace(s, numbers=False) if isinstance(s, Split) and i in places else s for i, s in enumerate(states)]
    if place is None or rule.kinds[place.index] is not IndexKind.WHOLE:
        numbered = any(isinstance(states[i], Split) and states[i].numbers for i in places)  # type: ignore[union-attr]
        return "" if numbered else (rule, plain)
    indexed = [d for d, dim in enumerate(rule.inputs[0]) if dim and rule.kinds[dim[0]] is IndexKind.WHOLE]
    number = indexed.index(own.dim) if own.dim in indexed and len(indexed) == len(places) else None
    if number is None:
        return "takes rows of other samples"
    index = states[places[number]]
    if isinstance(index, Unbatched):
        return ""
    if not (isinstance(index, Split) and index.numbers) or (place.outer, place.inner) != (1, 1):
        return "takes rows by their numbers"
    batch = rule.inputs[places[number]][index.dim][0]

    def renamed(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(batch if i == place.index else i for i in dim) for dim in dims) for dims in tensors)

    kinds = {**rule.kinds, batch: IndexKind.KEPT}
    return replace(rule, inputs=renamed(rule.inputs), outputs=renamed(rule.outputs), kinds=kinds), plain


def _follow_totals(node: fx.Node, name: str, rule: Rule, states: Sequence[State]) -> State:
    """What becomes of sums and means."""
    sums = {i for i, s in enumerate(states) if isinstance(s, Sum)}
    means = {i for i, s in enumerate(states) if isinstance(s, Mean)}
    extents = [i for i, s in enumerate(states) if isinstance(s, Extent)]
    if extents:
        if (
            len(states) == 2
            and extents == [1]
            and (sums or means)
            and name in (*_DIVISIONS, *_PRODUCTS)
            and rule.linear
        ):
            return _scaled(node, states[0], states[1].size, name in _DIVISIONS)  # type: ignore[union-attr]
        return Mixed(node) if sums or means else Unproven(node, "depends on how many samples there are")
    if not sums and not means:
        return Unbatched()
    if sums and not means and any(sums == group for group in rule.linear):
        return Sum()
    if means and not sums and any(means <= group for group in rule.linear):
        counted = {s.counted for s in states if isinstance(s, Mean)}
        return Mean(next((c for c in counted if c is not None), None))
    return Mixed(node)


def _scaled(node: fx.Node, state: State, size: Size, divides: bool) -> State:
    """A sum divided by the number of samples is a mean, and the other way round."""
    factor = 1 / sympy.sympify(size) if divides else sympy.sympify(size)
    if isinstance(state, Sum) and not varies(sympy.cancel(factor * BATCH)):
        return Mean()
    if isinstance(state, Mean) and state.counted is None and not varies(sympy.cancel(factor / BATCH)):
        return Sum()
    return Mixed(node)


def cut(state: object, dim: int, lengths: Sequence[Size], start: Size = 0) -> list[State] | None:
    """The states of pieces of these lengths along the dimension of a Split, from `start` on, where every piece has all
    samples so and so many times; else None."""
    if not isinstance(state, Split) or state.dim != dim or state.numbers:
        return None
    unit = BATCH * state.inner
    counts = [quotient(length, unit) if varies(length) else None for length in lengths]
    if not all(isinstance(count, int) for count in counts) or (
        start != 0 and not isinstance(quotient(start, unit), int)
    ):
        return None
    return [replace(state, outer=count) for count in counts if isinstance(count, int)]


def joined(states: Sequence[object], dim: int) -> State | None:
    """The state of several Splits put behind each other along the batch; None if they are none."""
    splits = [s for s in states if isinstance(s, Split) and s.dim == dim and not s.numbers]
    if not splits or len(splits) < len(states) or len({s.inner for s in splits}) > 1:
        return None
    return replace(splits[0], outer=sum(s.outer for s in splits))
