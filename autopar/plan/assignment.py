"""The stage of every operator of a program, from the operators or the modules that a plan lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.analysis.operators import compute_nodes, operator_keys, replicable_nodes
from autopar.capture.program import Program, describe
from autopar.capture.uncaptured import uncaptured_in
from autopar.errors import PlanError
from autopar.hints.module_paths import few, nearest

_MOST_PATHS = 8  # modules in a message


def by_operators(stages: Sequence[Sequence[str]], program: Program) -> dict[fx.Node, int]:
    """From the keys of each stage's operators. Operators that are not listed follow their inputs.

    Raises PlanError where the program has none of these operators.
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
        after = max((stage_of[n] for n in node.all_input_nodes if n in stage_of and n not in free), default=0)
        stage_of[node] = max(after, listed.get(keys[node], 0))
    return stage_of


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
    opaque = tuple(part.path for part in uncaptured_in(program.graph_module) if part.held is not None)
    _check_used(split, used, sorted({key.rpartition("/")[0] for key in keys.values()}), opaque)
    return stage_of


def _check_used(split: Mapping[str, int], used: set[str], paths: Sequence[str], opaque: Sequence[str]) -> None:
    """Raise PlanError for modules of the split that have no operators; `paths` are those that have. `opaque`: modules
    that run uncaptured, as one operator each."""
    unknown = [
        path
        for path in sorted(set(split) - used)
        if not any(other == path or other.startswith(path + ".") for other in paths)
    ]
    if unknown:
        around = next((p for p in opaque if not p or unknown[0].startswith(p + ".")), None)
        if around is not None:
            raise PlanError(
                f"'{unknown[0]}' cannot be a stage of its own: module '{around or '(root)'}' runs uncaptured, as one "
                "operator"
            )
        more = " ..." if len(paths) > _MOST_PATHS else ""
        raise PlanError(
            f"no operator of the model runs in {', '.join(map(repr, unknown))}; "
            f"modules are {', '.join(paths[:_MOST_PATHS])}{more}"
        )
