"""An optimizer's states under the names of its parameters, and back.

Tensors with dimensions, and those of a parameter without any, are entries of the checkpoint of their own, as DTensors
where the parameter is one: `optimizer.state.layers.0.weight.exp_avg` (the names of torch's
`get_optimizer_state_dict(flatten_optimizer_state_dict=True)`). Those inside of a list, as L-BFGS keeps, have their
place in the name: `old_dirs[3]`; `[0]` is the state 0, which has a number for a name. Everything else (step counts,
None, the options of parameter groups, states of no parameter) is small and travels as one value.

A parameter without states stays without: torch's own functions would give it some, by a step with zero gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import CheckpointError, InputError
from autopar.runtime.checkpoints.packing import holds_parts, packed, unpacked
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
    shared: dict[str, bytes] | None = None  # packed, by name: states of no parameter; None: there are none

    def joined(self, others: Sequence[SmallStates]) -> SmallStates:
        """Together with what other ranks have, whose optimizers have the same groups. Raises InputError."""
        names = joined_names([[group.names for group in one.groups] for one in others])
        groups = [ParameterGroup(_options_of([one.groups[i] for one in others]), of) for i, of in enumerate(names)]
        values: dict[str, dict[str, Any]] = {}
        for one in others:
            values |= one.values
        return SmallStates(groups, values, self.kind, _joined_shared([one.shared or {} for one in others]))


def _joined_shared(ranks: Sequence[dict[str, bytes]]) -> dict[str, bytes] | None:
    differs = [name for name in dict.fromkeys(chain(*ranks)) if len({one.get(name) for one in ranks}) > 1]
    if differs:
        raise InputError(
            f"the optimizer's state '{differs[0]}', which belongs to no parameter, differs between the ranks, and a "
            "checkpoint for any plan has one for all: keep it the same on all ranks, or as a state of a parameter"
        )
    return ranks[0] or None


def _options_of(groups: Sequence[ParameterGroup]) -> dict[str, Any]:
    """Those of a rank that has parameters of the group, if there is one."""
    return next((group for group in groups if group.names), groups[0]).options


def joined_names(ranks: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """The parameters of each group on all ranks, of those on each. Raises InputError."""
    if len({len(groups) for groups in ranks}) > 1:
        counts = ", ".join(str(len(groups)) for groups in ranks)
        raise InputError(f"the ranks' optimizers differ in their number of parameter groups: {counts}")
    return [list(dict.fromkeys(chain.from_iterable(parts))) for parts in zip(*ranks, strict=True)]


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


def group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group. Raises InputError as `names_of`."""
    names = names_of(model, optimizer)
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: not its parameters, nor the names that the optimizer was given for them."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], SmallStates]:
    """The states of this rank's parameters: large tensors by their key in the checkpoint, and everything else.

    Raises InputError for states that belong to a part of a parameter without saying which, and for what a checkpoint
    cannot keep.
    """
    names, tensors = names_of(model, optimizer), {}
    small = SmallStates(
        [
            ParameterGroup(_without_parameters(group), own)
            for group, own in zip(optimizer.param_groups, group_names(model, optimizer), strict=True)
        ]
    )
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            small.shared = (small.shared or {}) | {parameter: _packed_shared(parameter, state)}
        elif id(parameter) in names:
            name = names[id(parameter)]
            large, values = _divided(name, parameter, state)
            if values:
                small.values[name] = values
            for key, tensor in large.items():
                _check_layout(name, key, tensor, parameter)
                tensors[f"{STATE}{name}.{key}"] = _summed(tensor)
        elif state:
            raise InputError(
                f"the optimizer has states of a tensor of shape {tuple(parameter.shape)} that is none of the model's "
                "parameters: delete them (del optimizer.state[tensor]), or make the optimizer anew"
            )
    return tensors, small


def _packed_shared(name: object, state: Any) -> bytes:
    """Raises InputError for a state of no parameter that a checkpoint cannot keep."""
    if not isinstance(name, str):
        raise InputError(
            f"the optimizer has a state of {name!r}, of type {type(name).__name__}, which is no parameter: use a text"
        )
    if holds_parts(state):
        raise InputError(
            f"the optimizer's state '{name}', which belongs to no parameter, has DTensors: they are this rank's parts, "
            "which no other plan could go on with; keep them as states of a parameter of their shape"
        )
    return packed(state)


