"""An optimizer's states under the names of its parameters, and back.

Tensors with dimensions, and those of a parameter without any, are entries of the checkpoint of their own, as DTensors
where the parameter is one: `optimizer.state.layers.0.weight.exp_avg` (the names of torch's
`get_optimizer_state_dict(flatten_optimizer_state_dict=True)`). Those inside of a list, as L-BFGS keeps, have their
place in the name: `old_dirs[3]`. Everything else (step counts, None, the options of parameter groups) is small and
travels as one value.

A parameter without states stays without: torch's own functions would give it some, by a step with zero gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import CheckpointError, InputError
from autopar.runtime.initial_values.missing_values import follow

STATE = "optimizer.state."


@dataclass
class ParameterGroup:
    """One parameter group."""

    options: dict[str, Any]  # lr, betas, ...
    names: list[str]  # of its parameters


@dataclass
class SmallStates:
    """What is not a tensor of its own in the checkpoint."""

    groups: list[ParameterGroup] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # by parameter: step counts and the like
    kind: str = ""  # class of the optimizer; "": of a version that did not save it

    def joined(self, others: Sequence[SmallStates]) -> SmallStates:
        """Together with what other ranks have, whose optimizers have the same groups. Raises InputError."""
        if len({len(one.groups) for one in others}) > 1:
            counts = ", ".join(str(len(one.groups)) for one in others)
            raise InputError(f"the ranks' optimizers differ in their number of parameter groups: {counts}")
        groups = [
            ParameterGroup(_options_of([one.groups[i] for one in others]), list(dict.fromkeys(_names(others, i))))
            for i in range(len(self.groups))
        ]
        values: dict[str, dict[str, Any]] = {}
        for one in others:
            values |= one.values
        return SmallStates(groups, values, self.kind)


def _options_of(groups: Sequence[ParameterGroup]) -> dict[str, Any]:
    """Those of a rank that has parameters of the group, if there is one."""
    return next((group for group in groups if group.names), groups[0]).options


def _names(ranks: Sequence[SmallStates], i: int) -> Iterator[str]:
    for one in ranks:
        yield from one.groups[i].names


@dataclass(frozen=True)
class TensorEntry:
    """In the place of a tensor of a list: it is the checkpoint's entry of this name."""

    state: str


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The first name of each of the optimizer's parameters, by id. Raises InputError for one of another model."""
    follow(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, p in enumerate(group["params"]):
            if id(p) not in names:
                raise InputError(
                    f"parameter {place} of the optimizer's group {number}, of shape {tuple(p.shape)}, is none of the "
                    "model's; give the optimizer that was made from this model's parameters()"
                )
    return names


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], SmallStates]:
    """The states of this rank's parameters: large tensors by their key in the checkpoint, and everything else.

    Raises InputError for states that belong to a part of a parameter without saying which.
    """
    names, tensors, small = names_of(model, optimizer), {}, SmallStates()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        small.groups.append(ParameterGroup(options, [names[id(p)] for p in group["params"]]))
    for parameter, state in optimizer.state.items():
        if id(parameter) not in names:
            continue
        name = names[id(parameter)]
        large: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and _is_like(key, value, parameter):
                large[key] = value
            else:
                small.values.setdefault(name, {})[key] = _without_tensors(key, value, large)
        for key, tensor in large.items():
            _check_layout(name, key, tensor, parameter)
            tensors[f"{STATE}{name}.{key}"] = _summed(tensor)
    return tensors, small


def _without_tensors(key: str, value: Any, large: dict[str, torch.Tensor]) -> Any:
    """For pickling. Tensors with dimensions go from lists, tuples and dicts to `large`, by names that begin with
    `key`; a DTensor of one number has the same on all its ranks."""
    if isinstance(value, torch.Tensor):
        if value.dim():
            large[key] = value
            return TensorEntry(key)
        return value.full_tensor() if isinstance(value, DTensor) else value
    return _mapped(value, lambda place, item: _without_tensors(f"{key}[{place}]", item, large))


def _mapped(value: Any, change: Callable[[int, Any], Any]) -> Any:
    """A list, tuple or dict with its items changed, each given its place; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(change(place, item) for place, item in enumerate(value))
    if type(value) is dict:
        return {key: change(place, item) for place, (key, item) in enumerate(value.items())}
    return value


def _summed(value: torch.Tensor) -> torch.Tensor:
    """Parts of sums added up: torch.distributed.checkpoint would save one rank's part."""
    if not isinstance(value, DTensor) or not any(one.is_partial() for one in value.placements):
        return value
    whole: torch.Tensor = value.redistribute(
        placements=[Replicate() if one.is_partial() else one for one in value.placements]
    )
    return whole


