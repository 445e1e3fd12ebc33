"""Hints on modules constrain the modules' operators, and hints that no plan can satisfy are refused together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hinted_models import (
    Remembering,
    Residual,
    Tied,
    WithIdle,
    captured,
    hinted,
    nested,
    problems_of,
    resolved,
    running,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar import PlanError
from autopar.analysis.operators import compute_nodes, replicable_nodes
from autopar.capture.program import Program
from autopar.hints.module_hints import Hints
from autopar.planner.hint_constraints.stage_hints import resolve, violations

# -- operators --------------------------------------------------------------------------------------------------------


def test_the_most_specific_pin_counts() -> None:
    found = resolved(hinted(nested(), {"": 1, "0": 0, "3": 2, "3.1": 3}))
    stages = {found.modules[name]: stage for name, stage in found.stage_of.items()}
    assert stages == {"0.0": 0, "0.1": 0, "1.0": 1, "1.1": 1, "2.0": 1, "2.1": 1, "3.0": 2, "3.1": 3}


def test_hints_reach_all_operators_of_a_module_and_no_others() -> None:
    found = resolved(hinted(Residual(), recompute=["left"], together=[["left", "right"]]))
    assert {found.modules[name] for name in found.recompute} == {"left"}
    assert [{found.modules[name] for name in group} for group in found.together] == [{"left", "right"}]
    assert found.stage_of == {}


def test_groups_that_share_a_module_are_one_group_of_operators() -> None:
    found = resolved(hinted(nested(), together=[["0", "1"], ["1", "2"]]))
    assert [{found.modules[name][0] for name in group} for group in found.together] == [{"0", "1", "2"}]


def test_both_calls_of_a_module_with_two_names_follow_its_hint() -> None:
    found = resolved(hinted(Tied(), {"block": 1}))
    assert len(found.stage_of) == 4  # two operators, called twice


def test_modules_that_share_a_parameter_may_be_pinned_apart() -> None:
    found = resolved(hinted(Tied(), {"first": 0, "last": 1}))
    assert sorted(found.stage_of.values()) == [0, 1]


class Masked(nn.Module):
    """Beside its layer it makes positions, which every stage makes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.arange(x.shape[1], dtype=x.dtype)


def test_what_every_stage_computes_for_itself_is_not_hinted() -> None:
    model = hinted(nn.Sequential(Masked(), nn.Linear(4, 4)), {"0": 1}, ["0"], [["0", "1"]])
    program, found = captured(model), resolved(model)
    free = {node.name for node in replicable_nodes(program)} & {node.name for node in compute_nodes(program.graph)}
    assert free
    assert free.isdisjoint(found.stage_of)
    assert free.isdisjoint(found.recompute | found.together[0])


def test_a_model_without_hints_is_asked_for_nothing() -> None:
    found = resolved(nested())
    assert (found.stage_of, found.recompute, found.together) == ({}, frozenset(), ())


# -- contradictions ---------------------------------------------------------------------------------------------------


def early(who: str, stage: int, source: str, later: int) -> str:
    return f"{who} is pinned to stage {stage}, but runs after {source}, which is pinned to stage {later}; values only"


def torn(first: str, second: str, group: str) -> str:
    return f"{first} is pinned to stage 0 and {second} is pinned to stage 1, but keep_together of {group} makes one"


@pytest.mark.parametrize(
    ("pins", "together", "wanted"),
    [
        ({"0": 1, "1": 0}, [], [early("'1'", 0, "'0'", 1)]),
        ({"0": 2, "2": 1}, [], [early("'2'", 1, "'0'", 2)]),
        (
            {"0": 3, "1": 1, "3": 0},
            [],
            [early("'1'", 1, "'0'", 3), early("'3'", 0, "'1'", 1), early("'3'", 0, "'0'", 3)],
        ),
        ({"0": 1, "2": 0}, [["1", "2"]], [early("'2' (in keep_together of '1', '2')", 0, "'0'", 1)]),
        ({"0": 0, "1": 1}, [["0", "1"]], [torn("'0'", "'1'", "'0', '1'")]),
        ({"0": 0, "2": 1}, [["0", "3"]], [torn("'0'", "'2'", "'0', '3'")]),
        ({"3": 4}, [], ["'3' is pinned to stage 4, but 4 devices make stages 0..3 at most"]),
    ],
    ids=["direct", "through another", "three", "a group's pin", "kept together", "in between", "too few devices"],
)
def test_pins_that_cannot_be_followed_are_refused(
    pins: dict[str, int], together: list[list[str]], wanted: list[str]
) -> None:
    problems = problems_of(hinted(nested(), pins, together=together))
    assert len(problems) == len(wanted)
    assert all(problem.startswith(start) for problem, start in zip(problems, wanted, strict=True))


def test_a_hint_on_a_module_that_does_not_run_is_refused() -> None:
    model = hinted(WithIdle(nn.Linear(4, 4)), recompute=["idle"])
    assert problems_of(model) == ["'idle' has a hint but runs no operator in this call"]


def test_recomputing_what_reads_a_buffer_that_it_writes_is_refused_and_batch_norm_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Remembering()).train()
    assert resolved(hinted(model, recompute=["1"])).recompute
    problems = problems_of(hinted(model, recompute=["2"]))
    assert problems
    assert all(problem.startswith("'2' cannot be recomputed: aten.") for problem in problems)


