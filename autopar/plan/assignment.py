"""The stage of every operator of a program, from the operators or the modules that a plan lists.

A plan must keep three orders, which data flow alone does not show in full:

    input   an operator runs on the stage of its inputs or later
    group   operators that share memory that is overwritten run on one stage, and so do an operator that returns a tuple
            of tensors and those that take items out of it
    write   an operator that overwrites memory runs on the stage of the earlier readers of that memory or later

Operators that the plan leaves open are moved to later stages until all three hold. What takes an item out of a tuple
computes nothing: where a plan lists it later than the tuple, it runs where the tuple is, and the item is sent. Hooks
follow their module: those before it run on the stage where the module begins, those after it where it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from autopar.analysis.operators import (
    compute_nodes,
    fused_groups,
    is_getitem,
    operator_keys,
    replicable_nodes,
    write_order,
)
from autopar.capture.mode_blocks.calls import nested_block
from autopar.capture.mode_blocks.inlined import KEPT
from autopar.capture.module_hooks import is_entry, is_hook_point
from autopar.capture.node_names import describe, module_path
from autopar.capture.program import Program
from autopar.capture.uncaptured import opaque_around
from autopar.errors import PlanError
from autopar.errors.names import few, similar
from autopar.hints.module_paths import nearest

Storages = Mapping[str, frozenset[int]]

_MOST_PATHS = 8  # modules in a message
_MOST_MISSPELT = 6  # operators in a message
_ALIKE = 0.8  # share of equal letters of names that are alike


def by_operators(
    stages: Sequence[Sequence[str]], program: Program, storages: Storages, *, strict: bool
) -> dict[fx.Node, int]:
    """From the keys of each stage's operators. Operators that are not listed follow their inputs.

    `storages` (of `batching.study`): the memory of every value. `strict`: refuse a plan that lists an operator too
    early for the three orders. Otherwise such an operator is moved, too.

    Raises PlanError where the program has none of these operators, and with `strict` where the plan contradicts it.
    """
    listed = {key: index for index, operators in enumerate(stages) for key in operators}
    keys = operator_keys(program)
    if len(stages) > 1 and not any(key in listed for key in keys.values()):
        raise PlanError(
            f"the plan names no operator of this model: it was made for another one, with {few(list(listed))}; "
            f"this model has {few(list(keys.values()))}"
        )
    stage_of = {node: listed.get(keys[node], 0) for node in compute_nodes(program.graph)}
    moved = _settle(stage_of, program, storages, {node for node in stage_of if keys[node] in listed})
    if strict:
        _refuse(moved, {node: listed[keys[node]] for node in moved if keys[node] in listed}, keys)
    return stage_of


def operators_of_stages(stage_of: Mapping[fx.Node, int], program: Program, n_stages: int) -> list[tuple[str, ...]]:
    """The keys of each stage's operators, in program order, without those that are computed where they are needed."""
    keys, free = operator_keys(program), replicable_nodes(program)
    return [
        tuple(keys[node] for node, stage in stage_of.items() if stage == s and node not in free)
        for s in range(n_stages)
    ]


def by_modules(split: Mapping[str, int], program: Program, storages: Storages) -> dict[fx.Node, int]:
    """From module paths; the most specific path counts, and other operators follow their inputs.

    Raises PlanError for a path without operators, and where an operator would run too early for the three orders.
    """
    keys = operator_keys(program)
    paths = {node: nearest(keys[node].rpartition("/")[0], split) for node in compute_nodes(program.graph)}
    stage_of = {node: split[path] if path is not None else 0 for node, path in paths.items()}
    moved = _settle(stage_of, program, storages, {node for node, path in paths.items() if path is not None})
    named = {node: path for node, path in paths.items() if path is not None}
    _refuse(moved, {node: split[named[node]] for node in moved if node in named}, named)
    _check_used(split, set(named.values()), sorted({key.rpartition("/")[0] for key in keys.values()}), program)
    return stage_of


def check_listed(stages: Sequence[Sequence[str]], stage_of: Mapping[fx.Node, int], program: Program) -> None:
    """Raise PlanError for an operator that a plan lists in another stage than its split of the modules, `stage_of`."""
    keys, free = operator_keys(program), replicable_nodes(program)
    listed = {key: index for index, operators in enumerate(stages) for key in operators}
    for node, stage in stage_of.items():
        if node not in free and not is_getitem(node) and listed.get(keys[node], stage) != stage:
            raise PlanError(
                f"stage {listed[keys[node]]} lists '{keys[node]}', which the plan's split of modules puts on stage "
                f"{stage}; "
                "take the operators or the split out of the plan"
            )


def unknown_operators(stages: Sequence[Sequence[str]], program: Program) -> list[str]:
    """Sentences about operators that stages list and the program does not have.

    Raises PlanError for those that are misspelt: no operator of the program has this name, and the module has one with
    a similar name that the plan does not list. Other captures may number operators differently, or have fewer of them.
    """
    keys = set(operator_keys(program).values())
    listed = {key: stage for stage, operators in enumerate(stages) for key in operators}
    names = {_name(key) for key in keys}
    unlisted: dict[str, list[str]] = defaultdict(list)
    for key in keys - listed.keys():
        unlisted[key.rpartition("/")[0]].append(key)
    unknown = {key: stage for key, stage in listed.items() if key not in keys}
    misspelt: list[str] = []
    for key, stage in unknown.items():
        if _name(key) in names or len(misspelt) == _MOST_MISSPELT:
            continue  # first, as a search for similar names takes its time
        meant = similar(key, unlisted[key.rpartition("/")[0]], most=1, alike=_ALIKE)
        if meant:
            misspelt.append(f"stage {stage} lists '{key}', which the model does not have; {meant}")
    if misspelt:
        raise PlanError("\n  ".join(misspelt))
    return [f"the plan lists {few(list(unknown))}, which this call does not run"] if unknown else []