def _is_like(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is one of the parameter's entries, and no count: as a DTensor, it must stay one."""
    return value.dim() > 0 or (parameter.dim() == 0 and key != "step")


def _check_layout(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    cut = isinstance(parameter, DTensor) and any(not one.is_replicate() for one in parameter.placements)
    if cut and not isinstance(value, DTensor):
        raise InputError(
            f"the optimizer's state '{key}' of '{name}' is of a part of the parameter, but no DTensor: it cannot be "
            "saved for other plans; use an optimizer of torch.optim whose states have the parameter's shape"
        )


def state_keys(metadata: Metadata) -> dict[str, dict[str, TensorStorageMetadata]]:
    """The large states in a checkpoint, by parameter and by name of the state."""
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(STATE) and isinstance(entry, TensorStorageMetadata):
            name, _, state = key.removeprefix(STATE).rpartition(".")
            found.setdefault(name, {})[state] = entry
    return found


def targets(model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata) -> dict[str, torch.Tensor]:
    """Empty tensors for the large states of this rank's parameters, by their key in the checkpoint."""
    names, saved = names_of(model, optimizer), state_keys(metadata)
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, entry in saved.get(names[id(p)], {}).items():
                found[f"{STATE}{names[id(p)]}.{key}"] = _empty(p, entry)
    return found


def _empty(parameter: torch.Tensor, saved: TensorStorageMetadata) -> torch.Tensor:
    dtype = saved.properties.dtype
    if saved.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # a DTensor where the parameter is one
    return torch.empty(saved.size, dtype=dtype, device=parameter.device)


@contextmanager
def kept_on_error(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Inside, an error leaves the optimizer's groups and states as they were before."""
    if optimizer is None:
        yield
        return
    state, groups = optimizer.state, optimizer.param_groups  # torch's load_state_dict() puts others in their place
    options = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = state, groups
        for group, before in zip(groups, options, strict=True):
            group.clear()
            group.update(before)
        raise


def saved_options(model: nn.Module, optimizer: torch.optim.Optimizer, small: SmallStates) -> list[dict[str, Any]]:
    """What was saved for the optimizer's groups: learning rates and the like.

    Raises CheckpointError where the groups are not those that were saved.
    """
    names = names_of(model, optimizer)
    by_name = {name: i for i, group in enumerate(small.groups) for name in group.names}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    found = (_saved_group(i, own, by_name, small.groups, len(groups)) for i, own in enumerate(groups))
    return [copy.deepcopy(group.options) for group in found]


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], small: SmallStates
) -> None:
    """Give the optimizer's parameters their states. `tensors`: `targets`, filled. The options stay as they are."""
    names = names_of(model, optimizer)
    large: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(STATE).rpartition(".")
        large.setdefault(name, {})[kind] = tensor
    groups, states, number = [], {}, 0

    def filled(name: str, parameter: torch.Tensor, value: Any) -> Any:
        if isinstance(value, TensorEntry):
            value = large[name].pop(value.state)
        if isinstance(value, torch.Tensor):
            return _beside(parameter, value)
        return _mapped(value, lambda _, item: filled(name, parameter, item))

    for group in optimizer.param_groups:
        own = [names[id(p)] for p in group["params"]]
        numbers = list(range(number, number + len(own)))
        number += len(own)
        groups.append({**group, "params": numbers})
        for place, name, p in zip(numbers, own, group["params"], strict=True):
            values = {key: filled(name, p, value) for key, value in small.values.get(name, {}).items()}
            if state := {key: _beside(p, value) for key, value in large.get(name, {}).items()} | values:
                states[place] = state
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor with dimensions as one that can be computed with the parameter: a DTensor where that is one."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or not value.dim():
        return value
    mesh = parameter.device_mesh
    whole: torch.Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def _saved_group(
    i: int, names: Sequence[str], by_name: Mapping[str, int], groups: Sequence[ParameterGroup], n: int
) -> ParameterGroup:
    """The saved group that an optimizer's group i of n, with the parameters `names` on this rank, continues."""
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise CheckpointError(
            f"the checkpoint's optimizer does not have '{unknown[0]}', which this one's group {i} has"
        )
    found = {by_name[name] for name in names}
    if len(found) > 1:
        raise CheckpointError(
            f"group {i} of the optimizer has parameters that were in groups {', '.join(map(str, sorted(found)))} when "
            "the checkpoint was saved; make the optimizer with the same parameter groups"
        )
    if found:
        return groups[found.pop()]
    if n == len(groups):
        return groups[i]  # no parameter of it is on this rank
    raise CheckpointError(f"the optimizer has {n} parameter groups, the checkpoint's has {len(groups)}")
