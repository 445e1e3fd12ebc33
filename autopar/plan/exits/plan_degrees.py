"""The degrees that a plan has, whoever made it, and what degrees do not say of it.

A mesh axis of a stage counts as

    data      no parameter is read in parts along it, and activations that are cut along it stay where they are
    tensor    parameters are read in parts along it
    data      as well where most operators cut samples (the first dimension), and few read a parameter in parts, such as
              the head of a vocabulary; what these do is named. Where both kinds are many, no degree describes the axis.

The axes of a plan by hand are called what they are. Along its "data", replicas may exchange activations for operators
that cannot cut samples (attention that folds them, experts that mix them), and along its "tensor" a stage may cut
nothing. Both are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.errors.names import few
from autopar.plan.assumptions import Assumptions
from autopar.plan.degrees import Degrees
from autopar.plan.exits.configuration import NotExpressed, refuse
from autopar.plan.recompute import NAMES, Recompute
from autopar.sharding.layouts import PARTIAL, Placements
from autopar.sharding.stage_sharding import StageSharding

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.plan.stage import Stage

KEEPS_LESS = (Recompute.NONE, Recompute.SELECTIVE, Recompute.OPERATORS, Recompute.FULL, Recompute.STAGE)
"""Each keeps no more than those before it."""

_FIRST_DIMENSION = 0
_MOST, _FEW = 0.75, 0.25  # shares of the operators that are cut along an axis
_PRODUCTS = ("linear", "addmm", "mm", "matmul", "conv", "embedding")  # begin the names of operators
_TENSOR = "tensor"  # the axis of a plan by hand that cuts parameters; heads may be part of a first dimension there
_DATA = "data"  # that of its replicas


def degrees_in(plan: Plan, tool: str) -> Degrees:
    """The degrees of a plan. Where stages recompute differently, that of the stage which stores the fewest activations.

    Raises PlanError that lists why no degrees describe the plan. `tool`: who needs them.
    """
    problems = list(_no_degrees(plan))
    refuse(tool, problems)
    first = plan.stages[0]
    data, tensor = _widths(first)
    assert plan.batch_size is not None
    shardings = [stage.sharding for stage in plan.stages if stage.sharding is not None]
    return Degrees(
        tensor=tensor,
        pipeline=plan.ranks,
        data=first.replicas * data,
        micro_batch=plan.batch_size // plan.n_microbatches // data,
        schedule=plan.schedule,
        chunks=plan.chunks,
        zero=max((zero_of(sharding) for sharding in shardings), default=0),
        recompute=NAMES[max((stage.mode for stage in plan.stages), key=KEEPS_LESS.index)],
        sequence_parallel=any(_scatters_activations(sharding) for sharding in shardings),
        batch=plan.batch_size,
    )


def beyond_degrees(plan: Plan, degrees: Degrees) -> Iterator[NotExpressed]:
    """What a plan decides otherwise than its degrees say, for tools that have no more than degrees."""
    in_order = list(plan.used_devices)
    unused = [name for name in plan.devices if name not in set(in_order)]
    if unused:
        are, them = ("is", "it") if len(unused) == 1 else ("are", "them")
        processes = f"{len(in_order)} process{'es' if len(in_order) > 1 else ''}"
        yield NotExpressed("devices", f"{few(unused)} {are} not used: start {processes} without {them}")
    if in_order != [name for name in plan.devices if name not in set(unused)] or _tensor_is_not_last(plan):
        yield NotExpressed("devices", f"ranks 0, 1, ... are not {few(in_order)} in this order: the tool numbers ranks")
    modes = [NAMES[stage.mode] for stage in plan.stages]
    if len(set(modes)) > 1:
        each = ", ".join(f"stage {s} {mode}" for s, mode in enumerate(modes))
        chosen = f"{degrees.recompute} for all stages, which stores the fewest activations"
        yield NotExpressed("recompute", f"the plan has {each}; the configuration has {chosen}")
    yield from _strategies(plan)
    yield from _whole_states(plan, degrees)
    if plan.one_worker:
        yield NotExpressed("one worker", "one worker would do all actions, as operators are too small for several")
    default = Assumptions()
    if plan.assumed is not None:
        other = {name: value for name, value in vars(plan.assumed).items() if value != vars(default)[name]}
        other.pop("precision", None)  # each tool writes it
        for name, value in other.items():
            yield NotExpressed(name, f"the plan was priced with {name}={value}: set the same in the tool")


def _no_degrees(plan: Plan) -> Iterator[str]:
    if not plan.training:
        yield "the plan is for inference; plan in training mode"
    if plan.batch_size is None:
        yield "the plan was made for no call; price it first: autopar.plan(model, devices, plan=plan, example_args=...)"
    sizes = [len(stage.devices) for stage in plan.stages]
    if len(set(sizes)) > 1:
        each = ", ".join(f"stage {s} has {n}" for s, n in enumerate(sizes))
        yield f"stages have different numbers of devices: {each}; plan with stages of one width"
        return
    replicas, found = {stage.replicas for stage in plan.stages}, set()
    for number, stage in enumerate(plan.stages):
        unclear = _unclear_axes(stage)
        yield from (f"stage {number}: {text}" for text in unclear)
        if not unclear:
            found.add(_widths(stage))
    if len(found) > 1 or len(replicas) > 1:
        each = "; ".join(f"stage {s} {_mesh_text(stage)}" for s, stage in enumerate(plan.stages))
        yield f"stages share their work in different ways: {each}"
        return
    if plan.batch_size is None or not found:
        return
    data, m, r = next(iter(found))[0], plan.n_microbatches, plan.stages[0].replicas
    if plan.batch_size % m:
        yield f"{m} micro-batches of {plan.batch_size} samples have different sizes; give a divisor of the batch"
    elif plan.batch_size // m % data:
        yield f"micro-batches of {plan.batch_size // m} samples are not cut evenly over {data} devices"
    if m % r:
        yield f"{m} micro-batches do not go evenly round {r} replicas; give a multiple of {r}"


def _mesh_text(stage: Stage) -> str:
    mesh = stage.sharding
    shards = (
        ""
        if mesh is None
        else f" of a mesh {' x '.join(f'{a}={n}' for a, n in zip(mesh.axes, mesh.mesh, strict=True))}"
    )
    return f"has {stage.replicas} replica{'s' if stage.replicas != 1 else ''}{shards}"


def _widths(stage: Stage) -> tuple[int, int]:
    """Devices of a mesh of the stage that are replicas, and that cut tensors."""
    data = tensor = 1
    for axis, size in enumerate(stage.sharding.mesh if stage.sharding is not None else ()):
        assert stage.sharding is not None
        if _cuts_tensors(stage.sharding, axis):
            tensor *= size
        else:
            data *= size
    return data, tensor


def _unclear_axes(stage: Stage) -> list[str]:
    """What is said of mesh axes along which devices are neither replicas nor cut parameters."""
    sharding = stage.sharding
    found = []
    for axis, size in enumerate(sharding.mesh if sharding is not None else ()):
        assert sharding is not None
        name, in_parts = sharding.axes[axis], _read_in_parts(sharding, axis)
        if in_parts and name != _TENSOR and _is_mixed(sharding, axis, len(in_parts)):
            found.append(
                f"along axis '{name}' of its mesh some operators cut samples, and others parameters ({few(in_parts)})"
            )
        if size == 1 or in_parts or _cuts_tensors(sharding, axis):
            continue
        moved = list(dict.fromkeys(_moved(sharding, axis)))
        if moved and name != _DATA:
            found.append(
                f"devices along axis '{name}' of its mesh cut no parameter, but exchange {few(moved)}: they are "
                "neither replicas nor tensor parallel (a sequence may be cut along it)"
            )
        elif not _cut_along(sharding, axis):
            found.append(f"devices along axis '{name}' of its mesh all do the same")
    return found


def _is_mixed(sharding: StageSharding, axis: int, in_parts: int) -> bool:
    """Whether along an axis many operators cut samples, and others read many parameters in parts."""
    share = _samples_share(sharding, axis)
    products = sum(_is_product(key) for key, _ in sharding.strategies)
    return _FEW < share <= _MOST or (share > _MOST and in_parts > _FEW * products > 0)


def _is_product(key: str) -> bool:
    """Whether an operator reads a matrix: most of a model's work and parameters, if a small part of its operators."""
    return key.rpartition("/")[2].partition("#")[0].startswith(_PRODUCTS)


