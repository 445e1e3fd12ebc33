"""What scripts do wrong, or on some ranks only, ends with an error on all ranks, or changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rank_misuse import (
    another_batch_after_evaluations,
    called_as_a_whole,
    caught_inside_accumulation,
    changed_on_one_rank,
    clipped_between,
    clipped_differently,
    clipped_with_another_model,
    different_calls,
    empty_batch,
    gone_back_on_some_outputs,
    loss_of_another_dtype,
    loss_of_its_own,
    loss_with_a_late_scale,
    passed_otherwise,
    raised_together,
    refused_where_a_rank_goes_on,
)
from rank_pool import RankPool

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10  # float64


@pytest.mark.parametrize(
    ("n", "plan", "inside"), [(2, "replicas 2", False), (3, "replicas 2,1", False), (3, "replicas 2,1", True)]
)
def test_gradients_of_accumulation_outlive_a_refused_call(ranks: RankPool, n: int, plan: str, inside: bool) -> None:
    """The optimizer's step between is refused on all ranks, also on those that share no parameter."""
    for found in ranks.run(caught_inside_accumulation, n, plan, inside):
        assert "returned a loss without a gradient" in found["message"]
        assert re.match("InputError: an optimizer's step needs the gradients of all ranks", found["step"])
        assert found["error"] < TOLERANCE


@pytest.mark.parametrize("where", ["a global", "a dictionary", "a closure"])
def test_a_loss_may_set_itself_up_at_its_first_call(ranks: RankPool, where: str) -> None:
    for found in ranks.run(loss_with_a_late_scale, 2, where):
        assert max(found.values()) < TOLERANCE


def test_different_calls_are_refused_with_their_names(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(different_calls, 2, tmp_path)
    assert first == second
    assert first.pop("") == ""
    for calls, message in first.items():
        here, there = calls.split(" / ")
        named = f"rank 0 called {here}, rank 1 called {there}"
        assert message.startswith(f"InputError: ranks make different calls: {named}; every rank must"), message


CHANGED = {
    "hook": "the model: module '0': in training mode, with hooks on rank 0, in training mode on rank 1; change",
    "mode": "the model: module '1': in eval mode on rank 0, in training mode on rank 1; change the model alike",
    "module": r"the model or in the arguments: only rank 0 would capture the model anew",
    "default": r"the model: torch: default dtype torch.float64, .* on rank 0, default dtype torch.float32",
}


@pytest.mark.parametrize(
    ("what", "data"), [*((what, "whole") for what in CHANGED), ("hook", "per-rank"), ("module", "per-rank")]
)
def test_a_model_that_changes_on_one_rank_is_refused_on_all(ranks: RankPool, what: str, data: str) -> None:
    """And works again once it is alike."""
    for message, later in ranks.run(changed_on_one_rank, 2, what, data):
        assert re.match(f"InputError: ranks differ in {CHANGED[what]}", message), message
        assert later == ""


@pytest.mark.parametrize(
    ("by_keyword", "here", "there"),
    [(True, "'x' by position", "'x' by keyword"), (False, "'x' by position, as a tuple", "'x' by position, as a list")],
)
def test_arguments_that_are_passed_otherwise_are_refused(
    ranks: RankPool, by_keyword: bool, here: str, there: str
) -> None:
    for message in ranks.run(passed_otherwise, 2, by_keyword):
        difference = f"ranks differ in how they pass arguments: {here} on rank 0, {there} on rank 1; pass the same"
        assert message.startswith(f"InputError: {difference}"), message


@pytest.mark.parametrize(
    ("n", "plan", "what"),
    [
        *((2, "replicas 2", what) for what in ("target", "order", "scale", "overflow")),
        (3, "chain", "target"),
        (2, "hand tensor=2", "scale"),
    ],
)
def test_another_loss_of_the_outputs_is_refused_on_all_ranks(ranks: RankPool, n: int, plan: str, what: str) -> None:
    """And ranks that go back from the same loss afterwards train as in one process."""
    for found in ranks.run(loss_of_its_own, n, plan, what):
        kind, message, is_shown_by_first = found["raised"]
        assert (kind, is_shown_by_first) == ("InputError", True)
        assert message.startswith("ranks differ in the gradient of the outputs from which backward() starts (output 0")
        assert f"rank {n - 1}" in message
        assert found["error"] < TOLERANCE


def test_losses_may_differ_between_ranks_by_rounding(ranks: RankPool) -> None:
    for found in ranks.run(loss_of_its_own, 2, "replicas 2", "rounding"):
        assert found["raised"] == ("", "", False)
        assert found["error"] < TOLERANCE


def test_a_loss_that_leaves_an_output_out_on_one_rank_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(gone_back_on_some_outputs, 2):
        assert re.search(r"\(output 1 of the model: norm .* on rank 0, none on rank 1\)", message), message


@pytest.mark.parametrize(("call", "what"), [("train_step", "the target"), ("forward", "input 'input'")])
def test_the_first_training_calls_are_compared_after_evaluations(ranks: RankPool, call: str, what: str) -> None:
    for message in ranks.run(another_batch_after_evaluations, 2, call):
        assert message.startswith(f"InputError: ranks differ in the content of {what} "), message


@pytest.mark.parametrize("what", ["a layer", "both models"])
def test_clipping_with_two_models_is_that_of_one_process(ranks: RankPool, what: str) -> None:
    """Also where a rank has none of the parameters, so that it cannot see which model they are of."""
    for found in ranks.run(clipped_with_another_model, 2, what):
        assert found["norm"] < 1e-6  # the norm is a float32
        assert found["gradients"] < TOLERANCE


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("max_norm", [1e-3, 1e-2, 1e-2], "0.001 on rank 0, 0.01 on ranks 1, 2"),
        ("max_norm", [1e-3, 1e-3, torch.tensor(0.5)], "0.001 on rank 0, 0.5 on rank 2"),
        ("norm_type", [1, 2.0, 1.0], "1.0 on rank 0, 2.0 on rank 1"),
        ("error_if_nonfinite", [False, True, False], "False on rank 0, True on rank 1"),
    ],
)
def test_ranks_that_clip_differently_are_refused(ranks: RankPool, name: str, values: list[object], said: str) -> None:
    """And gradients are as before."""
    for message, is_shown_by_first, error in ranks.run(clipped_differently, 3, name, values):
        assert message.startswith(f"clip_grad_norm_: ranks differ in {name}: {said}; pass the same {name} on every")
        assert is_shown_by_first
        assert error < TOLERANCE


