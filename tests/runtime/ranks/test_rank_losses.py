"""What a loss reads besides the model's outputs gets the plain model's gradient, on every rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_cases import Job
from rank_losses import (
    of_own_parameters,
    of_refused,
    of_refused_parameters,
    of_targets,
    of_the_models_parameters,
    own_losses,
)
from rank_pool import RankFailure, RankPool

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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("n", "job"), [*JOBS, (2, Job("mlp", "hand data=2 zero=1"))], ids=str)
def test_a_term_of_the_models_parameters_goes_back_by_itself(ranks: RankPool, n: int, job: Job, when: str) -> None:
    for errors in ranks.run(of_the_models_parameters, n, job, when):
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("where", ["whole", "outside"])
def test_a_loss_with_the_models_parameters_is_refused_with_what_to_do_instead(ranks: RankPool, where: str) -> None:
    title = "the caller's loss" if where == "outside" else "loss_fn '<lambda>'"
    for message in ranks.run(of_refused_parameters, 2, where):
        assert message.startswith(f"InputError: {title}")
        assert "reads parameters of the model" in message
        assert "by itself, before or after the call" in message


@pytest.mark.parametrize("where", ["all", "one", "product"])
def test_the_rank_that_computes_such_a_loss_refuses_it_and_all_end(ranks: RankPool, where: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with pytest.raises(RankFailure):
        ranks.run(of_refused_parameters, 2, where, said)
    assert re.match("InputError: loss_fn '<lambda>' .* reads parameters of the model", said.read_text())


@pytest.mark.parametrize("kind", ["lambda", "partial", "module", "closure", "read", "logged"])
def test_equal_losses_that_every_rank_makes_for_itself_train_as_in_one_process(ranks: RankPool, kind: str) -> None:
    for found in ranks.run(own_losses, 2, "chain", kind):
        assert found["message"] == ""
        assert found["error"] < 1e-10


@pytest.mark.parametrize("plan", ["chain", "hand data=2"])
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("other function", r"the loss: loss_fn 'l1_loss' .* on rank 0, loss_fn 'mse_loss' .* on rank 1; "),
        ("other partial", "what loss_fn 'partial' computes: its code, .* is another one on rank 1; "),
        ("other closure", "what loss_fn '<lambda>' .* computes: its code, .* is another one on rank 1; "),
        ("other later", r"the loss: loss_fn 'mse_loss' .* on rank 0, loss_fn 'l1_loss' .* on rank 1; "),
    ],
)
def test_different_losses_are_refused_on_all_ranks(ranks: RankPool, plan: str, kind: str, named: str) -> None:
    first, second = ranks.run(own_losses, 2, plan, kind)
    assert first == second
    assert re.match(f"InputError: ranks differ in {named}", first["message"]), first["message"]


def test_a_loss_that_raises_on_one_rank_ends_all_with_its_error(ranks: RankPool) -> None:
    first, second = ranks.run(own_losses, 2, "chain", "raises")
    assert first == second
    said = (
        r"InputError: rank 1 failed in loss_fn '_raises_on_one' \(\S*rank_losses.py:\d+\): LookupError: no class 7, in"
    )
    assert re.match(said, first["message"]), first["message"]
