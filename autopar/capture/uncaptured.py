"""Opaque operators: parts of a model that no tracer can capture, run as the user's own Python code.

A call of such a module (or of a torch.autograd.Function) is one operator of the graph. Its operands are the tensors of
the call and then the parameters and buffers of the module, so that lowering, measuring and placing treat it like any
other operator:

    x --------------------.
    encoder.rnn.weight ----+--> uncaptured_Encoder --> getitem 0 --> ...
    encoder.rnn.bias -----'
                                 runs encoder.forward(x) over these very tensors, with autograd as it is

A copy of the module, made for the call, holds the operands as its parameters and buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.capture import module_hooks, torch_private
from autopar.capture.held_tensors import HeldTensors
from autopar.capture.module_state import generators_restored
from autopar.errors import CaptureError
from cost_models.graphs import get_attribute
from cost_models.memory import saved_tensors

Size = tuple[int, int]  # base and slope: a size of `base + slope * samples`


@dataclass(frozen=True)
class TensorResult:
    """A tensor that an opaque operator returns, for any number of samples."""

    sizes: tuple[Size, ...]
    order: tuple[int, ...]  # dimensions by descending stride
    dtype: torch.dtype
    device: torch.device

    def on_meta(self, samples: int) -> torch.Tensor:
        """Such a tensor without values."""
        sizes = [base + slope * samples for base, slope in self.sizes]
        tensor = torch.empty([sizes[d] for d in self.order], dtype=self.dtype, device="meta")
        return tensor.permute(sorted(range(len(sizes)), key=self.order.__getitem__))


@dataclass(frozen=True)
class Structure:
    """The leaves of a call's arguments or results. Its tensors and sizes are values of the graph."""

    spec: torch_private.TreeSpec
    constants: tuple[Any, ...]  # None in the places of tensors and sizes
    tensors: tuple[int, ...]  # places of tensors among the leaves
    sizes: tuple[int, ...] = ()  # places of symbolic sizes among the leaves

    @classmethod
    def of(cls, tree: Any) -> tuple[Structure, list[Any], list[Any]]:
        """The structure of `tree`, its tensors and its sizes."""
        leaves, spec = torch_private.tree_flatten(tree)
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        sizes = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt))
        constants = tuple(None if i in {*tensors, *sizes} else leaf for i, leaf in enumerate(leaves))
        return cls(spec, constants, tensors, sizes), [leaves[i] for i in tensors], [leaves[i] for i in sizes]

    def together(self, tensors: Sequence[Any], sizes: Sequence[Any] = ()) -> Any:
        leaves = list(self.constants)
        for place, value in [*zip(self.tensors, tensors, strict=True), *zip(self.sizes, sizes, strict=True)]:
            leaves[place] = value
        return torch_private.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Effects:
    """What a call does besides computing its results, as seen when it ran on the example."""

    random: bool = False  # draws from torch's generators
    stateful: str = ""  # what it changes outside of buffers: an attribute, another random generator
    written: tuple[int, ...] = ()  # the buffers that it writes: places among the tensors that the module holds

    def __or__(self, other: Effects) -> Effects:
        written = tuple(sorted({*self.written, *other.written}))
        return Effects(self.random or other.random, self.stateful or other.stateful, written)


