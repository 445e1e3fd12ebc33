"""Training on ranks as one process does it: shares of the batch, clipping, accumulation, scaling, optimizers."""

from __future__ import annotations

import re

import pytest
from rank_cases import Job
from rank_pool import RankPool
from rank_training import (
    OPTIMIZERS,
    SCHEDULES,
    accumulated,
    accumulation_of_train_steps,
    accumulation_refused,
    bytes_received,
    clipped,
    clipping_of_a_part,
    counted_targets,
    evaluated,
    optimized,
    optimized_with_others,
    own_losses,
    own_shares,
    plain_scaler,
    scaled,
    shared_inputs,
    shares_refused,
    sparse_gradients,
    whole_batch_loss,
)
from torch import nn

TOLERANCE = 1e-9  # in float64

slow = pytest.mark.slow


@pytest.mark.slow
def test_shares_of_the_batch_train_as_the_whole_batch_in_one_process(ranks: RankPool) -> None:
    for errors in ranks.run(own_shares, 2, Job("mlp", "chain"), [(4, 4), (5, 2)]):
        assert max(errors) < TOLERANCE


@slow
@pytest.mark.parametrize(
    ("n", "job", "sizes"),
    [
        (2, Job("mlp", "chain"), [(4, 4), (3, 2), (6, 0), (0, 5), (7, 1)]),
        (2, Job("mlp", "replicas 2"), [(4, 4), (3, 2), (1, 5)]),
        (3, Job("mlp", "chunks 2", n_microbatches=6), [(3, 3, 2), (1, 2, 3)]),
        (4, Job("mlp", "replicas 2,2", "gpipe"), [(2, 2, 2, 2), (1, 3, 0, 2)]),
        (2, Job("gpt2", "chain"), [(4, 4), (5, 2)]),
        (2, Job("gpt2", "hand tensor=2"), [(4, 4), (5, 3)]),
        (2, Job("mlp", "hand data=2"), [(4, 4), (6, 2)]),
        (2, Job("tied", "chain"), [(4, 4), (1, 5)]),
        (4, Job("gpt2", "hand tensor=2 pipeline=2"), [(2, 2, 2, 2), (1, 1, 4, 2)]),
    ],
    ids=lambda value: f"{value.model}-{value.plan}" if isinstance(value, Job) else "",
)
def test_shares_of_any_size_train_as_one_batch(ranks: RankPool, n: int, job: Job, sizes: list[tuple[int, ...]]) -> None:
    for errors in ranks.run(own_shares, n, job, sizes):
        assert max(errors) < TOLERANCE


@slow
@pytest.mark.parametrize("plan", ["chain", "replicas 2", "hand data=2"])
def test_losses_of_own_samples_make_a_mean_weighted_by_samples(ranks: RankPool, plan: str) -> None:
    sizes = [(4, 4), (6, 2)] if plan == "hand data=2" else [(4, 4), (5, 2), (0, 3)]
    for errors in ranks.run(own_losses, 2, Job("mlp", plan), sizes):
        assert max(errors) < TOLERANCE


@slow
def test_losses_that_count_targets_are_those_of_one_batch(ranks: RankPool) -> None:
    for errors in ranks.run(counted_targets, 2):
        assert max(errors) < TOLERANCE


@slow
def test_inputs_that_belong_to_no_sample_are_not_joined(ranks: RankPool) -> None:
    for errors in ranks.run(shared_inputs, 2):
        assert max(errors) < TOLERANCE


@slow
def test_shares_that_make_no_batch_are_refused(ranks: RankPool) -> None:
    first, second = ranks.run(shares_refused, 2)
    for found in (first, second):
        assert re.match(r"InputError: ranks differ in the content of input 'table' \(\(6, 12\)", found["table"]), found
        assert re.match(
            r"InputError: .*target_dim\[0\] is 0, but that target is \(3, 12\) and this rank has 4", found["target"]
        )
        assert re.match("InputError: .* has no samples", found["none"]), found
    assert "every rank passed the same samples" in first["equal"]
    assert not second["equal"]


@slow
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("sharded", [False, True])
def test_sparse_gradients_are_refused(ranks: RankPool, table: type[nn.Module], sharded: bool) -> None:
    for message in ranks.run(sparse_gradients, 2, table, sharded):
        assert re.match("PlanError: .*trains '0.weight' with sparse gradients", message), message


@slow
def test_a_loss_of_the_whole_batch_sees_the_samples_of_all_ranks(ranks: RankPool) -> None:
    for errors in ranks.run(whole_batch_loss, 2):
        assert max(errors) < TOLERANCE


@slow
def test_a_rank_gets_only_the_samples_that_its_stages_read(ranks: RankPool) -> None:
    """Four samples of twelve float64: at first inputs and targets, then inputs on rank 0 and targets on rank 1."""
    size = 4 * 12 * 8
    assert ranks.run(bytes_received, 2) == [[2 * size, size], [2 * size, size]]


@slow
@pytest.mark.parametrize("job", [Job("mlp", "hand data=2"), Job("gpt2", "hand tensor=2"), Job("mlp", "chain")])
def test_evaluation_takes_any_number_of_samples(ranks: RankPool, job: Job) -> None:
    for errors in ranks.run(evaluated, 2, job, (8, 5, 3, 1)):
        assert max(errors) < TOLERANCE