@pytest.mark.parametrize("hints", [{"together": [["0", "1"]]}, {"pins": {"0": 0, "1": 0}}])
def test_a_hint_that_brings_a_written_buffer_into_a_recomputing_stage_is_refused(hints: dict[str, Any]) -> None:
    model = hinted(nn.Sequential(nn.Linear(4, 4), Remembering()), recompute=["0"])
    assert resolved(model).recompute
    assert all(p.startswith("'0' cannot be recomputed: aten.") for p in problems_of(hinted(model, **hints)))


def test_all_contradictions_are_reported_at_once() -> None:
    model = hinted(
        WithIdle(*nested(), Remembering()),
        {"chain.0": 7, "chain.1": 0, "chain.2": 1},
        ["idle", "chain.4"],
        [["chain.1", "chain.3"]],
    )
    text = "\n".join(problems_of(model, 3))
    for wanted in (
        "'idle' has a hint",
        "'chain.0' is pinned to stage 7, but 3 devices",
        "runs after 'chain.0', which is pinned to stage 7",
        "'chain.1' is pinned to stage 0 and 'chain.2' is pinned to stage 1, but keep_together",
        "'chain.4' cannot be recomputed",
    ):
        assert wanted in text


# -- against brute force ----------------------------------------------------------------------------------------------


PATHS = {Residual: ("", "stem", "left", "right", "out"), nested: ("0", "1", "2", "2.0", "2.1", "3")}


@dataclass(frozen=True)
class Case:
    """A small program and every way to put its operators into stages 0..2 so that values only flow to later ones."""

    program: Program
    paths: Sequence[str]  # of modules to hint
    modules: Mapping[str, str]  # of every operator
    assignments: Sequence[Mapping[str, int]]


@cache
def cases() -> list[Case]:
    found = []
    for build, paths in PATHS.items():
        program = captured(build())
        modules = running(program)
        edges = [(a.name, b.name) for b in program.graph.nodes for a in b.all_input_nodes]
        edges = [(a, b) for a, b in edges if a in modules and b in modules]
        ways = [dict(zip(modules, way, strict=True)) for way in itertools.product(range(3), repeat=len(modules))]
        allowed = [way for way in ways if all(way[a] <= way[b] for a, b in edges)]
        found.append(Case(program, paths, modules, allowed))
    return found


@st.composite
def hinted_cases(draw: st.DrawFn) -> tuple[Case, Hints]:
    """A case with any pins to stages 0..2, recomputed modules and groups."""
    case = draw(st.sampled_from(cases()))
    paths = st.sampled_from(case.paths)
    stages = draw(st.dictionaries(paths, st.integers(0, 2)))
    recomputed = draw(st.sets(paths))
    together = draw(st.lists(st.lists(paths, min_size=2, max_size=3, unique=True).map(tuple), max_size=2))
    return case, Hints(tuple(stages.items()), tuple(sorted(recomputed)), tuple(together))


def lies_in(path: str, module: str) -> bool:
    return not module or f"{path}.".startswith(f"{module}.")


def follows(way: Mapping[str, int], modules: Mapping[str, str], hints: Hints) -> bool:
    """Whether an assignment does what pins and groups ask."""
    for name, path in modules.items():
        pins = [(len(module), stage) for module, stage in hints.stages if lies_in(path, module)]
        if pins and max(pins)[1] != way[name]:
            return False
    groups = [{way[n] for n, path in modules.items() if any(lies_in(path, p) for p in g)} for g in hints.together]
    return all(len(group) <= 1 for group in groups)


@given(hinted_cases())
def test_pins_and_groups_are_refused_exactly_where_no_assignment_follows_them(drawn: tuple[Case, Hints]) -> None:
    case, hints = drawn
    if any(follows(way, case.modules, hints) for way in case.assignments):
        assert resolve(hints, case.program, 3)
    else:
        with pytest.raises(PlanError, match="the hints cannot be followed"):
            resolve(hints, case.program, 3)


@given(hinted_cases(), st.data())
def test_a_plan_violates_hints_exactly_where_it_does_not_follow_them(
    drawn: tuple[Case, Hints], data: st.DataObject
) -> None:
    case, hints = drawn
    try:
        found = resolve(hints, case.program, 3)
    except PlanError:
        return
    followed = [way for way in case.assignments if follows(way, case.modules, hints)]
    way = data.draw(st.sampled_from(case.assignments) | st.sampled_from(followed))
    again = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    recomputed = {way[name] for name, path in case.modules.items() if any(lies_in(path, p) for p in hints.recompute)}
    right = follows(way, case.modules, hints) and all(again[stage] for stage in recomputed)
    assert (violations(way, again, found) == []) == right


def test_violations_name_the_module_what_was_asked_and_what_the_plan_does() -> None:
    found = resolved(hinted(nested(), {"0": 0}, ["3"], [["1", "2"]]))
    plan = {name: {"0": 1, "1": 1}.get(path[0], 2) for name, path in found.modules.items()}
    assert violations(plan, [False, True, False], found) == [
        "'0' is pinned to stage 0, the plan runs it in stage 1",
        "'1', '2' are to be kept together, the plan runs them in stages 1, 2",
        "'3' is to be recomputed, the plan does not recompute stage 2",
    ]
