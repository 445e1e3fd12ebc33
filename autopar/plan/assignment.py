"""The stage of every operator of a program, from the operators or the modules that a plan lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.analysis.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.capture.program import Program, describe
from autopar.errors import PlanError
from autopar.hints.module_paths import few, nearest

_MOST_PATHS = 8  # modules in a message


def by_operators(stages: Sequence[Sequence[str]], program: Program, *, strict: bool) -> dict[fx.Node, int]:
    """From the keys of each stage's operators. Operators that are not listed follow their inputs.

    `strict`: an operator must not be listed before one of its inputs. Otherwise it follows them, too: in a capture of
    the other mode (training or evaluation) the same key may belong to another operator.

    Raises PlanError where the program has none of these operators, and with `strict` where the plan contradicts it.
    """
    listed = {key: index for index, operators in enumerate(stages) for key in operators}
    keys = operator_keys(program)
    if len(stages) > 1 and not any(key in listed for key in keys.values()):
        raise PlanError(
            f"the plan names no operator of this model: it was made for another one, with {few(list(listed))}; "
            f"this model has {few(list(keys.values()))}"
        )
    # Replicable nodes (positions, masks) are computed where they are needed: they hold no reader back.
    free = replicable_nodes(program)
    stage_of: dict[fx.Node, int] = {}
    for node in compute_nodes(program.graph):
        inputs = [n for n in node.all_input_nodes if n in stage_of and n not in free]
        latest = max(inputs, key=lambda n: stage_of[n], default=None)
        after = stage_of[latest] if latest is not None else 0
        own = listed.get(keys[node], after)
        if strict and latest is not None and own < after and node not in free:
            raise PlanError(
                f"the plan puts operator '{keys[node]}' on stage {own}, but it reads '{keys[latest]}', which is on "
                f"stage {after}; values only flow to later stages, so put '{keys[node]}' on stage {after} or later"
            )
        stage_of[node] = max(after, own)
    return stage_of


def operators_of_stages(stage_of: Mapping[fx.Node, int], program: Program, n_stages: int) -> list[tuple[str, ...]]:
    """The keys of each stage's operators, in program order, without those that are computed where they are needed."""
    keys, free = operator_keys(program), replicable_nodes(program)
    return [
        tuple(keys[node] for node, stage in stage_of.items() if stage == s and node not in free)
        for s in range(n_stages)
    ]


def by_modules(split: Mapping[str, int], program: Program) -> dict[fx.Node, int]:
    """From module paths; the most specific path counts, and other operators follow their inputs.

    Raises PlanError for a path without operators, and where an operator would read a value of a later stage.
    """
    free = replicable_nodes(program)
    keys = operator_keys(program)
    used: set[str] = set()
    stage_of: dict[fx.Node, int] = {}
    for node in compute_nodes(program.graph):
        path = nearest(keys[node].rpartition("/")[0], split)
        inputs = [n for n in node.all_input_nodes if n in stage_of and n not in free]
        if path is None:
            stage_of[node] = max((stage_of[n] for n in inputs), default=0)
            continue
        used.add(path)
        stage_of[node] = split[path]
        late = [n for n in inputs if stage_of[n] > split[path]]
        if late and node not in free:
            raise PlanError(
                f"'{path}' is on stage {split[path]}, but it reads {describe(late[0])} on stage "
                f"{stage_of[late[0]]}; values only flow to later stages"
            )
    _check_used(split, used, sorted({key.rpartition("/")[0] for key in keys.values()}))
    return stage_of


def _check_used(split: Mapping[str, int], used: set[str], paths: Sequence[str]) -> None:
    """Raise PlanError for modules of the split that have no operators; `paths` are those that have."""
    unknown = [
        path
        for path in sorted(set(split) - used)
        if not any(other == path or other.startswith(path + ".") for other in paths)
    ]
    if unknown:
        more = " ..." if len(paths) > _MOST_PATHS else ""
        raise PlanError(
            f"no operator of the model runs in {', '.join(map(repr, unknown))}; "
            f"modules are {', '.join(paths[:_MOST_PATHS])}{more}"
        )
