"""Gradients of inputs reach what runs before the pipelined module, on every rank."""

from __future__ import annotations

import pytest
from rank_cases import Job
from rank_inputs import of_frozen, of_inputs, of_several_readers, of_shares
from rank_pool import RankPool

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9  # in float64


@pytest.mark.parametrize("call", ["forward", "train_step"])
@pytest.mark.parametrize(
    ("n", "job"),
    [
        (2, Job("mlp", "chain")),
        (2, Job("mlp", "chain", "zb-h1")),
        (2, Job("mlp", "replicas 2")),
        (3, Job("mlp", "replicas 2,1")),
        (3, Job("skips", "chain")),
        (2, Job("mlp", "hand tensor=2")),
        (2, Job("mlp", "hand data=2")),
        (3, Job("mlp", "shards 2 1 seed 1")),
    ],
    ids=str,
)
def test_what_runs_before_the_module_trains_as_in_one_process(ranks: RankPool, n: int, job: Job, call: str) -> None:
    for errors in ranks.run(of_inputs, n, job, call):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_gradients_of_all_stages_that_read_an_input_add_up(ranks: RankPool, n_microbatches: int) -> None:
    for errors in ranks.run(of_several_readers, 3, n_microbatches):
        assert max(errors) < TOLERANCE


def test_a_module_that_trains_nothing_passes_gradients_on(ranks: RankPool) -> None:
    for error, trains in ranks.run(of_frozen, 2):
        assert error < TOLERANCE
        assert not trains


def test_gradients_of_shares_are_refused(ranks: RankPool) -> None:
    for message in ranks.run(of_shares, 2):
        assert message.startswith("InputError: an input needs a gradient, and with data='per-rank' ")