def _cuts_tensors(sharding: StageSharding, axis: int) -> bool:
    """Whether an axis counts as one that cuts tensors."""
    in_parts, samples = bool(_read_in_parts(sharding, axis)), _samples_share(sharding, axis) > _MOST
    return in_parts or not samples if sharding.axes[axis] == _TENSOR else in_parts and not samples


def _samples_share(sharding: StageSharding, axis: int) -> float:
    """Of the operators whose results are cut along an axis, the share that cuts the first dimension."""
    cut = [{p[axis] for p in outputs if p[axis] >= 0} for _, (_, outputs) in sharding.strategies]
    cut = [dims for dims in cut if dims]
    return sum(_FIRST_DIMENSION in dims for dims in cut) / len(cut) if cut else 0.0


def _read_in_parts(sharding: StageSharding, axis: int) -> list[str]:
    """Parameters that an operator reads in parts along an axis."""
    moved: dict[str, list[Placements]] = {}
    for one in sharding.redistributions:
        moved.setdefault(one.tensor, []).append(one.own.forward[-1] if one.own.forward else one.shared.forward[-1])
    inputs = _inputs(sharding)
    return [
        name
        for name, stored in sharding.parameters
        if name not in inputs and any(p[axis] >= 0 for p in moved.get(name, [stored.layout]))
    ]


