"""transformers' Trainer and Accelerate on the ranks of torchrun do what they do in one process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torchruns

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
load_file = pytest.importorskip("safetensors.torch").load_file
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "trained_by_trainer.py"
WITH_ACCELERATE = ROOT / "tests" / "support" / "saved_by_accelerate.py"
IMPORTS = ("transformers.trainer", "accelerate")


def run(*command: str, ranked: bool = True) -> subprocess.CompletedProcess[str]:
    return torchruns.run(*command, ranks=2 if ranked else None, imports=IMPORTS)


def trained(folder: Path, model: str, *options: str, ranked: bool) -> Any:
    """What was logged in each step, the loss of the evaluation, and the weights that were saved."""
    folder.mkdir(exist_ok=True)
    done = run(str(SCRIPT), model, str(folder), *options, ranked=ranked)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


def assert_same(found: Any, expected: Any) -> None:
    (logged, evaluated, weights), (of_one, evaluated_by_one, weights_of_one) = found, expected
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(of_one[-len(logged) :]), rtol=2e-4, atol=2e-4)
    assert evaluated == pytest.approx(evaluated_by_one, rel=2e-4)
    assert weights.keys() == weights_of_one.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, weights_of_one[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("model", "options"), [("bert", ()), ("gpt2", ("accumulate",))])
def test_losses_norms_and_weights_are_those_of_one_process(
    tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    """Also where samples have different numbers of targets, with accumulation and clipping, and after resuming."""
    expected = trained(tmp_path / "one", model, *options, ranked=False)
    ranks = tmp_path / "ranks"
    assert_same(trained(ranks, model, *options, ranked=True), expected)
    if not options:
        for ranked in (True, False):  # one process continues what ranks have saved, too
            resumed = trained(ranks, model, "resume", "ours", ranked=ranked)
            assert len(resumed[0]) >= 2
            assert_same((resumed[0][-2:], *resumed[1:]), expected)


@pytest.mark.parametrize("options", [("best", "again", "resume"), ("only", "best", "again", "resume")])
def test_weights_are_loaded_into_a_trained_model(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Of the best checkpoint, and of the one to resume: by autopar.load, or from files of the whole model alone."""
    expected = trained(tmp_path / "one", "gpt2", *options, ranked=False)
    assert_same(trained(tmp_path / "ranks", "gpt2", *options, ranked=True), expected)


def test_a_checkpoint_of_the_model_alone_is_resumed_with_a_new_optimizer(tmp_path: Path) -> None:
    expected = [trained(tmp_path / "one", "gpt2", "only", *resume, ranked=False) for resume in ((), ("resume",))]
    done = run(str(SCRIPT), "gpt2", str(tmp_path / "one"), "only", "resume")
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "one" / "found.pt"), expected[1])
    assert "optimizer and learning rates begin anew" in done.stderr


def test_ranks_resume_what_one_process_saved(tmp_path: Path) -> None:
    """With its weights and learning rates, but a new optimizer, and they say so."""
    of_one = trained(tmp_path, "gpt2", ranked=False)[0]
    done = run(str(SCRIPT), "gpt2", str(tmp_path), "resume")
    assert done.returncode == 0, done.stderr
    logged = torch.load(tmp_path / "found.pt")[0]
    assert logged[-2] == pytest.approx(of_one[-2], rel=2e-4)  # before the optimizer's first step
    assert [rate for _, _, rate in logged[-2:]] == [rate for _, _, rate in of_one[-2:]]
    assert re.search(r"optimizer\.pt was written in one process.*: the optimizer begins anew", done.stderr)


@pytest.mark.parametrize("name", ["with_trainer", "with_accelerate"])
def test_an_example_runs_under_torchrun(name: str) -> None:
    done = run(str(ROOT / "examples" / f"{name}.py"), "2")
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == {"with_trainer": 1, "with_accelerate": 2}[name]  # rank 0 alone prints
    assert all(0 < loss < 10 for loss in losses)


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", ["average_tokens_across_devices=False", "save_on_each_node=True"])
def test_arguments_of_copies_are_refused(tmp_path: Path, setting: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import autopar, torch, transformers\nfrom autopar.integrations import PipelinedTrainer\n"
        "pm = autopar.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), data='per-rank')\n"
        f"arguments = transformers.TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[], {setting})\n"
        "PipelinedTrainer(model=pm, args=arguments)\n"
    )
    done = run(str(script))
    assert done.returncode != 0
    assert f"{setting} does not work on ranks" in done.stderr


def test_a_module_with_the_whole_batch_on_every_rank_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import autopar, torch\nfrom accelerate import Accelerator\nfrom autopar.integrations import for_ranks\n"
        "pm = autopar.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))\n"
        "for_ranks(Accelerator(cpu=True)).prepare(pm)\n"
    )
    done = run(str(script))
    assert done.returncode != 0
    assert "make the module with autopar.parallelize(model, data='per-rank')" in done.stderr


def accelerated(folder: Path, what: str, *, ranked: bool) -> Any:
    """Weights, learning rates and the scale after three steps. What `save_model` wrote are the same weights."""
    folder.mkdir(exist_ok=True)
    done = run(str(WITH_ACCELERATE), str(folder), what, ranked=ranked)
    assert done.returncode == 0, done.stderr
    weights, rates, scale = torch.load(folder / "found.pt")
    saved = load_file(folder / "model" / "model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    return weights, rates, scale


def test_states_that_accelerate_saves_on_ranks_are_whole(tmp_path: Path) -> None:
    """They are loaded by ranks and by one process, with the optimizer's states and the learning rates."""
    expected, rates, _ = accelerated(tmp_path / "one", "save", ranked=False)
    ranks = tmp_path / "ranks"
    for what, ranked in (("save", True), ("load", True), ("load", False)):
        found = accelerated(ranks, what, ranked=ranked)
        torch.testing.assert_close(found[0], expected)
        if ranked:
            assert found[1] == rates


def test_a_gradient_scaler_of_accelerate_skips_on_all_ranks(tmp_path: Path) -> None:
    expected = accelerated(tmp_path / "one", "scaled", ranked=False)
    found = accelerated(tmp_path / "ranks", "scaled", ranked=True)
    torch.testing.assert_close(found[0], expected[0])
    assert found[1:] == expected[1:] == ([0.0025], 32.0)  # one of three steps was skipped


def test_two_optimizers_are_refused_with_what_saves_them(tmp_path: Path) -> None:
    done = run(str(WITH_ACCELERATE), str(tmp_path), "two")
    assert done.returncode != 0
    assert "got 1 models and 2 optimizers; save each with autopar.save(directory, model, optimizer)" in done.stderr