def _divided(
    name: str, parameter: torch.Tensor, state: Mapping[Any, Any]
) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """Large states of a parameter by their names in the checkpoint, and everything else."""
    large: dict[str, torch.Tensor] = {}
    values: dict[Any, Any] = {}

    def put(entry: str, tensor: torch.Tensor) -> TensorEntry:
        if entry in large:
            raise InputError(f"two of the optimizer's states of '{name}' have the name '{entry}': rename one of them")
        large[entry] = tensor
        return TensorEntry(entry)

    def without_tensors(entry: str, value: Any) -> Any:
        """For pickling. Tensors with dimensions go from lists, tuples and dicts to the large ones, by names that begin
        with `entry`; a DTensor of one number has the same on all its ranks."""
        if isinstance(value, torch.Tensor):
            if value.dim():
                return put(entry, value)
            return value.full_tensor() if isinstance(value, DTensor) else value
        return _mapped(value, lambda place, item: without_tensors(f"{entry}[{place}]", item))

    for key, value in state.items():
        if not isinstance(key, (str, int)):
            raise InputError(
                f"the optimizer's state {key!r} of '{name}' is named by a value of type {type(key).__name__}: use a "
                "text or a number"
            )
        entry = key if isinstance(key, str) else f"[{key}]"
        if isinstance(value, torch.Tensor) and _is_like(key, value, parameter):
            of = put(entry, value)
            if entry != key:
                values[key] = of
        else:
            values[key] = without_tensors(entry, value)
    if isinstance(parameter, DTensor) and holds_parts(values):
        raise InputError(
            f"the optimizer's states of '{name}' have DTensors inside of something else than a list, a tuple or a "
            "dict, where no other plan could go on with them: keep them in one of these"
        )
    return large, values


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


def _is_like(key: str | int, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is one of the parameter's entries, and no count: as a DTensor, it must stay one."""
    return value.dim() > 0 or (parameter.dim() == 0 and key != "step")


def _check_layout(name: str, key: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    cut = isinstance(parameter, DTensor) and any(not one.is_replicate() for one in parameter.placements)
    if cut and not isinstance(value, DTensor):
        raise InputError(
            f"the optimizer's state '{key}' of '{name}' is of a part of the parameter, but no DTensor: it cannot be "
            "saved for other plans; use an optimizer of torch.optim whose states have the parameter's shape"
        )


def state_keys(metadata: Metadata, small: SmallStates) -> dict[str, dict[str, TensorStorageMetadata]]:
    """The large states in a checkpoint, by parameter and by name of the state. Both names may have dots."""
    parameters = {name for group in small.groups for name in group.names}
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(STATE) and isinstance(entry, TensorStorageMetadata):
            both = key.removeprefix(STATE)
            dots = [place for place, sign in enumerate(both) if sign == "."]
            dot = next((place for place in dots if both[:place] in parameters), dots[-1])
            found.setdefault(both[:dot], {})[both[dot + 1 :]] = entry
    return found


Targets = dict[str, dict[str, torch.Tensor]]  # large states by parameter and by name of the state


def targets(model: nn.Module, optimizer: torch.optim.Optimizer, metadata: Metadata, small: SmallStates) -> Targets:
    """Empty tensors for the large states of this rank's parameters."""
    names, saved = names_of(model, optimizer), state_keys(metadata, small)
    return {
        names[id(p)]: {key: _empty(p, entry) for key, entry in saved.get(names[id(p)], {}).items()}
        for group in optimizer.param_groups
        for p in group["params"]
    }


def by_key(states: Targets) -> dict[str, Any]:
    """By their key in the checkpoint."""
    return {f"{STATE}{name}.{key}": tensor for name, of in states.items() for key, tensor in of.items()}


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


def saved_options(groups: Sequence[Sequence[str]], small: SmallStates) -> list[dict[str, Any]]:
    """What was saved for an optimizer's groups, given their parameters on all ranks: learning rates and the like.

    Raises CheckpointError where the groups are not those that were saved.
    """
    by_name = {name: i for i, group in enumerate(small.groups) for name in group.names}
    found = [_saved_group(i, names, by_name) for i, names in enumerate(groups)]
    others = [i for i in range(len(small.groups)) if i not in found]
    if None in found and found.count(None) != len(others):
        raise CheckpointError(
            f"group {found.index(None)} of the optimizer's {len(groups)} has no parameters that say which of the "
            f"checkpoint's {len(small.groups)} groups it continues; make the optimizer with the same parameter groups"
        )
    numbers = [others.pop(0) if one is None else one for one in found]
    return [copy.deepcopy(_without_parameters(small.groups[number].options)) for number in numbers]


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, large: Targets, small: SmallStates) -> None:
    """Give the optimizer's parameters their states. `large`: `targets`, filled. The options stay as they are."""
    names, number, groups = names_of(model, optimizer), 0, []
    states: dict[Any, Any] = {name: unpacked(state) for name, state in (small.shared or {}).items()}

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


def _saved_group(i: int, names: Sequence[str], by_name: Mapping[str, int]) -> int | None:
    """The saved group that an optimizer's group `i` with these parameters continues; None where it has none."""
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
    return found.pop() if found else None