def _inputs(sharding: StageSharding) -> set[str]:
    """The stored tensors that are inputs of the model: they have no gradient to go back."""
    used = {one.tensor for one in sharding.redistributions}
    return used - {one.tensor for one in sharding.redistributions if one.shared.backward or one.own.backward}


def _moved(sharding: StageSharding, axis: int) -> Iterator[str]:
    """Activations whose parts devices exchange along an axis, on their way to another operator."""
    for one in sharding.redistributions:
        if "/" not in one.tensor or not one.reader:
            continue
        sides = (one.shared.forward, one.own.forward)
        if any(a[axis] >= 0 and a[axis] != b[axis] for side in sides for a, b in itertools.pairwise(side)):
            yield one.tensor


def _scatters_activations(sharding: StageSharding) -> bool:
    """Whether sums over parts of tensors leave each device a part: reduce-scatters in place of all-reduces.

    A sum that is scattered on its way and then gathered is whole where it is read. Sums of gradients alone say nothing:
    those of a tensor that is gathered for its readers go back to its parts.
    """
    tensor = [axis for axis in range(len(sharding.mesh)) if _cuts_tensors(sharding, axis)]
    return any(
        side and side[-1][axis] >= 0 and any(layout[axis] == PARTIAL for layout in side)
        for axis in tensor
        for one in sharding.redistributions
        if "/" in one.tensor
        for side in (one.shared.forward, one.own.forward)
    )


def replica_axes(sharding: StageSharding) -> list[int]:
    """The mesh axes whose devices are replicas."""
    return [axis for axis, size in enumerate(sharding.mesh) if size > 1 and not _cuts_tensors(sharding, axis)]


def zero_of(sharding: StageSharding) -> int:
    """The ZeRO stage: the most that is cut of any parameter over replicas."""
    axes = replica_axes(sharding)
    found = 0
    in_parts = {(name, axis) for axis in axes for name in _read_in_parts(sharding, axis)}
    for name, stored in sharding.parameters:
        whole = [axis for axis in axes if (name, axis) not in in_parts]
        if any(stored.layout[axis] >= 0 for axis in whole):
            return 3
        if any(stored.state[axis] >= 0 for axis in whole):
            found = max(found, 2 if stored.scattered else 1)
    return found


