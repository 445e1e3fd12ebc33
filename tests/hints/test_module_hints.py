"""Hints on modules leave the model as it is, constrain its operators, and are refused together where they cannot be."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import InputError, PlanError
from autopar.analysis.operators import compute_nodes, replicable_nodes
from autopar.capture.program import Program, capture, module_path
from autopar.hints.module_hints import Hints, read_hints
from autopar.planner.hint_constraints.stage_hints import ResolvedHints, resolve, violations


class Residual(nn.Module):
    """left and right read what stem computes; out reads the sum of both.

    stem --+--> left ---+
           |            + --> out
           +--> right --+
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.out(self.left(x) + self.right(x))


class Tied(nn.Module):
    """Two modules with one parameter, and a block that is called under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(self.block(self.first(x))))


class Remembering(nn.Module):
    """A moving average that the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(0.1 * x.mean(0).detach())
        return x - self.average


class WithIdle(nn.Module):
    """A chain and a module that never runs."""

    def __init__(self, *chain: nn.Module) -> None:
        super().__init__()
        self.chain, self.idle = nn.Sequential(*chain), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.chain(x)
        return y


def nested() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def hinted(
    model: nn.Module,
    pins: Mapping[str, int] | None = None,
    recompute: Sequence[str] = (),
    together: Sequence[Sequence[str]] = (),
) -> nn.Module:
    """`model` with hints on its modules, by path."""
    for path, stage in (pins or {}).items():
        autopar.pipeline_stage(model.get_submodule(path), stage)
    for path in recompute:
        autopar.recompute(model.get_submodule(path))
    for paths in together:
        autopar.keep_together(*map(model.get_submodule, paths))
    return model


def captured(model: nn.Module) -> Program:
    return capture(model, (torch.randn(6, 4),), {})


def resolved(model: nn.Module, n_devices: int = 4) -> ResolvedHints:
    return resolve(read_hints(model), captured(model), n_devices)


def problems_of(model: nn.Module, n_devices: int = 4) -> list[str]:
    """What resolving the model's hints is refused for."""
    with pytest.raises(PlanError) as refused:
        resolved(model, n_devices)
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def running(program: Program) -> dict[str, str]:
    """Operators that are in one stage each, with their modules."""
    free = replicable_nodes(program)
    return {node.name: module_path(node) for node in compute_nodes(program.graph) if node not in free}


# -- marks ------------------------------------------------------------------------------------------------------------


def test_hints_leave_the_model_as_it_is() -> None:
    model, plain = Residual(), Residual()
    plain.load_state_dict(model.state_dict())
    assert autopar.pipeline_stage(model.left, 1) is model.left
    assert autopar.recompute(model.right) is model.right
    autopar.keep_together(model.stem, model.out)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    assert str(captured(model).graph) == str(captured(plain).graph)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_hints_survive_copies_of_the_model_which_do_not_share_them(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = hinted(Tied(), {"first": 0}, ["block"], [["first", "last"]])
    expected = read_hints(model)
    other = copied(model)
    assert read_hints(other) == expected
    autopar.clear_hints(model)
    assert not read_hints(model)
    assert read_hints(other) == expected


def test_copies_of_a_block_are_kept_together_each_by_itself() -> None:
    block = hinted(nested(), together=[["0", "1"]])
    model = nn.Sequential(block, copy.deepcopy(block))
    assert read_hints(model).together == (("0.0", "0.1"), ("1.0", "1.1"))


def test_hints_are_read_by_path_and_a_later_pin_replaces_an_earlier_one() -> None:
    model = hinted(nested(), {"1": 0}, ["2.0"], [["3", "0"], ["0", "1"]])
    hints = read_hints(hinted(model, {"": 1, "1": 2}))
    assert hints
    assert hints.stages == (("", 1), ("1", 2))
    assert hints.recompute == ("2.0",)
    assert sorted(hints.together) == [("0", "1"), ("0", "3")]


def test_clearing_takes_the_hints_off_a_module_and_what_is_inside_only() -> None:
    model = hinted(nested(), {"0": 0, "1": 1}, ["1.0"])
    autopar.clear_hints(model.get_submodule("1"))
    assert read_hints(model) == Hints(stages=(("0", 0),))


def test_a_module_with_two_names_is_read_under_both() -> None:
    hints = read_hints(hinted(Tied(), {"again": 1}, together=[["block", "last"]]))
    assert hints.stages == (("block", 1), ("again", 1))
    assert set(hints.together[0]) == {"block", "again", "last"}


@pytest.mark.parametrize("stage", [-1, True, 1.0, "0", None])
def test_a_stage_that_is_no_whole_number_from_0_is_refused(stage: Any) -> None:
    model = nested()
    with pytest.raises(InputError, match="whole number from 0"):
        autopar.pipeline_stage(model, stage)
    assert not read_hints(model)


@pytest.mark.parametrize(
    "mark",
    [
        lambda wrong: autopar.pipeline_stage(wrong, 0),
        autopar.recompute,
        lambda wrong: autopar.keep_together(nn.Tanh(), wrong),
        autopar.clear_hints,
    ],
)
def test_what_is_no_module_is_refused(mark: Any) -> None:
    for wrong, name in ((torch.zeros(2), "Tensor"), ("encoder", "str"), (nn.Linear, "type")):
        with pytest.raises(InputError, match=f"Module, got {name}"):
            mark(wrong)


def test_nothing_cannot_be_kept_together() -> None:
    with pytest.raises(InputError, match="at least one module"):
        autopar.keep_together()


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
    ("pins", "together", "told"),
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
    pins: dict[str, int], together: list[list[str]], told: list[str]
) -> None:
    problems = problems_of(hinted(nested(), pins, together=together))
    assert len(problems) == len(told)
    assert all(problem.startswith(start) for problem, start in zip(problems, told, strict=True))


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


def test_all_contradictions_are_told_at_once() -> None:
    model = hinted(
        WithIdle(*nested(), Remembering()),
        {"chain.0": 7, "chain.1": 0, "chain.2": 1},
        ["idle", "chain.4"],
        [["chain.1", "chain.3"]],
    )
    text = "\n".join(problems_of(model, 3))
    for told in (
        "'idle' has a hint",
        "'chain.0' is pinned to stage 7, but 3 devices",
        "runs after 'chain.0', which is pinned to stage 7",
        "'chain.1' is pinned to stage 0 and 'chain.2' is pinned to stage 1, but keep_together",
        "'chain.4' cannot be recomputed",
    ):
        assert told in text


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
