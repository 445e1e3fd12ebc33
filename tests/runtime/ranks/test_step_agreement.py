"""Different optimizer steps on ranks are refused before the copies of a parameter drift apart."""

from __future__ import annotations

import re

import pytest
from rank_pool import RankPool
from rank_steps import (
    copies_compared,
    copies_that_round_differently,
    steps_that_differ,
    steps_that_differ_between_stages,
    steps_that_may_differ,
)

pytestmark = pytest.mark.slow

SAID = {
    "rate": "SGD has lr=0.1 on rank 0, lr=0.2 on rank 1; every rank must make the same steps",
    "option": "SGD has momentum=0 on rank 0, momentum=0.9 on rank 1; every rank",
    "class": "SGD on rank 0, AdamW on rank 1; every rank",
    "no step": "1 on rank 0, 0 on rank 1, since the last call; every rank",
    "value": "have drifted apart: rank 1 from rank 0",
}


@pytest.mark.parametrize(
    ("model", "plan", "what"),
    [
        *[("mlp", "replicas 2", what) for what in SAID],
        *[("mlp", "hand data=2 zero=1", what) for what in ("rate", "no step")],
        ("mlp", "hand data=2 zero=3", "rate"),
        ("mlp", "hand tensor=2", "no step"),
        ("tied", "chain", "rate"),
        ("tied", "chain", "value"),
    ],
)
@pytest.mark.parametrize("made", ["before", "after"])
def test_steps_that_differ_are_refused(ranks: RankPool, model: str, plan: str, what: str, made: str) -> None:
    messages = ranks.run(steps_that_differ, 2, model, plan, what, made)
    assert len(set(messages)) == 1
    assert re.search(SAID[what], messages[0]), messages[0]
    assert re.match("InputError: (ranks differ in the optimizer's steps|the copies of '[a-z0-9.]+')", messages[0])


@pytest.mark.parametrize("what", ["rate", "no step", "swapped", "groups"])
def test_an_optimizer_of_the_whole_model_makes_the_same_steps_with_all_stages(ranks: RankPool, what: str) -> None:
    said = SAID | {
        "swapped": "SGD has lr of group 0=0.2 on rank 0, lr of group 0=0.1 on rank 1; every rank",
        "groups": r"SGD has 1 parameter group on rank 0, 2 on rank 1: call add_param_group\(\) on every",
    }
    for message in ranks.run(steps_that_differ, 2, "mlp", "chain", what, "before"):
        assert re.search(said[what], message), message


@pytest.mark.parametrize("what", ["rate", "class", "no step"])
def test_optimizers_of_all_parameters_of_a_rank_that_differ_are_warned_of_once(ranks: RankPool, what: str) -> None:
    """Made after the first call: a script may mean to train its stages in different ways."""
    (*messages, warned), silent = ranks.run(steps_that_differ_between_stages, 2, what)
    assert {*messages, *silent} == {""}
    assert warned.startswith("ranks differ in the steps of an optimizer that has all of a rank's parameters: ")
    assert SAID[what].partition(";")[0] in warned


@pytest.mark.parametrize(
    "what",
    [
        *("one layer", "a group later", "two before", "two after", "rates by layer", "own option", "frozen stage"),
        *("rates by all layers", "weights and biases", "the last stage", "the last layer", "frozen later"),
    ],
)
def test_stages_may_be_trained_in_different_ways(ranks: RankPool, what: str) -> None:
    assert {message for found in ranks.run(steps_that_may_differ, 2, what) for message in found} == {""}


@pytest.mark.parametrize(
    ("model", "plan", "n", "optimizer", "threads"),
    [
        ("mlp", "replicas 4", 4, "AdamW", 1),
        pytest.param("mlp", "replicas 2,2", 4, "SGD", 1, marks=pytest.mark.exhaustive),
        ("gpt2", "replicas 2,1", 3, "AdamW", 2),
        ("gpt2", "states 2x2 seed 1", 4, "RMSprop", 1),
        ("mixtral", "shards 2*2 seed 2", 4, "AdamW", 1),
        ("tied", "chain", 2, "AdamW", 2),
    ],
)
def test_copies_have_the_same_bits(
    ranks: RankPool, model: str, plan: str, n: int, optimizer: str, threads: int
) -> None:
    found = ranks.run(copies_compared, n, model, plan, optimizer, threads)
    assert {message for _, message in found} == {""}
    assert max(count for count, _ in found) > 0


def test_copies_that_differ_by_rounding_are_warned_of_once(ranks: RankPool) -> None:
    """Optimizers may round differently on ranks: that must not end a training."""
    (first, warned), (second, silent) = ranks.run(copies_that_round_differently, 2)
    assert (first, second, silent) == ("", "", [])
    assert len(warned) == 1
    assert re.match("the copies of '0.weight' on ranks 0, 1 have drifted apart: rank 1 from rank 0, by", warned[0])
