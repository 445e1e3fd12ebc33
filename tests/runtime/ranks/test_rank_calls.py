"""Calls beside training steps, what a rank holds, and what ranks refuse: always the same on all ranks."""

from __future__ import annotations

import re

import pytest
from rank_behaviour import (
    anew_in_one_process,
    evaluation,
    fails_on_the_last_rank,
    late_optimizer,
    loss_of_one_rank,
    memory,
    refusals,
    seen_by_hooks,
    written_parameter,
)
from rank_pool import RankFailure, RankPool

pytestmark = pytest.mark.slow


def test_further_calls_give_what_one_process_gives(ranks: RankPool) -> None:
    for errors in ranks.run(evaluation, 2):
        assert max(errors) < 1e-6


def test_hooks_run_on_the_rank_of_their_layer(ranks: RankPool) -> None:
    assert ranks.run(seen_by_hooks, 2) == [[], [(2, 12)] * 4]


def test_a_rank_holds_its_own_parameters_alone(ranks: RankPool) -> None:
    first, second = ranks.run(memory, 2)
    half = 3 * (12 * 12 + 12) * 4
    assert first["names"] == first["state"] == [f"{i}.{n}" for i in (0, 2, 4) for n in ("weight", "bias")]
    assert second["names"] == second["state"] == [f"{i}.{n}" for i in (6, 8, 10) for n in ("weight", "bias")]
    for one in (first, second):
        assert one["local"] == half
        assert one["left"] <= 24 * 4  # a number for every tensor, in the model's old parameters and the stages' code
        assert one["is nan"]


def test_every_rank_refuses_in_the_same_words(ranks: RankPool) -> None:
    first, second = ranks.run(refusals, 2)
    assert first == second
    wanted = {
        "weights": "InputError: ranks differ in the model's weights: .* on rank 0, .* on rank 1; build the model",
        "plan": "InputError: ranks differ in the plan, .* Rank 0 has the first, rank 1 the second:\n"
        "- schedule gpipe instead of 1f1b$",
        "work": "$",
        "options": "InputError: not with one process a device so far: dynamic with sizes: give dynamic=True, or None",
        "planning": "InfeasibleError: ",
        "content": r"InputError: ranks differ in the content of input 'input' \(\(8, 12\) .*\): rank 1 from rank 0",
        "shapes": r"InputError: ranks differ in input 'input': \(4, 12\) .* on rank 0, \(5, 12\) .* on rank 1",
        "kind": "InputError: ranks differ in the call: train_step .* on rank 0, a forward .* on rank 1",
        "input gradient": r"InputError: ranks differ in input 'input': \(8, 12\) torch.float32 on rank 0, "
        r"\(8, 12\) torch.float32 that requires a gradient on rank 1",
        "autocast": "InputError: ranks differ in the call: .* without autocast on rank 0, .* to torch.bfloat16",
        "copy": "InputError: a module whose parameters are spread over ranks cannot be copied",
        "profile": "InputError: ranks differ in the call: train_step .* on rank 0, "
        "train_step .* with profile=True .* on rank 1",
    }
    assert set(first) == set(wanted)
    for what, pattern in wanted.items():
        assert re.match(pattern, first[what]), f"{what}: {first[what]!r}"


def test_an_optimizer_with_states_from_before_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(late_optimizer, 2):
        assert "the optimizer has states of parameters that have since been placed" in message


def test_a_loss_that_one_rank_alone_cannot_capture_is_refused_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(loss_of_one_rank, 2)
    assert first == second
    assert re.match(
        r"InputError: rank 1 failed in loss_fn 'loss_fn' \(.*rank_behaviour.py:\d+\): ValueError: not here, .* other "
        "ranks did not",
        first,
    ), first


def test_a_forward_that_writes_a_parameter_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(written_parameter, 2):
        assert re.match("ParameterWriteError: the forward writes the parameter 'scale'", message), message


def test_a_failed_call_ends_both_ranks(ranks: RankPool) -> None:
    """The rank whose hook raises names its error, and refuses further calls. The other one says where and why."""
    with pytest.raises(RankFailure) as failure:
        ranks.run(fails_on_the_last_rank, 2)
    assert re.search(
        r"AutoparError: rank 1 failed in the forward of stage 1, micro-batch 0 \(call 2, train_step\): ValueError: the "
        r"user's own mistake; rank 0 was waiting for it in the backward of stage 0|rank 0:\nits process ended",
        str(failure.value),
    )


def test_process_groups_that_start_again_in_a_process_are_watched(ranks: RankPool) -> None:
    assert ranks.run(anew_in_one_process, 2) == [True, True]
