"""What a loss reads besides the model's outputs gets the plain model's gradient, on every rank."""

from __future__ import annotations

import pytest
from rank_cases import Job
from rank_losses import of_own_parameters, of_refused, of_targets
from rank_pool import RankPool

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9  # in float64

JOBS = [
    (2, Job("mlp", "chain")),
    (2, Job("mlp", "chain", n_microbatches=1)),
    (2, Job("mlp", "chain", "zb-h1")),
    (2, Job("mlp", "replicas 2")),
    (3, Job("mlp", "replicas 1,2")),
    (2, Job("mlp", "hand tensor=2")),
]


@pytest.mark.parametrize(("n", "job"), JOBS, ids=str)
def test_targets_that_require_a_gradient_get_it_on_every_rank(ranks: RankPool, n: int, job: Job) -> None:
    for errors in ranks.run(of_targets, n, job):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("kind", ["module", "closure", "default"])
@pytest.mark.parametrize(("n", "job"), JOBS, ids=str)
def test_parameters_of_the_loss_get_their_gradient_on_every_rank(ranks: RankPool, n: int, job: Job, kind: str) -> None:
    for errors in ranks.run(of_own_parameters, n, job, kind):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("hook", "reads 'tau', and hooks run on its gradient"),
        ("made", "reads a tensor of shape () and dtype torch.float64 that requires a gradient, which other ranks"),
        ("per-rank", "a target needs a gradient, and with data='per-rank' "),
    ],
)
def test_a_gradient_that_would_stay_on_one_rank_is_refused(ranks: RankPool, kind: str, said: str) -> None:
    for message, has_gradient, later in ranks.run(of_refused, 2, kind):
        assert message.startswith("InputError: ")
        assert said in message
        assert not has_gradient
        assert later < TOLERANCE
