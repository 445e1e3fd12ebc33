"""Ranks over gloo give the losses, gradients and steps of one process, whatever the plan."""

from __future__ import annotations

import pytest
import torch
from rank_behaviour import collectives
from rank_cases import MODELS, Difference, Job, trained
from rank_pool import RankPool


def title_of(value: int | Job) -> str:
    """Of a number of ranks, or of what they do."""
    if isinstance(value, int):
        return str(value)
    return f"{value.model}-{value.plan}-{value.schedule}-{value.call}-{value.steps}"


def assert_as_one_process(job: Job, found: list[Difference], tolerance: float = 1e-5) -> None:
    names = {name for name, _ in MODELS[job.model][0]().named_parameters()}
    held: set[str] = set()
    for rank, one in enumerate(found):
        assert one.losses == found[0].losses, f"rank {rank} has another loss than rank 0"
        assert one.loss_error <= tolerance
        assert one.output_error <= tolerance
        assert not {n: e for n, e in one.gradient_errors.items() if not e <= tolerance}
        assert not {n: e for n, e in one.parameter_errors.items() if not e <= 10 * tolerance}
        assert not {n: e for n, e in one.buffer_errors.items() if not e <= tolerance}
        held |= set(one.gradient_errors)
    assert held >= names


def test_two_ranks_train_an_mlp_as_one_process_does(ranks: RankPool) -> None:
    job = Job("mlp", "chain")
    found = ranks.run(trained, 2, job)
    assert_as_one_process(job, found)
    for one in found:  # each holds its own half alone, and its optimizer states
        assert one.held == 3 * (12 * 12 + 12) * 8
        assert one.optimizer_bytes == 2 * one.held


def test_functional_collectives_give_what_their_names_say(ranks: RankPool) -> None:
    """torch's private operators, over gloo."""
    for errors in ranks.run(collectives, 2):
        assert not any(error.any() for error in errors)


def test_modules_of_two_stages_train_as_in_one_process(ranks: RankPool) -> None:
    job = Job("shared", "hand pipeline=2", steps=3)
    assert_as_one_process(job, ranks.run(trained, 2, job))


def test_a_rank_without_a_stage_has_no_part_of_modules_that_run_as_a_whole(ranks: RankPool) -> None:
    job = Job("averaging", "replicas 1", n_microbatches=1, steps=3)
    found = ranks.run(trained, 2, job)
    assert_as_one_process(job, found)
    assert [one.held > 0 for one in found] == [True, False]


SLOW = [
    *[(2, Job("mlp", "chain", schedule)) for schedule in ("gpipe", "zb-h1")],
    *[(3, Job("gpt2", "chain", schedule)) for schedule in ("gpipe", "1f1b", "zb-h1")],
    (2, Job("mlp", "chunks 3")),
    (2, Job("mlp", "chunks 2", "interleaved-zb")),
    (2, Job("mlp", "chunks 2", "zb-v")),
    (3, Job("mlp", "chunks 2", "zb-v", n_microbatches=6, call="backward")),
    (3, Job("mlp", "chunks 2", n_microbatches=6)),
    (2, Job("mlp with dropout", "chain")),
    (3, Job("mlp with dropout", "chain", "zb-h1", call="backward")),
    (3, Job("skips", "chain")),
    (3, Job("skips", "chain", "zb-h1", call="backward")),
    (2, Job("cnn", "chain", call="backward")),
    (3, Job("cnn", "replicas 2,1")),
    (2, Job("mlp", "chain stage")),
    (2, Job("gpt2", "chain selective")),
    (2, Job("gpt2", "chain full")),
    (2, Job("mlp", "replicas 2")),
    (3, Job("gpt2", "replicas 1,2")),
    (4, Job("mlp", "replicas 2,2", "gpipe", call="backward")),
    (2, Job("gpt2", "hand tensor=2")),
    (2, Job("gpt2", "hand tensor=2", call="backward")),
    (2, Job("mlp", "hand data=2")),
    (4, Job("gpt2", "hand tensor=2 pipeline=2")),
    (4, Job("gpt2", "hand tensor=2 pipeline=2", "zb-h1")),
    (4, Job("shared", "hand tensor=2 pipeline=2", "zb-v")),
    (4, Job("gpt2", "hand pipeline=2 data=2 zero=2", "zb-h1", call="backward")),
    (4, Job("gpt2", "shards 2 2", "zb-h1")),
    (4, Job("gpt2", "hand tensor=2 data=2")),
    (4, Job("gpt2", "hand tensor=2 data=2 zero=3")),
    *[(2, Job("gpt2", f"hand data=2 zero={zero}")) for zero in (1, 2, 3)],
    *[(4, Job("gpt2", f"hand tensor=2 data=2 zero={zero}")) for zero in (1, 2)],
    *[(4, Job("gpt2", f"hand pipeline=2 data=2 zero={zero}", call="backward")) for zero in (1, 2)],
    (2, Job("gpt2", "hand data=2 zero=1", steps=20)),
    (4, Job("gpt2", "hand tensor=2 data=2 zero=2", steps=20)),
    (4, Job("tied", "hand pipeline=2 data=2 zero=1", steps=3)),
    (2, Job("attention", "shards 2")),
    (4, Job("attention", "shards 2x2")),
    (4, Job("frozen cnn", "shards 2*2")),
    (4, Job("gpt2", "shards 2 2")),
    (3, Job("gpt2", "shards 2 1")),
    (3, Job("gpt2", "shards 1 2", "zb-h1")),
    (2, Job("tied", "chain")),
    (2, Job("shared", "chain")),
    (2, Job("shared", "hand tensor=2")),
    (2, Job("shared", "hand data=2 zero=2")),
    (4, Job("shared", "hand pipeline=2 data=2 zero=1")),
    (3, Job("resnet", "chain")),
    (2, Job("mlp", "searched")),
    (3, Job("gpt2", "chain", steps=20)),
    (4, Job("gpt2", "hand tensor=2 pipeline=2", steps=20)),
]

