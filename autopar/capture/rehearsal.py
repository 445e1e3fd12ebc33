"""What opaque operators return, found by running the model itself on the example.

No tracer can tell the shapes of their results, so the model runs a few times: on all samples, on all but the last, on
all but the first, on two at either end, and on samples of other signs. Sizes that follow the number of samples become
`base + slope * samples`:

    4 samples -> (4, 12, 64)     3 samples -> (3, 12, 64)      => (samples, 12, 64)
    4 samples -> (4, 12, 64)     3 samples -> (3,  9, 64)      => the size depends on values: no shape

The model is unchanged afterwards: buffers, attributes and random generators are put back.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.held_tensors import HeldTensors
from autopar.capture.module_hooks import switched_off
from autopar.capture.module_state import Attributes, Generators, own_generators
from autopar.capture.parameter_writes import ParameterValues, refusal, same_values
from autopar.capture.registrations import contents_restored
from autopar.capture.uncaptured import Effects, Size, Structure, TensorResult, same_constants
from autopar.errors.names import with_article

WRITES_INPUT = "writes into its input"


@dataclass(frozen=True)
class RehearsedCall:
    """One call of an opaque operator, as it ran on the example."""

    outputs: Structure
    input_sizes: tuple[tuple[Size, ...], ...]
    input_gradients: tuple[bool, ...]  # which inputs require a gradient
    results: tuple[TensorResult, ...]
    effects: Effects
    refused: str  # why it cannot be an operator of a graph; "" if it can


@dataclass(frozen=True)
class Rehearsal:
    """All calls of opaque operators, by name; and whether the model also ran on other numbers of samples."""

    calls: Mapping[str, RehearsedCall]
    any_batch: bool
    held: Mapping[str, HeldTensors]  # by path of an opaque module


@dataclass
class _Seen:
    """A call in one run."""

    inputs: list[tuple[int, ...]]
    gradients: tuple[bool, ...]
    outputs: Structure
    tensors: list[TensorResult]
    effects: Effects
    refused: str


class CallNames:
    """Names of opaque calls in the order of the model's code, the same in every run and in the trace."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.depth = 0  # calls inside an opaque call belong to it

    def reset(self) -> None:
        self._counts.clear()
        self.depth = 0

    def next(self, subject: str) -> str:
        self._counts[subject] += 1
        return f"{subject}#{self._counts[subject] - 1}"