def _name(key: str) -> str:
    """`linear` of `encoder.fc1/linear#0`."""
    return key.rpartition("/")[2].rpartition("#")[0]


class _Move(NamedTuple):
    """Why an operator was moved to a later stage."""

    stage: int
    why: str  # the order that demands it
    other: fx.Node  # the operator that it follows


def _settle(
    stage_of: dict[fx.Node, int], program: Program, storages: Storages, requested: Collection[fx.Node]
) -> dict[fx.Node, _Move]:
    """Move operators to later stages until the three orders hold. Returns the first reason for every one moved.

    `requested`: nodes whose stage the plan states. Whatever it states of the hooks of a module, those before the module
    run where it begins, and those after it where it ends.
    """
    # Replicable nodes (positions, masks) are computed where they are needed: they hold no reader back.
    free = replicable_nodes(program)
    bound = [node for node in stage_of if node not in free]
    groups = [[n for n in stage_of if n in group and n not in free] for group in fused_groups(program, dict(storages))]
    writes = [pair for pair in write_order(program, dict(storages)) if not free.intersection(pair)]
    hooks = {n for n in stage_of if is_hook_point(n) or (is_getitem(n) and is_hook_point(n.all_input_nodes[0]))}
    for node, stage in stage_of.items():
        if node in hooks:
            stage_of[node] = 0
        elif is_getitem(node) and node.all_input_nodes[0] in requested:
            stage_of[node] = min(stage, stage_of[node.all_input_nodes[0]])
    moved: dict[fx.Node, _Move] = {}
    settled = False

    def follow(node: fx.Node, other: fx.Node, why: str) -> None:
        nonlocal settled
        if stage_of[node] < stage_of[other]:
            stage_of[node], settled = stage_of[other], False
            moved.setdefault(node, _Move(stage_of[other], why, other))

    while not settled:
        settled = True
        for node in stage_of:
            for source in node.all_input_nodes:
                if source in stage_of and source not in free:
                    follow(node, source, "it reads")
        for group in groups:
            last = max(group, key=lambda n: stage_of[n], default=None)
            for node in group:
                assert last is not None
                follow(node, last, "it shares a tuple of tensors, or memory that is overwritten, with")
        for reader, writer in writes:
            follow(writer, reader, "it overwrites what is read before by")
        if settled:
            for node in filter(is_entry, reversed(stage_of)):
                readers = [reader for item in node.users for reader in item.users if reader in stage_of]
                first = min(
                    (reader for reader in readers if reader not in free), key=stage_of.__getitem__, default=node
                )
                follow(node, first, "it runs with")
    return {node: moved[node] for node in bound if node in moved and node not in hooks}


def _refuse(moved: Mapping[fx.Node, _Move], wanted: Mapping[fx.Node, int], names: Mapping[fx.Node, str]) -> None:
    """Raise PlanError if an operator was moved away from the stage that the plan wants it on."""
    for node, stage in wanted.items():
        move = moved[node]
        other = f"'{names[move.other]}', " if move.other in names else ""
        raise PlanError(
            f"'{names[node]}' is on stage {stage}, but {move.why} {other}{describe(move.other)} on stage "
            f"{move.stage}; values only flow to later stages, so put '{names[node]}' on stage {move.stage} or later"
        )


def _check_used(split: Mapping[str, int], used: set[str], paths: Sequence[str], program: Program) -> None:
    """Raise PlanError for modules of the split that have no operators; `paths` are those that have."""
    unknown = [
        path
        for path in sorted(set(split) - used)
        if not any(other == path or other.startswith(path + ".") for other in paths)
    ]
    if unknown:
        around = opaque_around(program.graph_module, unknown[0])
        if around is not None:
            raise PlanError(
                f"'{unknown[0]}' cannot be a stage of its own: module '{around or '(root)'}' runs uncaptured, as one "
                "operator"
            )
        block = _block_around(program, unknown[0])
        if block is not None:
            why = f", because {block.meta[KEPT]}" if KEPT in block.meta else ""
            raise PlanError(
                f"'{unknown[0]}' cannot be a stage of its own: it runs in a block under an autocast or grad mode of "
                f"its own, {describe(block)}, which is one operator{why}"
            )
        more = " ..." if len(paths) > _MOST_PATHS else ""
        raise PlanError(
            f"no operator of the model runs in {', '.join(map(repr, unknown))}; "
            f"modules are {', '.join(path or '(root)' for path in paths[:_MOST_PATHS])}{more}"
        )


def _block_around(program: Program, path: str) -> fx.Node | None:
    """The block of the model's code, of several operators, that calls the module `path`."""

    def calls(graph: fx.Graph) -> bool:
        return any(
            f"{module_path(node)}.".startswith(f"{path}.")
            or ((inner := nested_block(node)) is not None and calls(inner[0].graph))
            for node in compute_nodes(graph)
        )

    blocks = ((node, nested_block(node)) for node in compute_nodes(program.graph))
    return next((node for node, block in blocks if block is not None and calls(block[0].graph)), None)
