"""Parameters that no stage reads are on every rank, and train as in the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_cases import Job
from rank_pool import RankPool
from rank_unread import filled, trained

pytestmark = pytest.mark.slow

CHAIN, TENSOR = Job("spare", "chain"), Job("spare", "hand tensor=2")
IDLE = Job("spare", "replicas 1,1")  # on three ranks, the last one has no stage


@pytest.mark.parametrize(
    ("n", "job", "then", "late"),
    [
        (2, CHAIN, TENSOR, False),
        (2, TENSOR, CHAIN, True),
        (2, Job("spare", "hand data=2 zero=1"), Job("spare", "replicas 2"), False),
        (3, IDLE, IDLE, True),
    ],
    ids=["chain", "tensor", "zero", "idle"],
)
def test_terms_of_all_parameters_train_them_as_in_one_process(
    ranks: RankPool, tmp_path: Path, n: int, job: Job, then: Job, late: bool
) -> None:
    for errors in ranks.run(trained, n, job, then, tmp_path, late):
        assert max(errors) < 1e-9


def test_they_get_their_initial_values(ranks: RankPool) -> None:
    names = ["spare.weight", "spare.bias", "again.bias", "frozen.weight", "frozen.bias", "factor"]
    for values in ranks.run(filled, 2, CHAIN):
        assert values == {name: [float(len(name))] for name in names}
