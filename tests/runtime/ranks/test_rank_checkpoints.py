"""Checkpoints of ranks: saved under one plan, they go on under any other as if training had not stopped."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from rank_cases import MODELS, Job
from rank_checkpoints import (
    Run,
    copied_first,
    extras,
    killed_while_saving,
    killed_while_saving_in_the_background,
    losses,
    messages,
    refused_on_ranks,
    states_go_on,
    whole_state,
)
from rank_pool import RankFailure, RankPool
from safetensors.torch import load_file
from torch import nn

import autopar
from autopar.runtime.checkpoints.export import export

pytestmark = pytest.mark.slow

STEPS = 20
SQUARE = Job("gpt2", "hand tensor=2 pipeline=2 micro_batch=2")  # 2 x 2
CHAIN = Job("gpt2", "chain")


def run(ranks: RankPool, part: Run, n: int | None) -> list[float]:
    """The losses, which are the same on all ranks. `n`: None for one process."""
    if n is None:
        return losses(part)
    found = ranks.run(losses, n, part)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(Run(CHAIN, tmp_path_factory.mktemp("none"), steps=4 + STEPS, plain=True))


@pytest.fixture(scope="module")
def of_square(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, undisturbed: list[float]) -> Path:
    """The checkpoint of four ranks, saved while training goes on."""
    folder = tmp_path_factory.mktemp("square")
    found = run(ranks, Run(SQUARE, folder, steps=6, save_at=4, asynchronous=True), 4)
    assert found == pytest.approx(undisturbed[:6], rel=1e-5)
    return folder


@pytest.mark.parametrize(
    ("then", "n", "options"),
    [
        (CHAIN, 3, {}),
        (CHAIN, 3, {"placed_first": True}),
        (Job("gpt2", "replicas 2"), 2, {}),
        (Job("gpt2", "hand data=2 zero=1"), 2, {}),
        (Job("gpt2", "hand tensor=2 data=2 zero=2"), 4, {}),
        (CHAIN, None, {"plain": True}),
        (CHAIN, None, {}),
        (SQUARE, 4, {}),
    ],
    ids=["1x3", "1x3, placed first", "replicas", "zero=1", "2x2 zero=2", "the plain model", "one process", "2x2"],
)
def test_two_by_two_goes_on_as(
    ranks: RankPool, of_square: Path, undisturbed: list[float], then: Job, n: int | None, options: dict[str, bool]
) -> None:
    part = Run(then, of_square, steps=STEPS, load=True, seed=9, **options)
    assert run(ranks, part, n) == pytest.approx(undisturbed[4:], rel=1e-4)


@pytest.fixture(scope="module")
def of_states(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, undisturbed: list[float]) -> Path:
    """The checkpoint of four ranks that store parts of what they read."""
    folder = tmp_path_factory.mktemp("states")
    part = Run(Job("gpt2", "hand tensor=2 data=2 zero=2"), folder, steps=4, save_at=4)
    assert run(ranks, part, 4) == pytest.approx(undisturbed[:4], rel=1e-5)
    return folder


@pytest.mark.parametrize(
    ("then", "n", "plain"),
    [(Job("gpt2", "hand data=2 zero=3"), 2, False), (CHAIN, 2, False), (CHAIN, 3, False), (CHAIN, None, True)],
    ids=["zero=3", "1x2", "1x3", "the plain model"],
)
def test_parts_of_states_of_four_ranks_go_on_as(
    ranks: RankPool, of_states: Path, undisturbed: list[float], then: Job, n: int | None, plain: bool
) -> None:
    part = Run(then, of_states, steps=STEPS, load=True, seed=9, plain=plain)
    assert run(ranks, part, n) == pytest.approx(undisturbed[4:], rel=1e-4)


@pytest.mark.parametrize(
    ("then", "n"),
    [(SQUARE, 4), (CHAIN, 2), (Job("gpt2", "hand data=2 zero=1"), 2)],
    ids=["2x2", "1x2", "zero=1"],
)
@pytest.mark.parametrize("plain", [True, False], ids=["the plain model", "one process"])
def test_ranks_go_on_with_the_checkpoint_of(
    ranks: RankPool, tmp_path: Path, undisturbed: list[float], then: Job, n: int, plain: bool
) -> None:
    losses(Run(CHAIN, tmp_path, steps=4, save_at=4, plain=plain))
    part = Run(then, tmp_path, steps=STEPS, load=True, seed=9)
    assert run(ranks, part, n) == pytest.approx(undisturbed[4:], rel=1e-4)


@pytest.mark.parametrize("model", ["mlp with dropout", "tied", "resnet", "attention"])
def test_the_same_plan_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path, model: str) -> None:
    job = Job(model, "shards 2" if model == "attention" else "chain")
    n = 3 if model == "resnet" else 2
    whole = run(ranks, Run(job, tmp_path, steps=8, save_at=4), n)
    assert run(ranks, Run(job, tmp_path, steps=4, load=True, seed=9), n) == whole[4:]


def test_dropout_of_ranks_goes_on_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    job = Job("mlp with dropout", "chain")
    whole = run(ranks, Run(job, tmp_path, steps=8, save_at=4), 2)
    assert losses(Run(job, tmp_path, steps=4, load=True, seed=9)) == pytest.approx(whole[4:], rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "degrees"),
    [("lbfgs", {"data": 1, "tensor": 2}), ("adafactor", {}), ("lbfgs", {}), ("adamw", {})],
    ids=["lbfgs, parts of weights", "adafactor", "lbfgs", "adamw"],
)
def test_states_of_other_shapes_than_the_parameter_go_on(
    ranks: RankPool, tmp_path: Path, optimizer: str, degrees: dict[str, int]
) -> None:
    for found in ranks.run(states_go_on, 2, tmp_path, optimizer, degrees):
        assert len(found) == 3
        assert max(found.values()) < 1e-9, found


@pytest.mark.parametrize("point", ["after writing", "before writing", "before the manifest", "before the last name"])
def test_a_kill_during_saving_leaves_a_checkpoint_that_can_be_used(ranks: RankPool, tmp_path: Path, point: str) -> None:
    with pytest.raises(RankFailure, match="its process ended"):
        ranks.run(killed_while_saving, 2, tmp_path, point)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    left = tmp_path / "step-00000002.partial"
    assert left.is_dir()
    if point == "before the last name":  # everything is on disk
        found = autopar.load(tmp_path, model)
        assert found is not None
        assert found.path == left
        assert bool((model[0].weight == 2.0).all())
        return
    said = f"{left} (manifest.json, which is written last, is missing: saving did not end); loading {tmp_path}"
    with pytest.warns(autopar.AutoparWarning, match=re.escape(said) + "/step-00000001, which is complete"):
        found = autopar.load(tmp_path, model)
    assert found is not None
    assert found.step == 1
    assert not bool((model[0].weight == 2.0).any())
    autopar.save(tmp_path, model, step=2)  # over what was left
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = autopar.load(tmp_path, model)
    assert found is not None
    assert found.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_kill_during_saving_in_the_background_is_said_by_wait(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.outcomes(killed_while_saving_in_the_background, 2, tmp_path, within=60.0)
    assert found == ["returned", "ended"], found[0]


def test_mistakes_are_refused_in_the_same_words_on_all_ranks_and_shown_once(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(messages, 2, tmp_path)
    assert first == second
    wanted = [
        "InputError: ranks differ in the checkpoint that they save: .*rank0/step-0.* on rank 0, .*rank1/step-0.* on "
        "rank 1; give every rank the same directory and step",
        "InputError: ranks differ in the optimizer: none on rank 0, torch.optim.AdamW on rank 1; give every",
        "InputError: ranks differ in the optimizer: torch.optim.AdamW on rank 0, torch.optim.SGD on rank 1; give",
        r"CheckpointError: .*a file/step-00000001 cannot be saved: NotADirectoryError: .* \(rank 0\)",
        "InputError: ranks differ in the directory of the checkpoint: .*rank0 on rank 0, .*rank1 on rank 1; give ",
        "InputError: ranks differ in the step of the checkpoint: 1 on rank 0, 2 on rank 1; give every rank the same",
        "InputError: ranks differ in required: True on rank 0, False on rank 1; give every rank the same",
        "InputError: ranks differ in the optimizer: torch.optim.AdamW on rank 0, none on rank 1; give every",
        "InputError: ranks differ in the optimizer: torch.optim.AdamW on rank 0, torch.optim.SGD on rank 1; give",
        "InputError: ranks differ in the names in extra: none on rank 0, 'a' on rank 1; give every rank the same",
        "InputError: ranks differ in random_state: True on rank 0, False on rank 1; give every rank the same",
        "CheckpointError: there is no checkpoint in .*none; autopar.save",
        "CheckpointError: there is no checkpoint of step 7 in",
        r"InputError: .*step-00000001 is a checkpoint of another model: the shape differs of '0.weight' \(\(4, 4\), in "
        r"the model \(5, 4\)\)",
        "InputError: .*step-00000001 has no extra value 'b'; it has 'a'",
        r"InputError: extra has 'a', of type int, which has no load_state_dict\(\)",
        "InputError: the optimizer in .*step-00000001 is of class torch.optim.AdamW, this one is of class torch.op",
        r"InputError: parameter 0 of the optimizer's group 0, of shape \(3,\), is none of the model's",
    ]
    assert len(first) == len(wanted)
    for (kind, message, shown_once), pattern in zip(first, wanted, strict=True):
        assert re.match(pattern, f"{kind}: {message}"), message
        assert shown_once, message


def test_ranks_train_on_as_before_after_a_checkpoint_that_does_not_fit(ranks: RankPool, tmp_path: Path) -> None:
    wanted = [
        "InputError: ranks differ in the optimizer: torch.optim.SGD on rank 0, none on rank 1",
        "InputError: the optimizer in .*step-00000002 is of class torch.optim.SGD, this one is of class torch.op",
        r"InputError: parameter 0 of the optimizer's group 0, of shape \(3,\), is none of the model's",
    ]
    first, second = ranks.run(refused_on_ranks, 2, tmp_path)
    assert first == second
    for errors, losses_after, losses_without in first:
        assert losses_after == losses_without
        for (kind, message, shown_once), pattern in zip(errors, wanted, strict=True):
            assert re.match(pattern, f"{kind}: {message}"), message
            assert shown_once, message


def test_extra_values_of_each_rank_come_back(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(extras, 2, tmp_path, True) == [{"own": rank, "same": "x"} for rank in range(2)]
    assert ranks.run(extras, 3, tmp_path, False) == [{"own": 0, "same": "x"}] * 3
    with pytest.warns(autopar.AutoparWarning, match="differed between its 2 ranks, and 1 load it"):
        found = autopar.load(tmp_path, nn.Linear(2, 2))
    assert found is not None
    assert found.extra == {"own": 0, "same": "x"}


def test_an_asynchronous_save_writes_what_was_there_at_the_call(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(copied_first, 2, tmp_path) == [[1.0, 2.0]] * 2


def test_whole_tensors_are_exported_from_parts(of_square: Path, tmp_path: Path) -> None:
    model = MODELS[SQUARE.model][0]().double()
    autopar.load(of_square, model)
    assert export(of_square, tmp_path / "model.safetensors") == of_square / "step-00000004"
    found, wanted = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_each_rank_writes_its_share(ranks: RankPool, of_square: Path) -> None:
    files = json.loads((of_square / "step-00000004" / "manifest.json").read_text())["files"]
    sizes = [files[f"__{rank}_0.distcp"]["bytes"] for rank in range(4)]
    assert max(sizes) < 0.4 * sum(sizes)


def test_the_whole_state_has_objects_of_their_ranks_and_one_tensor_for_tied_names(ranks: RankPool) -> None:
    (names, objects, tied), _ = ranks.run(whole_state, 2)
    assert objects == {"a._extra_state": {"calls": 10}, "b._extra_state": {"calls": 11}}
    assert {"a.linear.weight", "b.linear.weight", "head.weight"} <= set(names)
    assert tied
