"""Parameters that a later call is the first to read train as in the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
from collective_log import disagreements
from rank_cases import Job
from rank_later import (
    accumulated,
    alternating,
    copied,
    exchanged,
    joined_inside,
    out_of_order,
    placed_again,
    refused,
    sharing_a_norm,
)
from rank_pool import RankPool

pytestmark = pytest.mark.slow

CHAIN, TENSOR = Job("tasks", "chain"), Job("tasks", "hand tensor=2")
IDLE = Job("tasks", "replicas 1,1")  # on three ranks, the last one has no stage


@pytest.mark.parametrize(
    ("n", "job", "first_eval"),
    [
        (2, CHAIN, False),
        (2, CHAIN, True),
        (2, TENSOR, False),
        (2, Job("tasks", "hand data=2 zero=1"), True),
        (3, IDLE, False),
        (2, Job("tasks", "replicas 2"), True),
    ],
    ids=["chain", "chain eval", "tensor", "zero eval", "idle", "replicas eval"],
)
def test_heads_of_other_tasks_and_modes_train(
    ranks: RankPool, tmp_path: Path, n: int, job: Job, first_eval: bool
) -> None:
    for errors in ranks.run(alternating, n, job, tmp_path, first_eval):
        assert max(errors) < 1e-9


@pytest.mark.parametrize("job", [CHAIN, TENSOR, Job("tasks", "replicas 2")], ids=["chain", "tensor", "replicas"])
def test_their_gradients_are_accumulated(ranks: RankPool, job: Job) -> None:
    for errors in ranks.run(accumulated, 2, job):
        assert max(errors) < 1e-9


def test_another_part_than_a_rank_has_is_refused_on_all_ranks_and_they_go_on(ranks: RankPool) -> None:
    """The plan cuts the auxiliary head, which the first call, an evaluation, does not read."""
    for error in ranks.run(refused, 2, TENSOR):
        assert "needs 'aux.weight' on rank 0" in error
        assert "every rank has it whole, because no stage of the first call read it" in error


def test_one_backward_through_both_calls_is_accumulated(ranks: RankPool) -> None:
    assert max(ranks.run(joined_inside, 2, CHAIN)) < 1e-9


@pytest.mark.parametrize(("n", "job"), [(2, CHAIN), (2, TENSOR), (3, IDLE)], ids=["chain", "tensor", "idle"])
def test_all_ranks_begin_their_collectives_in_one_order(ranks: RankPool, n: int, job: Job) -> None:
    assert disagreements(ranks.run(exchanged, n, job)) == []


def test_a_module_without_parameters_may_be_in_two_models(ranks: RankPool) -> None:
    assert max(ranks.run(sharing_a_norm, 2, CHAIN)) < 1e-9


def test_a_copy_of_a_placed_model_is_refused_on_all_ranks(ranks: RankPool) -> None:
    """Also on the last one, which has no part of it."""
    errors = ranks.run(copied, 3, IDLE)
    assert "is a DTensor before the first call" in errors[0]
    assert all(errors)


def test_a_backward_that_would_lose_accumulated_gradients_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(out_of_order, 2, Job("tasks", "replicas 2")):
        assert "go back through calls in the order in which they began" in error


@pytest.mark.parametrize("job", [CHAIN, Job("tasks", "replicas 2")], ids=["chain", "replicas"])
def test_a_placed_model_takes_no_other_plan(ranks: RankPool, job: Job) -> None:
    for errors in ranks.run(placed_again, 2, job):
        assert len(errors) == 3
        assert all("has placed" in error and "build the model anew" in error for error in errors)
