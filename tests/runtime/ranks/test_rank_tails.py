"""On ranks, the end of a model that needs the whole batch computes what the plain model does."""

from __future__ import annotations

import pytest
from rank_cases import Job
from rank_pool import RankPool
from rank_tails import in_evaluation, of_tails

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9  # in float64
JOBS = [
    (2, Job("contrast", "chain")),
    (2, Job("contrast", "chain", n_microbatches=1)),
    (2, Job("contrast", "replicas 2")),
    (3, Job("contrast", "replicas 1,2")),
    (2, Job("contrast", "hand tensor=2")),
    (2, Job("contrast", "hand data=2 zero=1")),
]


@pytest.mark.filterwarnings("ignore:the loss is computed on the whole batch")
@pytest.mark.parametrize("call", ["train_step", "backward"])
@pytest.mark.parametrize("data", ["whole", "per-rank"])
@pytest.mark.parametrize(("n", "job"), JOBS, ids=str)
def test_steps_are_those_of_the_plain_model(ranks: RankPool, n: int, job: Job, data: str, call: str) -> None:
    if data == "per-rank" and 8 % n:
        pytest.skip("chunk() makes uneven shares, which other tests have")
    for errors in ranks.run(of_tails, n, job, data, call):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.parametrize(("n", "job"), JOBS, ids=str)
def test_outputs_without_gradients_are_those_of_the_plain_model(ranks: RankPool, n: int, job: Job, rows: int) -> None:
    for error in ranks.run(in_evaluation, n, job, rows):
        assert error < TOLERANCE