def _tensor_is_not_last(plan: Plan) -> bool:
    """Whether devices that cut tensors are further apart than replicas."""
    for stage in plan.stages:
        if stage.sharding is not None:
            cut = [axis for axis, n in enumerate(stage.sharding.mesh) if n > 1 and _cuts_tensors(stage.sharding, axis)]
            data = replica_axes(stage.sharding)
            if cut and data and min(cut) < max(data):
                return True
    return False


def _strategies(plan: Plan) -> Iterator[NotExpressed]:
    """Strategies of operators, which tools choose by rules of their own for the models that they know."""
    n_cut, samples = 0, []
    for stage in plan.stages:
        sharding = stage.sharding
        axes = (
            [] if sharding is None else [a for a, n in enumerate(sharding.mesh) if n > 1 and _cuts_tensors(sharding, a)]
        )
        for key, (inputs, outputs) in sharding.strategies if sharding is not None and axes else ():
            if any(p[axis] != -1 for axis in axes for p in (*inputs, *outputs)):
                n_cut += 1
            if any(p[axis] == _FIRST_DIMENSION for axis in axes for p in outputs):
                samples.append(key)
    if n_cut:
        yield NotExpressed(
            "strategies",
            f"how {n_cut} operators are cut is not passed on: the tool cuts by rules of its own for the models that it "
            "knows, which Plan.by_hand follows, too",
        )
    in_parts = [
        name
        for stage in plan.stages
        if stage.sharding is not None
        for axis in replica_axes(stage.sharding)
        for name in _read_in_parts(stage.sharding, axis)
    ]
    if in_parts:
        yield NotExpressed(
            "strategies", f"{few(list(dict.fromkeys(in_parts)))} are cut over replicas, which the tool keeps whole"
        )
    yield from beside_degrees(plan)
    if samples:
        yield NotExpressed(
            "strategies",
            f"{few(samples)} are cut along their first dimension, the samples in most models, on devices that cut "
            "tensors; the tool cuts heads and columns",
        )


def beside_degrees(plan: Plan) -> Iterator[NotExpressed]:
    """What operators that cannot follow the degrees of a plan by hand do, and no tool does."""
    moved: dict[str, None] = {}
    for number, stage in enumerate(plan.stages):
        if stage.sharding is None:
            continue
        for axis in replica_axes(stage.sharding):
            moved |= dict.fromkeys(_moved(stage.sharding, axis))
        cut = [axis for axis in range(len(stage.sharding.mesh)) if _cuts_tensors(stage.sharding, axis)]
        if any(not _cut_along(stage.sharding, axis) for axis in cut):
            yield NotExpressed(
                "strategies",
                f"devices along axis '{_TENSOR}' of stage {number} all do the same, as no operator there can be cut",
            )
    if moved:
        yield NotExpressed(
            "strategies",
            f"replicas exchange {few(list(moved))} for operators that cannot cut samples; the tool's replicas compute "
            "with samples of their own alone",
        )


def _cut_along(sharding: StageSharding, axis: int) -> bool:
    """Whether an operator's result is in parts along an axis."""
    return any(p[axis] >= 0 for _, (_, outputs) in sharding.strategies for p in outputs)


def _whole_states(plan: Plan, degrees: Degrees) -> Iterator[NotExpressed]:
    """Parameters that ZeRO cuts less than its stage says."""
    whole: list[str] = []
    for stage in plan.stages if degrees.zero else ():
        if stage.sharding is not None:
            axes = replica_axes(stage.sharding)
            whole += [name for name, stored in stage.sharding.parameters if not any(stored.state[a] >= 0 for a in axes)]
    inputs = {name for stage in plan.stages if stage.sharding is not None for name in _inputs(stage.sharding)}
    whole = [name for name in dict.fromkeys(whole) if name not in inputs]
    if whole:
        yield NotExpressed("zero", f"not cut over replicas: {few(whole)}; the tool cuts every parameter")