FAMILIES = [  # each on a pipeline, on tensor shards, on replicas that store parts of states or parameters, on a mixture
    (3, Job("resnet50", "chain", "zb-h1", steps=20)),
    (2, Job("resnet50", "hand tensor=2", exact=True)),
    (2, Job("resnet50", "hand data=2 zero=1", exact=True)),
    (4, Job("resnet50", "hand tensor=2 data=2 zero=3")),
    (2, Job("llama", "chain", exact=True)),
    (2, Job("llama", "hand tensor=2")),
    (2, Job("llama", "hand data=2 zero=3", steps=20)),
    (3, Job("llama", "replicas 1,2", "gpipe")),
    (3, Job("mixtral", "chain", "zb-h1")),
    (2, Job("mixtral", "hand tensor=2", steps=20)),
    (2, Job("mixtral", "hand data=2 zero=2", exact=True)),
    (4, Job("mixtral", "hand tensor=2 pipeline=2")),  # stages that send what depends on experts in parts
    (2, Job("t5", "chain", steps=20)),
    (2, Job("t5", "hand tensor=2")),
    (2, Job("t5", "replicas 2", exact=True)),
    (4, Job("t5", "hand pipeline=2 data=2 zero=3")),
    (3, Job("bert", "chain", steps=20)),
    (2, Job("bert", "hand tensor=2")),  # half of a product may round otherwise than the whole, as BLAS cuts it
    (2, Job("bert", "hand data=2 zero=2", exact=True)),
    (2, Job("bert", "replicas 2", exact=True)),
    (4, Job("bert", "hand tensor=2 pipeline=2")),
]

BF16, FP16 = torch.bfloat16, torch.float16
AUTOCAST = [
    (2, Job("gpt2", "chain", autocast=BF16, exact=True)),
    (2, Job("mlp", "chain", "zb-h1", call="backward", autocast=FP16, exact=True)),
    (3, Job("gpt2", "chain full", call="backward", autocast=BF16, exact=True)),
    (2, Job("resnet50", "hand tensor=2", autocast=BF16, exact=True)),
    (2, Job("gpt2", "hand tensor=2", autocast=BF16, exact=True)),
    (2, Job("gpt2", "hand data=2 zero=2", autocast=BF16, exact=True)),
    (4, Job("llama", "hand tensor=2 pipeline=2", call="backward", autocast=BF16, exact=True)),
    (2, Job("recurrent", "chain", exact=True)),
    (2, Job("mlp", "searched", autocast=BF16)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "job"), SLOW, ids=title_of)
def test_ranks_train_as_one_process_does(ranks: RankPool, n: int, job: Job) -> None:
    assert_as_one_process(job, ranks.run(trained, n, job))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "job"), FAMILIES, ids=title_of)
def test_families_of_models_train_as_in_one_process(ranks: RankPool, n: int, job: Job) -> None:
    """Bit for bit where sums have two addends, one from each rank."""
    assert_as_one_process(job, ranks.run(trained, n, job), 0.0 if job.exact else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "job"), AUTOCAST, ids=title_of)
def test_ranks_under_autocast_train_as_the_same_plan_in_one_process(ranks: RankPool, n: int, job: Job) -> None:
    """Bit for bit; a plan that the search makes beside the plain model, within the rounding of bfloat16."""
    assert_as_one_process(job, ranks.run(trained, n, job), 0.0 if job.exact else 0.1)
