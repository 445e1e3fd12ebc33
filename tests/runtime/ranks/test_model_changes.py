"""Models that are changed before and after their placing on ranks: followed as in one process, or refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from rank_changes import (
    assigned_buffers,
    changes_refused,
    frozen_between,
    frozen_for_some_steps,
    frozen_on_one_rank,
    goes_on_after_a_refusal,
    hook_of_both_stages,
    hooks_from_before,
    hooks_where_stages_meet,
    missing_attribute,
    names_of_groups,
    sparse_after_evaluation,
)
from rank_pool import RankFailure, RankPool
from torch import nn

from autopar.runtime.initial_values.missing_values import give_memory, make_hollow

TOLERANCE = 1e-9  # in float64

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("call", ["train_step", "backward"])
@pytest.mark.parametrize("plan", ["chain", "replicas 2", "hand data=2 zero=2"])
def test_parameters_keep_hooks_and_attributes_when_they_are_placed(ranks: RankPool, plan: str, call: str) -> None:
    for found in ranks.run(hooks_from_before, 2, plan, call):
        assert max(found["errors"]) < TOLERANCE
        assert found["seen"] == found["wanted"] != []


@slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("plan_first", [True, False])
def test_backward_hooks_change_gradients_where_stages_meet(ranks: RankPool, plan_first: bool) -> None:
    for errors in ranks.run(hooks_where_stages_meet, 2, plan_first):
        assert max(errors) < TOLERANCE


@slow
def test_a_full_backward_hook_of_a_module_in_two_stages_is_refused_by_name(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="InputError: module '0' has a full backward hook, begins in stage 0 "):
        ranks.run(hook_of_both_stages, 2)


@slow
def test_a_tensor_of_another_rank_that_is_read_by_its_attribute_is_explained(ranks: RankPool) -> None:
    first, last = ranks.run(missing_attribute, 2)
    assert "no attribute 'scale'; since the first call, other ranks have 'scale': change it by its name" in first
    assert "no attribute 'weight'; since the first call, other ranks have 'weight'" in last


def test_parameters_without_values_keep_hooks_and_attributes() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.weight.tag = "mine"
    handle = model.weight.register_hook(torch.zeros_like)
    make_hollow(model, list(model.parameters()))
    assert model.weight.tag == "mine"
    for parameter in model.parameters():
        give_memory(parameter)
    model(torch.ones(1, 3)).sum().backward()
    assert not model.weight.grad.any()
    handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert bool((model.weight.grad == 1).all())


@slow
def test_buffers_that_are_assigned_anew_count(ranks: RankPool) -> None:
    for errors in ranks.run(assigned_buffers, 2):
        assert max(errors) < 1e-5


@slow
def test_changes_of_a_placed_model_are_refused_by_name_on_all_ranks(ranks: RankPool) -> None:
    lost = r"InputError: values were assigned to the \.data of parameter"
    wanted = {
        "parameter": "InputError: parameter 'b.weight' was assigned anew after the plan had placed it on ranks: write",
        "on one rank": "InputError: parameter 'b.weight' was assigned anew .*; seen on rank 1$",
        "module": "InputError: module 'b' was assigned after the plan had placed the model on ranks",
        "data": rf"{lost} '[ab]\.weight' after the plan had placed it on ranks, and torch loses them",
        "data on one rank": rf"{lost} 'b\.weight' .*; seen on rank 1$",
        "state of data": rf"{lost} '[ab]\.weight'",
        "dtype": "InputError: parameter '.*' is torch.float64 and was torch.float32 when the plan placed it",
        "shape": r"InputError: buffer 'scale' is \(12,\) torch.float32 and was \(\) torch.float32",
        "removed": "InputError: buffer 'scale' was removed",
    }
    for found in ranks.run(changes_refused, 2):
        assert set(found) == set(wanted)
        for what, pattern in wanted.items():
            assert re.match(pattern, found[what]), f"{what}: {found[what]!r}"


@slow
def test_a_change_that_is_taken_back_leaves_the_model_usable(ranks: RankPool) -> None:
    for error in ranks.run(goes_on_after_a_refusal, 2):
        assert error < 1e-5


# Of each of the six layers 12 * 12 + 12 numbers, and of every parameter one count of the ranks that have a gradient.
_LAYER = 12 * 12 + 12 + 2


@slow
@pytest.mark.parametrize("call", ["train_step", "backward"])
@pytest.mark.parametrize("plan", ["replicas", "1", "2"])
def test_frozen_parameters_take_no_part_in_reductions(ranks: RankPool, plan: str, call: str) -> None:
    for found in ranks.run(frozen_for_some_steps, 2, plan, call):
        assert max(found["errors"]) < TOLERANCE
        if plan == "replicas":
            assert found["reduced"] == [3 * _LAYER, 5 * _LAYER, 6 * _LAYER, 6 * _LAYER]
        else:  # ZeRO cuts no states of the three layers that are frozen at first; it scatters counts of both ranks
            cut = (_LAYER + 2) * (2 if plan == "2" else 1)  # ZeRO 2 scatters for each of two micro-batches
            assert found["reduced"] == [3 * cut, 2 * cut + 3 * _LAYER, 3 * (cut + _LAYER), 3 * (cut + _LAYER)]


@slow
def test_parameters_frozen_between_calls_have_the_gradients_of_one_process(ranks: RankPool) -> None:
    for errors in ranks.run(frozen_between, 2):
        assert max(errors) < TOLERANCE


@slow
def test_ranks_that_freeze_different_parameters_are_refused(ranks: RankPool) -> None:
    for before, after in ranks.run(frozen_on_one_rank, 2):
        assert re.match(r"InputError: ranks differ in the parameters that are trained: 12 .* on rank 0, 11 ", before)
        assert re.match(
            "InputError: ranks differ in whether '2.weight' is trained: frozen on rank 1, not on rank 0", after
        )


@slow
def test_groups_of_an_optimizer_name_the_parameters_that_the_rank_has(ranks: RankPool) -> None:
    for found in ranks.run(names_of_groups, 2):
        assert found["names"] == found["wanted"]
        assert sum(map(len, found["names"])) == 6


@slow
def test_sparse_gradients_are_refused_after_an_evaluation(ranks: RankPool) -> None:
    for found in ranks.run(sparse_after_evaluation, 2):
        for what, message in found.items():
            if "," in what:
                assert message == "", what
            else:
                assert re.match("PlanError: .*'0.weight' .*sparse gradients", message), (what, message)