Around = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def calls_through(model: nn.Module, paths: Collection[str], around: Around) -> Iterator[None]:
    """Inside, a call of an inner forward at `paths` is `around(path, module, forward, args, kwargs)`."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path in paths:
            module = model.get_submodule(path)
            before.append((module, vars(module).get("forward")))
            module.forward = _through(path, module, module.forward, around)
        yield
    finally:
        for module, own in reversed(before):
            if own is None:
                del module.forward
            else:
                module.forward = own


def _through(path: str, module: nn.Module, forward: Callable[..., Any], around: Around) -> Callable[..., Any]:
    thread = threading.get_ident()

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:  # another thread runs the model
            return forward(*args, **kwargs)
        return around(path, module, forward, args, kwargs)

    return call


def rehearse(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Sequence[int | None],
    paths: Collection[str],
    functions: bool,
) -> Rehearsal:
    """Run `model` on the example. `dims`: the batch dimension of every flat input. `functions`: watch calls of custom
    autograd Functions outside of the opaque modules at `paths`, too. Raises whatever the model raises, and
    ParameterWriteError for an opaque module that writes its parameters."""
    leaves, spec = torch_private.tree_flatten((args, kwargs))
    held = {path: HeldTensors(model.get_submodule(path), path) for path in paths}
    parts = [module for one in held.values() for module in one.modules]
    before, names = ParameterValues(parts), {id(p): name for name, p in model.named_parameters()}
    try:
        return _rehearsed(model, leaves, spec, dims, held, functions)
    finally:
        written = before.put_back()
        if written:
            raise refusal(names[written[0]], "in code that runs uncaptured")


def _rehearsed(
    model: nn.Module,
    leaves: Sequence[Any],
    spec: torch_private.TreeSpec,
    dims: Sequence[int | None],
    held: Mapping[str, HeldTensors],
    functions: bool,
) -> Rehearsal:
    rows = next((leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None), 0)
    runs = [(rows, _watched_run(model, leaves, spec, held, functions))]
    any_batch = rows > 1
    for samples in _selections(rows):
        some = [_selected(leaf, dim, samples) for leaf, dim in zip(leaves, dims, strict=True)]
        try:
            runs.append((len(samples), _watched_run(model, some, spec, held, functions)))
        except Exception:  # the model takes this number of samples only
            any_batch = False
    if not any_batch:
        runs = runs[:1]
    with contextlib.suppress(Exception):  # the model may not take other values
        values = [_varied(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        runs.append((rows, _watched_run(model, values, spec, held, functions)))
    names = dict.fromkeys(name for _, seen in runs for name in seen)
    calls = {name: _fitted([(n, seen.get(name)) for n, seen in runs]) for name in names}
    return Rehearsal(calls, any_batch, held)


def _selections(rows: int) -> list[list[int]]:
    """Which samples the further runs get. A batch of one sample keeps its size; of two, it is extended."""
    if rows < 2:
        return []
    every = list(range(rows))
    if rows == 2:
        return [[0, 1, 1], [0, 0, 1], [0, 1, 0, 1]]
    return [every[:-1], every[1:], *([every[:2], every[-2:]] if rows > 3 else [[*every, 0]])]


def _selected(leaf: Any, dim: int | None, samples: list[int]) -> Any:
    if dim is None:
        return leaf
    return leaf.detach().index_select(dim, torch.tensor(samples, device=leaf.device))


def _varied(leaf: Any, dim: int | None) -> Any:
    """Samples in the opposite order; every second one of floating-point samples has the other sign."""
    if dim is None or not isinstance(leaf, torch.Tensor):
        return leaf
    x = leaf.detach().flip(dim)
    if not x.is_floating_point():
        return x
    signs = torch.tensor([1 - 2 * (i % 2) for i in range(x.shape[dim])], device="cpu").to(x)
    return x * signs.view([-1 if d == dim else 1 for d in range(x.dim())])


def _watched_run(
    model: nn.Module,
    leaves: Sequence[Any],
    spec: torch_private.TreeSpec,
    held: Mapping[str, HeldTensors],
    functions: bool,
) -> dict[str, _Seen]:
    """The opaque calls of one run, by name."""
    seen: dict[str, _Seen] = {}
    names = CallNames()

    def watched(subject: str, tensors: HeldTensors | None, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if names.depth:
            return call(*args, **kwargs)
        name = names.next(subject)
        names.depth += 1
        try:
            seen[name], result = _watched_call(tensors, call, args, kwargs)
        finally:
            names.depth -= 1
        return result

    def module_call(path: str, _: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return watched(path, held[path], forward, args, kwargs)

    def function_call(cls: type, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return watched(function_subject(cls), None, apply, args, kwargs)

    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = torch_private.tree_unflatten(copies, spec)
    with ExitStack() as stack:
        stack.enter_context(_put_back(model))
        stack.enter_context(switched_off(model.modules()))
        stack.enter_context(calls_through(model, held, module_call))
        if functions:
            stack.enter_context(torch_private.custom_functions_through(function_call))
        model(*args, **kwargs)
    return seen


def function_subject(cls: type) -> str:
    """What calls of an autograd.Function are counted by."""
    return f"{cls.__module__}.{cls.__qualname__}.apply"


def _watched_call(held: HeldTensors | None, call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[_Seen, Any]:
    inputs = [x for x in torch_private.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before = [_Contents(tensor) for tensor in inputs]
    modules = held.modules if held is not None else []
    attributes, generators = Attributes(modules), Generators(held.generators if held is not None else [])
    contents = [_Contents(tensor) for tensor in held.current()] if held is not None else []
    shapes, gradients = [tuple(x.shape) for x in inputs], tuple(x.requires_grad for x in inputs)
    result = call(*args, **kwargs)
    now = held.current() if held is not None else []
    written = [
        place for place, (one, t) in enumerate(zip(contents, now, strict=True)) if one.tensor is not t or one.changed()
    ]
    structure, tensors, _ = Structure.of(result)
    stateful = attributes.changed() or generators.others_moved()
    refused = ""
    if any(one.changed() for one in before):
        refused = WRITES_INPUT
    elif not tensors:
        refused = "returns no tensor"
    elif not all(is_constant(c) for c in structure.constants):
        named = zip(torch_private.tree_paths(result), structure.constants, strict=True)
        path, other = next((path, c) for path, c in named if not is_constant(c))
        refused = f"returns {with_article(type(other).__name__)}" + (f" in output{path}" if path else "")
    elif any(t.is_sparse or t.is_nested for t in tensors):
        refused = "returns a tensor without strides"
    else:
        effects = Effects(generators.torch_has_moved(), stateful, tuple(written))
        return _Seen(shapes, gradients, structure, [_result(t) for t in tensors], effects, ""), result
    return _Seen(shapes, gradients, structure, [], Effects(), refused), result


class _Contents:
    """What a tensor holds at one time. A write through its `.data` leaves its version as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version
        # Parameters are compared once for all calls (`ParameterValues`).
        self._values = None if isinstance(tensor, nn.Parameter) or tensor.is_meta else tensor.detach().clone()

    def changed(self) -> bool:
        """Whether it was written since."""
        if self.tensor._version != self._version:
            return True
        return self._values is not None and not same_values(self.tensor.detach(), self._values)