def test_clipping_between_is_refused_also_without_parameters(ranks: RankPool) -> None:
    *some, nothing = ranks.run(clipped_between, 3)
    assert (some[0][0], nothing[0]) == ("2", "0")
    for _, message in (*some, nothing):
        assert message.startswith("InputError: clip_grad_norm_ needs the gradients of all ranks")


def test_a_rank_that_alone_refuses_a_step_shows_why(ranks: RankPool) -> None:
    (message, _), (other, is_shown_by_first) = ranks.run(refused_where_a_rank_goes_on, 2)
    assert message == ""
    assert re.match(r"GradScaler.step\(\) skips by", other)
    assert not is_shown_by_first


def test_what_all_ranks_raise_is_shown_once(ranks: RankPool) -> None:
    """What rank 0 raises as it plans, and what one rank raises as all save or load."""
    for found in ranks.run(raised_together, 2):
        assert [(kind, text[:19]) for kind, text, _ in found] == [
            ("InfeasibleError", found[0][1][:19]),
            ("CheckpointError", "writing: OSError: n"),
            ("CheckpointError", "a mistake of rank 1"),
        ]
        assert all(is_shown_by_first for *_, is_shown_by_first in found)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_a_loss_of_whole_numbers_is_refused_on_all_ranks(ranks: RankPool, dtype: torch.dtype) -> None:
    for message in ranks.run(loss_of_another_dtype, 2, dtype):
        assert "returned a loss without a gradient" in message


@pytest.mark.parametrize("plan", ["hand data=2", "hand tensor=2", "hand data=2 zero=3", "chain", "replicas 2"])
def test_modules_that_export_refuses_run_on_replicas_of_the_whole_model_and_are_named_elsewhere(
    ranks: RankPool, plan: str
) -> None:
    for found in ranks.run(called_as_a_whole, 2, plan):
        if plan == "replicas 2":
            assert found["message"] == ""
            assert found["error"] < TOLERANCE
        else:
            assert re.search("PlanError: .* stage 0 calls module '0' as a whole", found["message"])


def test_an_empty_batch_is_refused_once(ranks: RankPool) -> None:
    for found in ranks.run(empty_batch, 2):
        assert found == ("InputError", "the batch has no samples; give at least one", True)
