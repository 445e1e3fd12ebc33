"""Under torchrun, too, plans run before one is followed: on all ranks, on copies of the model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rank_pool import RankFailure, RankPool
from rank_tuning import (
    fails_on_rank_1,
    halves,
    meshes_shared,
    refused_on_all,
    remembered,
    trained,
    tuned,
    tuned_on_a_mesh,
    verified,
    with_little_memory,
    without_values_on_rank_1,
)

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("fastest", ["automatic 1", pytest.param("automatic 2", marks=exhaustive), "automatic 3"])
def test_the_plan_is_followed_whose_steps_are_fastest_on_the_slowest_rank(ranks: RankPool, fastest: str) -> None:
    """On rank 0 another one is faster, for which rank 1 takes longer."""
    names = ["automatic 1", "automatic 2", "automatic 3"]
    other = next(name for name in names if name != fastest)
    first, second = ranks.run(tuned, 2, {"tune": 3}, [{fastest: 0.5, other: 0.1}, {fastest: 0.4, other: 2.0}])
    assert first["decision"] == second["decision"]
    assert first["measured"] == second["measured"] == 0.5
    assert set(first["ran"]) == set(second["ran"]) == set(names)
    assert any(f"*{fastest} " in note and note.startswith("tuned over 5 steps each") for note in first["notes"])
    assert first["changed"] == []
    assert second["changed"] == []


def test_by_default_the_plain_model_on_one_rank_is_among_what_runs(ranks: RankPool) -> None:
    slow = dict.fromkeys(("automatic", "without replicas", "without shards", "without a pipeline"), 3.0)
    for one in ranks.run(tuned, 2, {}, [slow, slow]):
        assert "plain model" in one["ran"] or one["ran"] == []  # nothing else is measured where the search chose it
        assert len(one["devices"]) == 1
        assert one["changed"] == []


def test_a_candidate_of_the_users_runs_beside_the_others(ranks: RankPool) -> None:
    options: dict[str, Any] = {"tune": 1, "candidates": {"mine": halves()}}
    for one in ranks.run(tuned, 2, options, [{"mine": 0.5}, {"mine": 0.25}]):
        assert one["measured"] == 0.5
        assert one["devices"] == ("cpu:0", "cpu:1")
        assert any("*mine " in note for note in one["notes"])


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=exhaustive), 3])
def test_a_candidate_on_a_mesh_leaves_the_model_whole(ranks: RankPool, zero: int) -> None:
    for changed, notes, plain, loss in ranks.run(tuned_on_a_mesh, 2, zero):
        assert changed == []
        assert any("*mine " in note for note in notes)
        assert loss == pytest.approx(plain, rel=1e-5)


def test_calibrating_steps_on_ranks_scale_predictions(ranks: RankPool) -> None:
    options: dict[str, Any] = {"tune": 0, "calibrate": True, "max_replicas": 1, "n_microbatches": 2}
    first, second = ranks.run(tuned, 2, options, [{"plain model on cpu:0": 2.0}, {"plain model on cpu:0": 1.0}])
    assert set(first["ran"]) <= {"plain model on cpu:0", "plain model on 2 devices"}
    assert first["scale"] == second["scale"]
    assert any(note.startswith("predictions scaled by") for note in first["notes"])
    assert first["changed"] == []


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (2, {"tune": 2}),
        (2, {"tune": 2, "n_microbatches": 4, "max_replicas": 1}),
        (4, {}),
        pytest.param(2, {}, marks=exhaustive),
        pytest.param(3, {"tune": 3}, marks=exhaustive),
    ],
)
def test_a_tuned_plan_trains_like_the_plain_model_and_no_copy_stays(
    ranks: RankPool, n: int, options: dict[str, Any]
) -> None:
    for plain, found, models in ranks.run(trained, n, options):
        assert found == pytest.approx(plain, rel=1e-6)
        assert models == 1


def test_measured_steps_of_ranks_are_remembered(ranks: RankPool) -> None:
    for first, second, alike in ranks.run(remembered, 2):
        assert alike
        assert second == []
        assert len(set(first)) != 1  # none, where the search chose the plain model, or several


def test_a_model_without_values_is_not_run(ranks: RankPool) -> None:
    for message in ranks.run(without_values_on_rank_1, 2, 2):
        assert message.startswith(
            "InputError: tune, candidates and calibrate run the model on the ranks, and it has no"
        )
    for notes in ranks.run(without_values_on_rank_1, 2, "auto"):
        assert "not measured beside other plans: the model has no values yet on rank 1" in notes or "tuned" not in notes


def test_plans_that_do_not_fit_beside_the_model_are_not_run(ranks: RankPool) -> None:
    for notes in ranks.run(with_little_memory, 2):
        found = [note for note in notes if note.startswith("not measured beside other plans")]
        assert all(re.search(r"plans in turn need .* on rank 0, which has 1 B beside the model", n) for n in found), (
            found
        )


def test_a_step_that_fails_on_one_rank_ends_the_job_with_its_reason(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(fails_on_rank_1, 2)
    assert re.search(r"AutoparError: rank 1 .*|rank 0:\nits process ended", str(failure.value))


def test_plans_that_ranks_refuse_are_refused_on_all_of_them_and_calls_go_on(ranks: RankPool) -> None:
    (first, loss), (second, other) = ranks.run(refused_on_all, 2)
    assert first == second
    assert re.match("PlanError: one process a device does not run this plan: .* sparse", first), first
    assert loss == other


def test_verify_compares_a_first_call_and_says_where_ranks_have_no_values(ranks: RankPool) -> None:
    for first, later, warned in ranks.run(verified, 2):
        assert first > 0
        assert later == 0
        assert any(text.startswith("verify=True does not check this call") for text in warned)


def test_modules_with_one_plan_share_its_meshes(ranks: RankPool) -> None:
    for first, second in ranks.run(meshes_shared, 2):
        assert first == second > 0
