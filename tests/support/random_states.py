"""Plans that cut optimizer states finer than parameters, and when they can."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from autopar import Plan
from autopar.plan.stage import Stage
from autopar.sharding.layouts import Placements, layouts, slices
from autopar.sharding.stage_sharding import Stored

Region = tuple[slice, ...]


def region(
    layout: Placements, order: Sequence[int], shape: Sequence[int], mesh: Sequence[int], place: Sequence[int]
) -> Region:
    """What the device at `place` has of a tensor, where the axes cut it in this order."""
    sides = ([values[axis] for axis in order] for values in (layout, mesh, place))
    cut, sizes, here = sides
    return slices(tuple(cut), shape, sizes, here)


def is_inside(inner: Region, outer: Region) -> bool:
    return all(b.start <= a.start and a.stop <= b.stop for a, b in zip(inner, outer, strict=True))


def fitting(
    layout: Placements, state: Placements, order: Sequence[int], shape: Sequence[int], mesh: Sequence[int]
) -> bool:
    """Whether every device reads what the layout says where axes cut in this order, and its state is a part of that."""
    natural = range(len(mesh))
    for place in itertools.product(*map(range, mesh)):
        read = region(layout, natural, shape, mesh, place)
        if region(layout, order, shape, mesh, place) != read:
            return False
        if not is_inside(region(state, order, shape, mesh, place), read):
            return False
    return True


def with_states(plan: Plan, model: nn.Module, seed: int) -> Plan:
    """The plan with any states, and any scattered gradients, that one order of the axes allows per stage."""
    chance = random.Random(seed)
    tensors = dict(model.named_parameters())
    stages = []
    for stage in plan.stages:
        stages.append(stage if stage.sharding is None else _with_states(stage, tensors, chance))
    return replace(plan, stages=tuple(stages))


def _with_states(stage: Stage, tensors: Mapping[str, torch.Tensor], chance: random.Random) -> Stage:
    sharding = stage.sharding
    assert sharding is not None
    mesh, natural = sharding.mesh, tuple(range(len(sharding.mesh)))
    orders = list(itertools.permutations(natural))
    chance.shuffle(orders)
    parameters = [(name, one) for name, one in sharding.parameters if name in tensors]
    order = next(
        o for o in orders if all(fitting(s.layout, s.layout, o, tensors[n].shape, mesh) for n, s in parameters)
    )
    found = []
    for name, one in sharding.parameters:
        if name in tensors:
            shape = tensors[name].shape
            finer = [
                state
                for state in layouts(shape, mesh, partial=False)
                if all(b < 0 or a == b for a, b in zip(state, one.layout, strict=True))
                and fitting(one.layout, state, order, shape, mesh)
            ]
            state = chance.choice(finer)
            one = Stored(one.layout, state, scattered=state != one.layout and chance.random() < 0.5)
        found.append((name, one))
    return replace(stage, sharding=replace(sharding, parameters=tuple(found)))
