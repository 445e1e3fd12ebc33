"""The initial values of a model that was built without them, wholly or on some ranks.

```
   parallelize      which tensors lack values? where will they come from?       hollow tensors in their place
   the first call   captured, planned and placed: every rank holds its parts
                    the source fills these parts                                -> the call runs
```
In one process the values come at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.module_state import named_tensors
from autopar.errors import InputError
from autopar.runtime.checkpoints.participants import Participants, participants
from autopar.runtime.checkpoints.saving import wait_for_saving
from autopar.runtime.initial_values.missing_values import give_memory, is_hollow, make_hollow, tensors_without_values
from autopar.runtime.initial_values.sources import FirstRankSource, FunctionSource, InitFunction, Source, source_at

Weights = str | os.PathLike[str] | None
_ADVICE = (
    "load the model's weights, or give weights= (a directory of autopar.save, or safetensors) or init_fn=; or give "
    "autopar.plan a Cluster.preset(...) to plan ahead"
)


class _Origin(NamedTuple):
    """Where the values of a tensor come from."""

    source: Source
    key: str  # the tensor's name there: another one of a tied tensor, perhaps


@dataclass(frozen=True)
class InitialValues:
    """What will fill which tensors, by their first names."""

    team: Participants
    origins: Mapping[str, _Origin]

    def fill(self, model: nn.Module) -> None:
        """Give values to what this rank has of the model. Collective. Raises the same error on all ranks."""
        wait_for_saving()  # which uses the same process group
        own: dict[str, torch.Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in self.origins:
                if not isinstance(tensor, DTensor) and is_hollow(tensor):  # not on ranks
                    give_memory(tensor)
                own[name] = tensor
        for source in dict.fromkeys(origin.source for origin in self.origins.values()):
            mine = {self.origins[n].key: tensor for n, tensor in own.items() if self.origins[n].source is source}
            self.team.done("the initial values could not be read", partial(source.fill, mine))


def initial_values(
    model: nn.Module, weights: Weights, init_fn: InitFunction | None, *, ranked: bool, has_plan: bool
) -> InitialValues | None:
    """What gives values to the model; None if all ranks have them. Tensors without values become hollow.

    `ranked`: every rank of several calls it. Raises InputError, the same on all ranks.
    """
    team = participants() if ranked else Participants(0, 1, None)
    lacking = team.done("the model's tensors could not be inspected", lambda: tensors_without_values(model))
    everywhere = team.gathered({name: tuple(tensor.shape) for name, tensor in lacking.items()})
    shapes = {name: shape for of_rank in everywhere for name, shape in of_rank.items()}
    if not shapes:
        if weights is not None or init_fn is not None:
            raise InputError(
                "weights= and init_fn= are for models on the meta device, and this one has values: build it under "
                "torch.device('meta'), or load with autopar.load after parallelize"
            )
        return None
    if ranked and everywhere[0] and not has_plan:
        raise InputError(
            f"'{next(iter(everywhere[0]))}' has no values on rank 0, so nothing can be measured there: give plan= "
            "(Plan.from_split, Plan.load, or from autopar.plan for a cluster), or build the model with values on rank 0"
        )
    chosen = _origins(team, model, shapes, everywhere[0], weights, init_fn)
    make_hollow(model, lacking.values())
    return InitialValues(team, chosen)


def _origins(
    team: Participants,
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    on_first: Mapping[str, tuple[int, ...]],
    weights: Weights,
    init_fn: InitFunction | None,
) -> dict[str, _Origin]:
    """By name. What the weights lack is left to the function. Raises InputError for what nothing has."""
    found: dict[str, _Origin] = {}
    if weights is not None:
        source = source_at(team, weights)
        known = team.done(f"weights={str(weights)!r} cannot be read", source.shapes) or {}
        keys = _keys(model, shapes, known, str(weights))
        found |= {name: _Origin(source, key) for name, key in keys.items()}
    if init_fn is not None:
        (seed, *_) = team.gathered(torch.initial_seed())
        function = FunctionSource(init_fn, seed)
        found |= {name: _Origin(function, name) for name in shapes if name not in found}
    elif weights is None and not on_first and team.size > 1:
        first = FirstRankSource(team, model, list(shapes))
        found |= {name: _Origin(first, name) for name in shapes}
    missing = [f"'{name}'" for name in shapes if name not in found]
    if missing:
        if weights is None:
            more = f", as {len(missing) - 1} more are" if len(missing) > 1 else ""
            raise InputError(f"{missing[0]} has no values (it is on the meta device{more}): {_ADVICE}")
        raise InputError(f"{str(weights)!r} lacks {_few(missing)}; give init_fn=, too, which makes what is not there")
    return found


def _keys(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, str]:
    """Under which name a source has the tensors among `shapes`, if it does. Raises InputError for other shapes."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    keys = {aliases[0]: key for aliases in names.values() if (key := next((a for a in aliases if a in known), None))}
    wrong = [
        f"'{keys[name]}' ({known[keys[name]]}, in the model {shape})"
        for name, shape in shapes.items()
        if name in keys and known[keys[name]] != shape
    ]
    if wrong:
        raise InputError(f"{where!r} is of another model: the shape differs of {_few(wrong)}")
    return {name: keys[name] for name in shapes if name in keys}


def _few(texts: Iterable[str]) -> str:
    first, more = list(texts)[:3], list(texts)[3:]
    return ", ".join(first) + (f" and {len(more)} more" if more else "")
