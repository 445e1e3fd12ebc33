"""The flat inputs of a call: their names, devices and batch dimension, and which objects may be inputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import InputError


def find_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    batch_dim: int | dict[str, int | None] | None,
    *,
    may_be_empty: bool = False,
) -> tuple[list[int | None], int]:
    """The batch dimension of every leaf (None: shared) and the batch size (0: none).

    A dict gives the dimensions of the inputs that it names, and others have dimension 0. The batch is the size there of
    the first input that the dict names, or of the first tensor that has such a dimension, in the order of `forward`'s
    parameters; other tensors are batched if they have the same size there. Raises InputError for a batch without
    samples unless it `may_be_empty`, for a dimension that the input does not have, and for inputs that the dict names
    and that differ in size, or that `forward` does not have. A call may leave out parameters that the dict names.
    """
    names = leaf_names(model, args, kwargs)
    parameters = inspect.signature(model.forward).parameters
    order = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    given = batch_dim if isinstance(batch_dim, dict) else {}
    unknown = [name for name in given if name not in names and name not in order]
    if unknown:
        raise InputError(f"batch_dim names {unknown}, but the inputs are {sorted({*names, *order})}")
    default = batch_dim if isinstance(batch_dim, int) else 0
    chosen = [given.get(name, default) for name in names]
    if default and not any(map(_has_dimension, leaves, chosen)):
        there = [f"'{name}' has {_dimensions(leaf)}" for name, leaf in zip(names, leaves, strict=True)]
        raise InputError(f"batch_dim={batch_dim}, but no input has such a dimension: {', '.join(there) or 'no inputs'}")
    for leaf, name, dim in zip(leaves, names, chosen, strict=True):
        if name in given and leaf is not None and dim is not None and not _has_dimension(leaf, dim):
            raise InputError(
                f"batch_dim gives input '{name}' dimension {dim}, but the input has no such dimension: it has "
                f"{_dimensions(leaf)}"
            )
    sizes = [leaf.shape[dim] if _has_dimension(leaf, dim) else None for leaf, dim in zip(leaves, chosen, strict=True)]
    batched = [index for index, size in enumerate(sizes) if size is not None]
    if not batched:
        return [None] * len(leaves), 0
    places = [order.index(name) if name in order else len(order) for name in names]
    first = min(batched, key=lambda index: (names[index] not in given, places[index]))
    batch = sizes[first]
    assert batch is not None
    if batch == 0 and not may_be_empty:
        shape = tuple(leaves[first].shape)
        raise InputError(f"input '{names[first]}' has no samples: shape {shape}; give at least one")
    dims: list[int | None] = []
    for leaf, name, dim, size in zip(leaves, names, chosen, sizes, strict=True):
        if size is not None and size != batch and name in given:
            raise InputError(
                f"input '{name}' has {size} samples at dimension {dim}, but input '{names[first]}' has {batch}"
            )
        dims.append(dim % leaf.dim() if dim is not None and size == batch else None)
    return dims, batch


def _has_dimension(leaf: Any, dim: int | None) -> bool:
    return isinstance(leaf, torch.Tensor) and dim is not None and -leaf.dim() <= dim < leaf.dim()


def _dimensions(leaf: Any) -> str:
    """The dimensions that can be given, of a flat input."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return "no dimensions"
    return f"dimensions {-leaf.dim()} to {leaf.dim() - 1}"


def leaf_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """For every leaf, the parameter of `forward` that it was passed for."""
    named = [*zip(_positional_names(model, len(args)), args, strict=True), *kwargs.items()]
    return [name for name, value in named for _ in torch_private.tree_leaves(value)]


def passed_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """In words, how each argument is passed: `'x' by position`, `'mask' by keyword, as a list`."""

    def container(value: Any) -> str:
        return f", as a {type(value).__name__}" if isinstance(value, (list, tuple, dict)) else ""

    by_place = zip(_positional_names(model, len(args)), args, strict=True)
    positional = [f"'{name}' by position{container(value)}" for name, value in by_place]
    return positional + [f"'{name}' by keyword{container(value)}" for name, value in sorted(kwargs.items())]


