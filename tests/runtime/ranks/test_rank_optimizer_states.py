"""Optimizers of ranks in checkpoints: each rank goes on with its own groups and states, whatever their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from custom_optimizers import CUSTOM
from rank_optimizer_states import (
    custom_states_go_on,
    groups_in_another_order,
    names_in_groups,
    refused_states,
    second_optimizer,
)
from rank_pending_states import made, steps
from rank_pool import RankPool

import autopar

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CUSTOM)
def test_states_of_an_optimizer_outside_of_torch_go_on(ranks: RankPool, tmp_path: Path, name: str) -> None:
    for wanted, *others in ranks.run(custom_states_go_on, 2, tmp_path, name):
        assert others == [wanted] * 2
    model, optimizer = made(lambda m: CUSTOM[name](m.parameters()))
    assert steps(model, optimizer, 6)[3:] == pytest.approx(wanted, rel=1e-9)
    autopar.load(tmp_path, model, optimizer)
    assert steps(model, optimizer, 3) == pytest.approx(wanted, rel=1e-9)


def test_states_that_no_other_plan_could_go_on_with_are_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(refused_states, 2, tmp_path)
    assert first == second
    wanted = [
        "the optimizer's state 'all', which belongs to no parameter, differs between the ranks",
        "the optimizer's state 'all', which belongs to no parameter, has DTensors",
        "the optimizer's states of '.*' have DTensors inside of something else than a list, a tuple or a dict",
    ]
    assert len(first) == len(wanted)
    for (kind, message, shown_once), words in zip(first, wanted, strict=True):
        assert kind == "InputError"
        assert re.match(words, message), message
        assert shown_once
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("placed_first", [False, True])
def test_groups_in_another_order_get_the_options_of_their_parameters(
    ranks: RankPool, tmp_path: Path, placed_first: bool
) -> None:
    for wanted, found, rates in ranks.run(groups_in_another_order, 2, tmp_path, placed_first):
        assert found == wanted
        assert rates == [1e-2, 1e-3]


@pytest.mark.parametrize("placed_first", [False, True])
def test_each_rank_keeps_the_names_of_its_own_parameters(ranks: RankPool, tmp_path: Path, placed_first: bool) -> None:
    for found, wanted in ranks.run(names_in_groups, 2, tmp_path, placed_first):
        assert found == wanted
        assert len(wanted) == 4


def test_parts_of_tensors_in_extra_are_refused_and_two_optimizers_go_on_from_a_directory_each(
    ranks: RankPool, tmp_path: Path
) -> None:
    (errors, losses), (others, _) = ranks.run(second_optimizer, 2, tmp_path)
    assert errors == others
    assert losses[0] == losses[1]
    wanted = [
        "extra has 'other', of type SGD, an optimizer .* save it to a directory of its own",
        r"extra has 'mean', of type list, with DTensors, .* give whole tensors \(tensor.full_tensor\(\)\)",
    ]
    for (kind, message, shown_once), words in zip(errors, wanted, strict=True):
        assert kind == "CheckpointError"
        assert re.search(words, message), message
        assert shown_once