NORMS = [
    *[(2, Job("tied", "chain"), p) for p in (1.0, 2.0, 3.5, float("inf"))],
    *[
        (n, job, p)
        for p in (2.0, float("inf"))
        for n, job in [
            (2, Job("mlp", "replicas 2")),
            (3, Job("gpt2", "chain")),
            (4, Job("gpt2", "hand tensor=2 pipeline=2")),
            (4, Job("gpt2", "hand tensor=2 data=2 zero=3")),
            (4, Job("attention", "shards 2x2")),
            (4, Job("mlp", "replicas 2,1")),
        ]
    ],
]


@slow
@pytest.mark.parametrize(
    ("n", "job", "norm_type"),
    NORMS,
    ids=lambda value: f"{value.model}-{value.plan}" if isinstance(value, Job) else str(value),
)
def test_the_norm_counts_every_gradient_once(ranks: RankPool, n: int, job: Job, norm_type: float) -> None:
    for max_norm in (1e-3, 1e9):
        for errors in ranks.run(clipped, n, job, norm_type, max_norm):
            assert max(errors) < 1e-6  # the norm is returned in the default dtype


@slow
def test_parts_of_a_model_are_clipped_by_their_own_norm(ranks: RankPool) -> None:
    for errors in ranks.run(clipping_of_a_part, 2):
        assert max(errors) < 1e-6


@slow
@pytest.mark.parametrize("call", ["train_step", "backward"])
@pytest.mark.parametrize(
    ("n", "job"),
    [
        (2, Job("mlp", "chain")),
        (2, Job("mlp", "replicas 2")),
        (2, Job("tied", "chain")),
        (2, Job("mlp", "hand data=2")),
    ],
    ids=lambda value: f"{value.model}-{value.plan}" if isinstance(value, Job) else "",
)
def test_accumulated_gradients_are_those_of_one_process(ranks: RankPool, n: int, job: Job, call: str) -> None:
    for errors in ranks.run(accumulated, n, job, call):
        assert max(errors) < TOLERANCE


@slow
def test_train_steps_accumulate_without_operators_on_dtensors(ranks: RankPool) -> None:
    for names, message, errors in ranks.run(accumulation_of_train_steps, 2):
        assert not names
        assert message.startswith("InputError: a parameter gets a gradient inside accumulate()")
        assert max(errors) < TOLERANCE


@slow
def test_incomplete_gradients_are_refused(ranks: RankPool) -> None:
    wanted = {
        "step": "InputError: an optimizer's step needs the gradients of all ranks",
        "clip": "InputError: clip_grad_norm_ needs the gradients of all ranks",
        "mixed": r"InputError: accumulate\(\) begins while parameters have gradients",
        "penalty": r"InputError: a parameter gets a gradient inside accumulate\(\) that is not the pipeline's own",
    }
    for found in ranks.run(accumulation_refused, 2):
        assert set(found) == set(wanted)
        for what, pattern in wanted.items():
            assert re.match(pattern, found[what]), f"{what}: {found[what]!r}"


PLANS = ["chain", "replicas 2", "hand tensor=2"]
REFUSED = {
    ("LBFGS", "chain"): "torch.optim.LBFGS measures one step along all parameters",
    **{(f"fused {kind}", plan): f"torch.optim.{kind} with fused=True" for kind in ("SGD", "Adagrad") for plan in PLANS},
    ("Adafactor", "hand tensor=2"): "torch.optim.Adafactor cannot step parts of a parameter",
    **{("plain Adafactor", plan): "transformers.optimization.Adafactor cannot step the parameters" for plan in PLANS},
    ("Rprop", "hand tensor=2"): "torch.optim.Rprop cannot step parts of a parameter",
}

ROUNDED = {("Muon", "hand tensor=2"): 2**-6}  # bfloat16 has 8 bits


@slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_optimizer_steps_as_in_one_process_or_is_refused(ranks: RankPool, name: str, plan: str) -> None:
    for early in (True, False):
        found = ranks.run(optimized, 2, name, plan, early)
        for one in found:
            if (name, plan) in REFUSED:
                assert re.match(f"InputError: {REFUSED[name, plan]}", str(one)), one
            else:
                assert isinstance(one, float), one
                assert one < ROUNDED.get((name, plan), 1e-8)


@slow
@pytest.mark.parametrize("option", ["foreach", "fused"])
def test_others_parameters_are_stepped_at_once_only_from_a_group_of_their_own(ranks: RankPool, option: str) -> None:
    for plan in ("hand data=2 zero=1", "chain"):
        for said, error in ranks.run(optimized_with_others, 2, option, plan):
            assert said.startswith(f"InputError: torch.optim.AdamW with {option}=True steps all parameters of a group")
            assert error < 1e-8


@slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_schedules_work_as_in_one_process(ranks: RankPool, schedule: str) -> None:
    for error in ranks.run(optimized, 2, "momentum", "chain", True, schedule):
        assert isinstance(error, float), error
        assert error < 1e-8


@slow
@pytest.mark.parametrize("call", ["train_step", "backward"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_inf_on_one_rank_skips_the_step_on_all(ranks: RankPool, call: str, fused: bool) -> None:
    for overflowing in (0, 1):
        for found in ranks.run(scaled, 2, call, fused, overflowing):
            assert max(found["errors"]) < 1e-8
            assert all(ours == theirs for ours, theirs in found["scales"])
            assert found["scales"][1][0] > found["scales"][2][0]  # the step with inf


@slow
def test_the_scaler_of_one_process_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(plain_scaler, 2):
        assert re.match(r"InputError: GradScaler.step\(\) skips by the gradients of its own rank alone", message), (
            message
        )
