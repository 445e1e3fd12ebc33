"""Models that are built without values: ranks get what they hold, and need no room for more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rank_cases import MODELS, Job
from rank_initial_values import WHOLE, first_losses, large, refused, sending_fails, small_weights, under_a_limit
from rank_pool import RankPool
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.runtime.checkpoints.export import export

pytestmark = pytest.mark.slow

JOBS = [
    (Job("gpt2", "chain"), 2),
    (Job("tied", "chain"), 2),
    (Job("gpt2", "hand tensor=2 pipeline=2 micro_batch=2"), 4),
    (Job("gpt2", "replicas 2"), 2),
    (Job("gpt2", "hand data=2 zero=1"), 2),
    (Job("resnet", "chain"), 3),
]


@pytest.mark.parametrize(("job", "n"), JOBS, ids=[f"{job.model} {job.plan}" for job, _ in JOBS])
def test_every_source_gives_the_values_that_the_model_was_built_with(
    ranks: RankPool, tmp_path: Path, job: Job, n: int
) -> None:
    torch.manual_seed(3)
    model = MODELS[job.model][0]().double()
    autopar.save(tmp_path / "saved", model, step=0)
    export(tmp_path / "saved", tmp_path / "model.safetensors")
    (tmp_path / "files").mkdir()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())  # tied ones under their first names
    names = [name for name in model.state_dict() if name in tensors]
    for number, part in enumerate((names[::2], names[1::2])):
        whole = {name: tensors[name].detach().contiguous() for name in part}
        save_file(whole, tmp_path / "files" / f"{number}.safetensors")
    wanted = ranks.run(first_losses, n, job, "here", None)
    assert ranks.run(first_losses, n, job, "rank 0", None) == wanted
    for weights in ("saved", "model.safetensors", "files"):
        assert ranks.run(first_losses, n, job, "meta", tmp_path / weights) == wanted, weights


@pytest.mark.parametrize(("job", "n"), JOBS[:3], ids=[f"{job.model} {job.plan}" for job, _ in JOBS[:3]])
def test_a_function_gives_the_same_values_under_every_plan(ranks: RankPool, job: Job, n: int) -> None:
    alone = first_losses(Job(job.model, "chain"), "meta", None, named=True)
    for found in ranks.run(first_losses, n, job, "meta", None, True):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_while_rank_0_sends_leaves_none_waiting(ranks: RankPool, rank: int) -> None:
    for message, sent in ranks.run(sending_fails, 3, rank):
        assert message == f"CheckpointError: no values: MemoryError: no memory left (rank {rank})"
        assert sent == [2.0] * 6


def test_a_model_of_twice_the_memory_of_a_rank_starts(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = large()
    for name, p in model.named_parameters():
        small_weights(name, p.data)
    wanted = model(torch.ones(4, model[0].in_features)).sum(1).tolist()
    autopar.save(tmp_path / "saved", model, step=0)
    del model
    for found in ranks.run(under_a_limit, 2, "here", None):
        assert "alloc" in found["failed"]  # so that the limit is one
    for weights in (tmp_path / "saved", None):
        for found in ranks.run(under_a_limit, 2, "meta", weights):
            assert "failed" not in found, found
            assert 0.45 * WHOLE < found["peak"] < 0.8 * WHOLE
            if weights is not None:
                assert found["output"] == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_what_cannot_start_is_refused_in_the_same_words(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(refused, 2, tmp_path)
    assert first == second
    wanted = [
        r"InputError: '0.weight' has no values \(it is on the meta device, as 3 more are\): load",
        "InputError: '0.weight' has no values on rank 0, so nothing can be measured there: give plan=",
        "InputError: '.*part' lacks '1.weight', '1.bias'; give init_fn=",
        r"InputError: '.*other' is of another model: the shape differs of '0.weight' \(\(5, 4\), in the model "
        r"\(4, 4\)\)",
        "InputError: weights='.*nothing': there is no directory .*nothing; give a directory of autopar.save",
        "InputError: weights= and init_fn= are for models on the meta device, and this one has values",
        r"InputError: '0.weight' has no values \(it is on the meta device, as 3",
        "InputError: the model was built without values, which it gets at its first call; call it before saving",
    ]
    assert len(first) == len(wanted)
    for message, pattern in zip(first, wanted, strict=True):
        assert re.match(pattern, message), message


def test_one_process_takes_the_same_sources(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    autopar.save(tmp_path / "saved", model, step=0)
    export(tmp_path / "saved", tmp_path / "model.safetensors")
    x = torch.randn(4, 4)
    wanted = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    for weights in ("saved", "model.safetensors"):
        with torch.device("meta"):
            empty = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        autopar.plan(empty, autopar.Cluster.preset("2xH100"), example_args=(x,), cache=False)
        before = torch.optim.SGD(empty.parameters(), lr=0.1)  # of parameters that cannot learn
        options = {"n_microbatches": 1, "cache": False, "tune": 0}  # the batch norm sees the whole batch
        pm = autopar.parallelize(empty, ["cpu"], weights=tmp_path / weights, **options)
        found = trained(pm, before, x)
        assert all(torch.allclose(found[name], wanted[name]) for name in wanted)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state after two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_an_init_fn_with_other_arguments_is_refused_with_those_it_must_take() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(autopar.InputError, match=r"init_fn must take \(name, tensor\) .*, got \(module\): too"):
        autopar.parallelize(model, ["cpu"], init_fn=lambda module: None)  # type: ignore[misc, arg-type]
