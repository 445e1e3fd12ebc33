"""What hints on modules ask of the operators of one captured graph, and what is wrong with them.

model --read_hints--> Hints (module paths) --resolve--> ResolvedHints (operators of one captured graph)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from autopar.analysis.buffer_writes import unrepeatable_nodes
from autopar.analysis.operators import compute_nodes, fused_groups, replicable_nodes, write_order
from autopar.capture.node_names import describe, module_path
from autopar.capture.program import Program
from autopar.capture.uncaptured import opaque_around
from autopar.errors import PlanError
from autopar.hints.module_hints import Hints
from autopar.hints.module_paths import ancestors, nearest


@dataclass(frozen=True)
class ResolvedHints:
    """Hints as facts about operators, by fx node name. Replicable operators, which every stage computes for itself,
    are not among them."""

    hints: Hints
    stage_of: Mapping[str, int]  # pinned operators only
    recompute: frozenset[str]  # the stages of these operators recompute
    together: tuple[frozenset[str], ...]  # operators of one stage each; groups do not overlap
    modules: Mapping[str, str] = field(repr=False)  # the module path of every operator


def resolve(
    hints: Hints,
    program: Program,
    n_devices: int | None = None,
    storages: Mapping[str, frozenset[int]] | None = None,
) -> ResolvedHints:
    """What `hints` ask of the operators of `program`. Of nested pins the one with the most specific path counts.

    `n_devices`: how many are offered, which is the most stages that there can be. `storages` (node name -> storages,
    from `Batching`): with them, operators that in-place writes tie together or put in order are known to be.

    Raises PlanError that lists everything that is wrong: hinted modules without operators, stages that there are too
    few devices for, pins against the flow of data or against keep_together, and stages that cannot be recomputed.
    """
    free = replicable_nodes(program)
    line = [node for node in compute_nodes(program.graph) if node not in free]
    modules = {node.name: module_path(node) for node in line}
    if not hints:
        return ResolvedHints(hints, {}, frozenset(), (), modules)
    pins = dict(hints.stages)
    stage_of = {name: pins[_pin(path, pins)] for name, path in modules.items() if nearest(path, pins) is not None}
    recomputed = frozenset(_inside(hints.recompute, modules))
    groups = _joined(frozenset(_inside(paths, modules)) for paths in hints.together)
    resolved = ResolvedHints(hints, stage_of, recomputed, groups, modules)
    tied = [{n.name for n in group if n.name in modules} for group in fused_groups(program, dict(storages or {}))]
    order = [(source, node) for node in line for source in node.all_input_nodes]
    order += write_order(program, dict(storages or {}))
    linked = _linked(modules, order, [*groups, *tied])
    problems = [
        *_without_operators(hints, set(modules.values()), program),
        *_beyond(hints, n_devices),
        *_against_the_flow(resolved, linked),
        *_unrepeatable(resolved, linked, program),
    ]
    if problems:
        raise PlanError("the hints cannot be followed:\n  " + "\n  ".join(problems))
    return resolved


def violations(
    plan_stage_of: Mapping[str, int],
    plan_recompute: Sequence[bool],
    resolved: ResolvedHints,
    again: Collection[str] = (),
) -> list[str]:
    """Where a plan does not do what the hints ask; empty if it does.

    `plan_stage_of`: node name -> stage, of every operator (`Plan.assign`). `plan_recompute`: for every stage, whether
    all of it recomputes. `again`: operators of other stages that run again with their layers.
    """
    hints, modules = resolved.hints, resolved.modules
    pins = dict(hints.stages)
    astray: dict[str, set[int]] = defaultdict(set)
    for name, stage in resolved.stage_of.items():
        if plan_stage_of[name] != stage:
            astray[_pin(modules[name], pins)].add(plan_stage_of[name])
    problems = [
        f"'{path}' is pinned to stage {pins[path]}, the plan runs it in {_stages(stages)}"
        for path, stages in astray.items()
    ]
    for paths in hints.together:
        stages = {plan_stage_of[name] for name in _inside(paths, modules)}
        if len(stages) > 1:
            problems.append(f"{_quoted(paths)} are to be kept together, the plan runs them in {_stages(stages)}")
    for path in hints.recompute:
        inside = (name for name in _inside([path], modules) if name not in again)
        keeping = {s for name in inside if not plan_recompute[s := plan_stage_of[name]]}
        if keeping:
            problems.append(f"'{path}' is to be recomputed, the plan does not recompute {_stages(keeping)}")
    return problems


# -- contradictions ---------------------------------------------------------------------------------------------------


def _without_operators(hints: Hints, running: set[str], program: Program) -> Iterator[str]:
    """Hinted modules whose hint has nothing to act on, under none of their paths."""
    active = {ancestor for path in running for ancestor in ancestors(path)}
    same = {path: paths for paths in hints.aliases for path in paths}
    hinted = [*(path for path, _ in hints.stages), *hints.recompute, *(p for paths in hints.together for p in paths)]
    silent = [path for path in dict.fromkeys(hinted) if not active.intersection(same.get(path, (path,)))]
    for path in silent:
        if path == same.get(path, (path,))[0]:
            around = opaque_around(program.graph_module, path)
            if around is None:
                yield f"'{path}' has a hint but runs no operator in this call"
            else:
                yield (
                    f"'{path}' has a hint but runs uncaptured inside module '{around or '(root)'}', as a part of one "
                    "operator; put the hint on that module"
                )


def _beyond(hints: Hints, n_devices: int | None) -> Iterator[str]:
    for path, stage in hints.stages:
        if n_devices is not None and stage >= n_devices:
            yield (
                f"'{path}' is pinned to stage {stage}, but {n_devices} device{'s' if n_devices > 1 else ''} "
                f"make stages 0..{n_devices - 1} at most"
            )


def _linked(
    names: Iterable[str], order: Iterable[tuple[fx.Node, fx.Node]], groups: Iterable[Iterable[str]]
) -> nx.DiGraph:
    """The condensed graph of operators: what must share a stage, with all that runs in between, is one component."""
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from((a.name, b.name) for a, b in order if a.name in graph and b.name in graph)
    for group in groups:
        nx.add_cycle(graph, sorted(group))
    return nx.condensation(graph)


def _against_the_flow(resolved: ResolvedHints, linked: nx.DiGraph) -> list[str]:
    """Components pinned to several stages, and those pinned ahead of what they read, also through others.

    One pass in topological order. To each component it brings the pins that come before it; a pin hides those before
    it that ask for no later a stage than its own, for what they forbid behind it, it forbids, too.
    """
    pins = dict(resolved.hints.stages)
    problems: dict[str, None] = {}  # an ordered set: a module's operators are components of their own
    leading: dict[int, set[tuple[int, str]]] = {}  # component -> (stage, module pinned to it, in words)
    for component in nx.topological_sort(linked):
        names = linked.nodes[component]["members"]
        paths = sorted({_pin(resolved.modules[name], pins) for name in names if name in resolved.stage_of})
        kept = [p for p in resolved.hints.together if not names.isdisjoint(_inside(p, resolved.modules))]
        why = " and ".join(f"keep_together of {_quoted(paths)}" for paths in kept)
        here = {(pins[path], f"'{path}'" + (f" (in {why})" if why else "")) for path in paths}
        before = set().union(*(leading[p] for p in linked.predecessors(component)))
        if len({stage for stage, _ in here}) > 1:
            where = " and ".join(f"'{path}' is pinned to stage {pins[path]}" for path in paths)
            problems[f"{where}, but {why or 'a write in place'} makes one stage of them and what runs between"] = None
        for stage, name in sorted(here):
            for earlier, source in sorted(before):
                if stage < earlier:
                    problems[
                        f"{name} is pinned to stage {stage}, but runs after {source}, which is pinned to stage "
                        f"{earlier}; values only flow to later stages"
                    ] = None
        last = max((stage for stage, _ in here), default=-1)
        leading[component] = here | {pin for pin in before if pin[0] > last}
    return list(problems)


def _unrepeatable(resolved: ResolvedHints, linked: nx.DiGraph, program: Program) -> Iterator[str]:
    """Operators that cannot run twice, where a hint makes their stage recompute."""
    component, stage_of = linked.graph["mapping"], resolved.stage_of
    for node in unrepeatable_nodes(program.graph):
        if node.name not in component:
            continue
        here, stage = component[node.name], stage_of.get(node.name, -1)
        near = (n for n in resolved.recompute if component[n] == here or stage_of.get(n) == stage)
        for path in sorted({nearest(resolved.modules[name], resolved.hints.recompute) or "" for name in near}):
            yield f"'{path}' cannot be recomputed: {describe(node)} is in its stage and writes a buffer that is read"


# -- paths ------------------------------------------------------------------------------------------------------------


def _pin(path: str, pins: Mapping[str, int]) -> str:
    """The pinned module that decides about `path`, which lies in one."""
    return next(a for a in reversed(ancestors(path)) if a in pins)


def _inside(paths: Iterable[str], modules: Mapping[str, str]) -> list[str]:
    """The operators that run in any of the modules `paths`."""
    wanted = frozenset(paths)
    return [name for name, path in modules.items() if nearest(path, wanted) is not None]


def _joined(groups: Iterable[frozenset[str]]) -> tuple[frozenset[str], ...]:
    """Groups that share a member as one."""
    graph = nx.Graph()
    for group in groups:
        nx.add_path(graph, sorted(group))
    return tuple(frozenset(c) for c in nx.connected_components(graph))


def _stages(stages: Iterable[int]) -> str:
    numbers = sorted(stages)
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _quoted(paths: Iterable[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