def _positional_names(model: nn.Module, n: int) -> list[str]:
    """The parameters of `forward` that `n` positional arguments are passed for; those in its `*args` are `args[i]`."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        names.append(parameter.name)
    return names[:n] + [f"args[{index}]" for index in range(len(names), n)]


PLAIN_INPUTS = frozenset((torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device))
"""Types of the leaves of most calls: tensors, and what holds none."""


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], torch_private.TreeSpec]:
    """The flat inputs of a call, and their structure.

    Raises InputError for an object that holds tensors and that torch cannot take apart.
    """
    tree = args, dict(sorted(kwargs.items()))
    leaves, spec = torch_private.tree_flatten(tree)
    while not PLAIN_INPUTS.issuperset(map(type, leaves)) and _register_inputs(tree, leaves):
        leaves, spec = torch_private.tree_flatten(tree)  # which may show objects within objects
    return leaves, spec


def _register_inputs(tree: tuple[Any, dict[str, Any]], leaves: Sequence[Any]) -> bool:
    """Register the classes of `leaves` that hold tensors, so that torch takes them apart; whether there are any.

    Raises InputError for an object of another class: a graph would keep the tensors of the first call.
    """
    holding = {type(leaf): leaf for leaf in leaves if type(leaf) not in PLAIN_INPUTS and holds_tensors(leaf)}
    for cls, leaf in holding.items():
        if (not dataclasses.is_dataclass(cls) or _is_made_of_fields(leaf)) and torch_private.register_type(cls):
            continue
        place = next(i for i, other in enumerate(leaves) if other is leaf)
        part, path = torch_private.tree_paths(tree)[place][1:].split("]", 1)
        name = f"{'args' if part == '0' else 'kwargs'}{path}"
        keeps = "the parameters of a module" if isinstance(leaf, nn.Module) else "tensors"
        raise InputError(
            f"{name} is a {cls.__module__}.{cls.__qualname__}, which holds {keeps} and which torch cannot take apart: "
            "a captured graph would keep those of the first call. Pass the tensors themselves, in a dict, list or "
            "dataclass, or register the class (torch.utils._pytree.register_pytree_node)"
        )
    return bool(holding)


def _is_made_of_fields(value: Any) -> bool:
    """Whether the fields of a dataclass's object tell all that it holds: torch makes it anew of them."""
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    try:
        anew = type(value)(**{name: getattr(value, name) for name in fields})
    except Exception:  # of the user's own constructor
        return False
    return getattr(value, "__dict__", {}).keys() == getattr(anew, "__dict__", {}).keys()


def holds_tensors(value: Any) -> bool:
    """Whether an object that is no tensor holds one, at any depth: in attributes, items, a partial call, a closure."""
    remaining, seen = [value], set[int]()
    while remaining:
        one = remaining.pop()
        if isinstance(one, torch.Tensor):
            return one is not value
        if type(one) in PLAIN_INPUTS or isinstance(one, (type, ModuleType)) or id(one) in seen:
            continue
        seen.add(id(one))
        remaining += _held_by(one)
    return False


def _held_by(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            yield getattr(value, f"_{cls.__name__.lstrip('_')}{name}" if private else name, None)
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def refuse_other_than_dense(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise InputError for packed sequences, and for sparse and nested tensors."""
    names = _positional_names(model, len(args))

    def is_packed(value: Any) -> bool:
        return isinstance(value, nn.utils.rnn.PackedSequence)

    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        if any(map(is_packed, torch_private.tree_leaves(value, is_leaf=is_packed))):
            raise InputError(
                f"input '{name}' is a PackedSequence, in which the steps of all samples are mixed, so that it has no "
                "batch to divide; give the padded tensor and the lengths (torch.nn.utils.rnn.pad_packed_sequence)"
            )
        tensors = (leaf for leaf in torch_private.tree_leaves(value) if isinstance(leaf, torch.Tensor))
        other = next((tensor for tensor in tensors if not is_dense(tensor)), None)
        if other is not None:
            raise InputError(
                f"input '{name}' is a nested tensor; give the padded tensor (torch.nested.to_padded_tensor) and a mask"
                if other.is_nested
                else f"input '{name}' has the layout {other.layout}; give it dense ({name}.to_dense()), or make it "
                "sparse within the model"
            )


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def common_device(model: nn.Module, leaves: Sequence[Any] = ()) -> torch.device:
    """The device of the model's parameters and buffers; of its flat inputs `leaves` where it has none.

    The CPU if they are on several devices, as those of a pipelined model are: code that names no device means the CPU.
    """
    places = {tensor.device for tensor in tensors_of(model)} or {
        leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)
    }
    return places.pop() if len(places) == 1 else torch.device("cpu")


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