@dataclass(frozen=True, eq=False)
class Uncaptured:
    """The function of an opaque operator: `operator(*tensors, *sizes, *held)` returns its tensors as a list."""

    function: Callable[..., Any]  # the apply of an autograd.Function; unused for a module
    held: HeldTensors | None  # of a module; None for an autograd.Function
    path: str  # of the module, or of the module whose code calls the Function; "" for the root
    title: str  # class name of the module or Function
    inputs: Structure
    outputs: Structure
    input_sizes: tuple[tuple[Size, ...], ...]  # of the tensors that it takes
    input_gradients: tuple[bool, ...]  # which of them required a gradient in the example
    results: tuple[TensorResult, ...]
    effects: Effects
    identity: str  # hash of the code that runs
    through: Callable[..., Any] | None = field(default=None)  # runs `compute(*operands)`, with its own random numbers

    # torch.fx writes a call by these names, and messages and operator keys show them.
    @property
    def __name__(self) -> str:
        return "uncaptured_" + "".join(c if c.isalnum() else "_" for c in self.title)

    def __repr__(self) -> str:
        return f"{self.__name__}({self.path!r}, {self.inputs.constants}, {self.identity})"

    @property
    def place(self) -> str:
        """What messages call it: `module 'encoder' (PackedEncoder)`."""
        where = f"'{self.path or '(root)'}'"
        return f"module {where} ({self.title})" if self.held is not None else f"{self.title}.apply in module {where}"

    @property
    def _is_whole_model(self) -> bool:
        """Nothing in the graph relies on the shapes that it returns."""
        return self.held is not None and not self.path

    def drawing(self, through: Callable[..., Any]) -> Uncaptured:
        """The same operator, whose call goes `through(compute, *operands)`."""
        return replace(self, through=through)

    def written_operands(self, args: Sequence[Any]) -> list[Any]:
        """Those of the operands `args` that it writes."""
        first = len(self.inputs.tensors) + len(self.inputs.sizes)
        return [args[first + place] for place in self.effects.written]

    def __call__(self, *operands: Any) -> list[torch.Tensor]:
        if self.through is not None:
            result: list[torch.Tensor] = self.through(self.compute, *operands)
            return result
        return self.compute(*operands)

    def compute(self, *operands: Any) -> list[torch.Tensor]:
        return self._computed_or_shaped(operands, evaluating=False)

    def observed(self, *operands: Any) -> list[torch.Tensor]:
        """What it returns without gradients and, if it draws random numbers, in evaluation mode."""
        return [t.detach() for t in self._with_inputs(operands)[1]]

    def observed_gradients(
        self, operands: Sequence[Any], arriving: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of every tensor that it takes, of those that required one in the example; None for others.

        arriving(i, result): the gradient that arrives at result number `i`.
        """
        inputs, results = self._with_inputs(operands)
        differentiable = [(i, t) for i, t in enumerate(results) if t.requires_grad]
        wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        if not differentiable or not wanted:
            return [None] * len(inputs)
        roots, arrived = [t for _, t in differentiable], [arriving(i, t.detach()) for i, t in differentiable]
        gradients = iter(torch.autograd.grad(roots, wanted, arrived, allow_unused=True))
        return [next(gradients) if any(x is one for one in wanted) else None for x in inputs]

    def _with_inputs(self, operands: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
        """The tensors that it takes, as leaves of a graph of their own, and what it returns for them."""
        inputs = [x.detach().requires_grad_() if g else x for x, g in zip(operands, self.input_gradients, strict=False)]
        with torch.enable_grad():  # the module may differentiate inside
            return inputs, self._computed_or_shaped((*inputs, *operands[len(inputs) :]), evaluating=self.effects.random)

    def needs_values(self, operands: Sequence[Any]) -> str:
        """The error of its code on `operands`, tensors on the meta device; "" if it runs."""
        try:
            self._computed(operands, evaluating=False)
        except Exception as error:  # the user's code may raise anything
            return (str(error).splitlines() or [type(error).__name__])[0][:200]
        return ""

    def _computed_or_shaped(self, operands: Sequence[Any], *, evaluating: bool) -> list[torch.Tensor]:
        """What it returns; on the meta device, if its code needs values, tensors of the shapes that it would return."""
        try:
            return self._computed(operands, evaluating=evaluating)
        except Exception:
            if not any(isinstance(x, torch.Tensor) and x.is_meta for x in operands):
                raise
        samples = _samples(self.input_sizes, operands[: len(self.inputs.tensors)]) or 0
        return [result.on_meta(samples) for result in self.results]

    def _computed(self, operands: Sequence[Any], *, evaluating: bool) -> list[torch.Tensor]:
        n_tensors, n_sizes = len(self.inputs.tensors), len(self.inputs.sizes)
        tensors, sizes = operands[:n_tensors], operands[n_tensors : n_tensors + n_sizes]
        args, kwargs = self.inputs.together(tensors, sizes)
        if self.held is None:
            return self._checked(self.function(*args, **kwargs), tensors)
        # Only a stage that runs for the user changes what the module keeps, and runs hooks of the user.
        running = module_hooks.is_running()
        module = self.held.copy(operands[n_tensors + n_sizes :], private=not running)
        if evaluating:
            for one in module.modules:
                one.training = False
        with contextlib.nullcontext() if running else generators_restored(self.held.generators):
            result = _under_hooks(functools.partial(module.root.forward, *args, **kwargs))
        module.refuse_registrations()
        module.write_buffers()
        if running:
            module.write_attributes()
        return self._checked(result, tensors)

    def _checked(self, result: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of `result`. Raises CaptureError if they are not what the graph was captured for."""
        structure, tensors, _ = Structure.of(result)
        if structure.spec != self.outputs.spec or structure.tensors != self.outputs.tensors:
            raise CaptureError(
                f"uncaptured {self.place} returned another structure than in the example call"
                f"{_difference(structure, self.outputs)}"
            )
        if not same_constants(structure.constants, self.outputs.constants):
            raise CaptureError(
                f"uncaptured {self.place} returned {structure.constants}, and {self.outputs.constants} in the example "
                "call; return values that change as tensors"
            )
        samples = _samples(self.input_sizes, inputs)
        for tensor, expected in zip(tensors, self.results, strict=True):
            sizes = tuple(
                base if not slope else None if samples is None else base + slope * samples
                for base, slope in expected.sizes
            )
            fits = tensor.dim() == len(sizes) and all(s in (None, n) for s, n in zip(sizes, tensor.shape, strict=True))
            if (not fits and not self._is_whole_model) or tensor.dtype != expected.dtype:
                raise ChangedResultError(
                    f"uncaptured {self.place} returned a tensor of shape {tuple(tensor.shape)} and type "
                    f"{tensor.dtype}, but the operators behind it were captured for {sizes} and {expected.dtype}: its "
                    "shape depends on values. Pad to a fixed size, or do all that depends on this size inside one "
                    "module",
                )
        return [_laid_out(t, expected.order) for t, expected in zip(tensors, self.results, strict=True)]


def _difference(now: Structure, example: Structure) -> str:
    """What one structure has and the other lacks, for a message; "" where they differ in types alone."""
    try:
        here, there = (
            torch_private.tree_paths(torch_private.tree_unflatten(one.constants, one.spec)) for one in (now, example)
        )
    except Exception:  # a user's class may not hold the places of tensors without the tensors
        return ""
    new, gone = [path for path in here if path not in there], [path for path in there if path not in here]
    which = [f"output{new[0]} is new"] if new else []
    which += [f"output{gone[0]} is missing"] if gone else []
    return f": {', '.join(which)}" if which else ""


def _laid_out(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`tensor` without gaps in memory, its dimensions in `order`: later operators were captured for that (`view`)."""
    ordered = tensor.permute(tuple(order))  # separate numbers would be none for a scalar
    if ordered.is_contiguous():
        return tensor
    return ordered.contiguous().permute(sorted(range(tensor.dim()), key=order.__getitem__))


class ChangedResultError(CaptureError):
    """An opaque operator returned a tensor of another shape than its example call showed."""


def same_constants(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether results that are no tensors are equal."""
    return len(a) == len(b) and all(x is y or (type(x) is type(y) and bool(x == y)) for x, y in zip(a, b, strict=True))


def _under_hooks(forward: Callable[[], Any]) -> Any:
    """What a user's code returns under the hooks on saved tensors of this thread, as far as it runs under them: it may
    differentiate what it computes."""
    if saved_tensors.are_forgotten():
        with saved_tensors.put_aside():
            return forward()
    try:
        return forward()
    except RuntimeError as error:
        if not saved_tensors.are_hooked() or "saved tensor hooks" not in str(error):
            raise
    with saved_tensors.put_aside():  # torch.func.grad runs under none
        return forward()


def _samples(input_sizes: Sequence[Sequence[Size]], inputs: Sequence[torch.Tensor]) -> int | None:
    """The number of samples that the sizes of `inputs` imply; None if no size depends on it."""
    for sizes, tensor in zip(input_sizes, inputs, strict=True):
        for (base, slope), size in zip(sizes, tensor.shape, strict=False):
            if slope:
                return (size - base) // slope
    return None


# -- in a captured graph ----------------------------------------------------------------------------------------------


def uncaptured(node: fx.Node) -> Uncaptured | None:
    """The opaque operator that `node` calls; None for other nodes."""
    target = node.target
    return target if node.op == "call_function" and isinstance(target, Uncaptured) else None


def uncaptured_in(module: fx.GraphModule) -> list[Uncaptured]:
    """All opaque operators of a graph and of the graphs nested in it, in program order."""
    found = []
    for node in module.graph.nodes:
        operator = uncaptured(node)
        if operator is not None:
            found.append(operator)
        elif node.op == "get_attr":
            child = get_attribute(module, str(node.target))
            found += uncaptured_in(child) if isinstance(child, fx.GraphModule) else []
    return found


def opaque_around(module: fx.GraphModule, path: str) -> str | None:
    """The path of the module that runs `path`, a module inside it, as a part of one operator; None if none does."""
    opaque = [part.path for part in uncaptured_in(module) if part.held is not None]
    return next((around for around in opaque if path != around and (not around or path.startswith(around + "."))), None)