def is_constant(value: Any) -> bool:
    """Whether a graph may hold a value instead of a tensor: it is immutable and knows no tensors."""
    plain = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return value is None or value is Ellipsis or isinstance(value, plain)


def _result(tensor: torch.Tensor) -> TensorResult:
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return TensorResult(tuple((size, 0) for size in tensor.shape), order, tensor.dtype, tensor.device)


def _fitted(runs: Sequence[tuple[int, _Seen | None]]) -> RehearsedCall:
    """One call from what all runs showed of it: pairs of (samples, the call)."""
    seen = [(n, one) for n, one in runs if one is not None]
    _, first = seen[0]
    effects = Effects()
    for _, one in seen:
        effects |= one.effects

    def refused(why: str) -> RehearsedCall:
        return RehearsedCall(first.outputs, (), (), (), effects, why)

    if len(seen) < len(runs):
        return refused("is called for some batches only")
    if why := next((one.refused for _, one in seen if one.refused), ""):
        return refused(why)
    for _, one in seen:
        if len(one.inputs) != len(first.inputs):
            return refused("takes a number of tensors that depends on values")
        if (one.outputs.spec, one.outputs.tensors) != (first.outputs.spec, first.outputs.tensors):
            return refused("returns a structure that depends on values")
        if not same_constants(one.outputs.constants, first.outputs.constants):
            return refused("returns numbers that depend on values")
        if [t.dtype for t in one.tensors] != [t.dtype for t in first.tensors]:
            return refused("returns types that depend on values")
    results = []
    for place, result in enumerate(first.tensors):
        sizes = _fit([(n, tuple(s for s, _ in one.tensors[place].sizes)) for n, one in seen])
        if sizes is None:
            return refused("returns a shape that depends on values")
        results.append(TensorResult(sizes, result.order, result.dtype, result.device))
    inputs = [_fit([(n, one.inputs[place]) for n, one in seen]) for place in range(len(first.inputs))]
    input_sizes = tuple(one or () for one in inputs)
    return RehearsedCall(first.outputs, input_sizes, first.gradients, tuple(results), effects, "")


def _fit(shapes: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[Size, ...] | None:
    """The sizes as functions of the number of samples, from pairs of (samples, shape); None if there are none."""
    if len({len(shape) for _, shape in shapes}) != 1:
        return None
    by_rows: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for rows, shape in shapes:
        if by_rows.setdefault(rows, shape) != shape:
            return None
    (n, first), *others = by_rows.items()
    sizes = []
    for d, size in enumerate(first):
        slope = (others[0][1][d] - size) // (others[0][0] - n) if others else 0
        base = size - slope * n
        if any(base + slope * rows != shape[d] for rows, shape in by_rows.items()):
            return None
        sizes.append((base, slope))
    return tuple(sizes)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """On leaving, buffers, attributes and random generators are what they were. Raises RegistrationError as
    `contents_restored` does."""
    generators = Generators(own_generators(model.modules()))
    tables = [module._buffers for module in model.modules()]
    buffers = [(table, name, b, b.clone()) for table in tables for name, b in table.items() if b is not None]
    try:
        with contents_restored(model):
            yield
    finally:
        generators.restore()
        with torch.no_grad():
            for table, name, buffer, content in buffers:
                table[name] = buffer
                buffer.copy_(content)
