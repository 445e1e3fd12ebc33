"""Ranks with a GPU each, over NCCL, shown on pretended ones (support/pretend_nccl.py).

Whole training steps give what one process gives. No operator mixes devices, tensors of GPUs travel over NCCL and all
others over gloo, nothing is read or reused before a stream has got there, and no host waits for its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from rank_cases import Job
from rank_gpus import (
    OnGpus,
    faults_of,
    recorded_here,
    refusal,
    refused_mixture,
    refused_sharing,
    trained,
    trained_here,
    tuned_here,
)
from rank_pool import RankPool

from autopar.runtime.ranks.rank_device import BOTH
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, V_SHAPED


def check(found: list[OnGpus], *, waits: bool = False, gpus: int = 8) -> None:
    """`waits`: hosts may wait. `gpus`: how many there are."""
    for rank, one in enumerate(found):
        assert one.losses == found[0].losses
        assert one.error <= 1e-9
        assert waits or one.waits == []
        assert one.devices == {f"cuda:{rank % gpus}"}


@pytest.mark.slow
def test_a_pipeline_on_two_gpus_trains_as_one_process_does(ranks: RankPool) -> None:
    found = ranks.run(trained, 2, Job("mlp", "chain"))
    check(found)
    assert all({"isend", "irecv"} <= one.carried for one in found)


CASES = [
    *[(2, Job("mlp", "chain", schedule)) for schedule in ("gpipe", "zb-h1")],
    (2, Job("mlp", "chunks 3")),
    (3, Job("gpt2", "chain", "zb-h1", call="backward")),
    (3, Job("skips", "chain", call="backward")),
    (2, Job("mlp", "chain stage")),
    (3, Job("cnn", "replicas 2,1")),
    (3, Job("gpt2", "replicas 1,2")),
    (2, Job("gpt2", "hand tensor=2", call="backward")),
    (4, Job("gpt2", "hand tensor=2 pipeline=2")),
    (4, Job("gpt2", "hand tensor=2 data=2 zero=3")),
    *[(2, Job("gpt2", f"hand data=2 zero={zero}")) for zero in (1, 2, 3)],
    (4, Job("tied", "hand pipeline=2 data=2 zero=1", call="backward")),
    (2, Job("tied", "chain", call="backward")),
]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cpu", "cuda"])
@pytest.mark.parametrize(("n", "job"), CASES, ids=str)
def test_ranks_on_gpus_train_as_one_process_does(ranks: RankPool, n: int, job: Job, data: str) -> None:
    check(ranks.run(trained, n, job, data))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["chain", "replicas 2", "hand tensor=2", "hand data=2 zero=2"])
def test_ranks_that_share_a_gpu_send_through_the_host(ranks: RankPool, plan: str) -> None:
    """They ask for it: the process group has gloo alone. Nothing on the GPU travels as it is."""
    found = ranks.run(partial(trained, shared=True), 2, Job("gpt2", plan))
    check(found, waits=True, gpus=1)
    assert all(not one.carried for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [("messages", "has written it"), ("holding", "is freed before"), ("collectives", "has written it")],
)
def test_the_oracle_finds_a_seeded_fault(ranks: RankPool, fault: str, said: str) -> None:
    found = ranks.run(faults_of, 2, fault)
    assert any(said in one for faults in found for one in faults)


@pytest.mark.slow
def test_ranks_that_would_share_a_gpu_without_being_asked_are_refused_by_name(ranks: RankPool) -> None:
    first, second = ranks.run(refused_sharing, 2)
    assert first == second
    assert "ranks 0, 1 share cuda:0 (pretended GPU) of host" in first


@pytest.mark.slow
def test_ranks_of_which_some_have_no_gpu_are_refused_by_name(ranks: RankPool) -> None:
    first, second = ranks.run(refused_mixture, 2)
    assert first == second
    assert first.startswith("rank 0 has a GPU (cuda:0 (pretended GPU)), and rank 1 on host ")


# -- on GPUs that are there --------------------------------------------------------------------------------------------

SHARED, NCCL = ("gloo", "0"), (BOTH, None)
REAL = ["chain", "replicas 2", "hand tensor=2", *(f"hand data=2 zero={zero}" for zero in (1, 2, 3))]


@pytest.fixture(scope="module")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The parameter: the backend of ranks, and of the GPUs that they see."""
    backend, seen = request.param
    pool = RankPool(tmp_path_factory.mktemp("gpu ranks"), backend, gpus=seen)
    yield pool
    pool.close()


def gpus(n: int) -> pytest.MarkDecorator:
    there = torch.cuda.device_count()
    return pytest.mark.skipif(there < n, reason=f"needs {n} CUDA devices, and PyTorch sees {there}")


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [SHARED], indirect=True)
@pytest.mark.parametrize("data", ["cpu", "cuda"])
@pytest.mark.parametrize("plan", REAL)
def test_two_ranks_on_one_gpu_over_gloo(gpu_ranks: RankPool, plan: str, data: str) -> None:
    check(gpu_ranks.run(partial(trained_here, shared=True), 2, Job("gpt2", plan), data), waits=True, gpus=1)


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [(BOTH, "0")], indirect=True)
def test_two_ranks_on_one_gpu_over_nccl_are_refused(gpu_ranks: RankPool) -> None:
    first, second = gpu_ranks.run(refusal, 2)
    assert first == second
    assert "ranks 0, 1 share cuda:0" in first


# Where there are fewer GPUs than ranks, NCCL takes ranks for hosts (`apart`).


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [NCCL, ("nccl", None)], indirect=True)
@pytest.mark.parametrize("data", ["cpu", "cuda"])
@pytest.mark.parametrize("plan", REAL)
def test_two_ranks_over_nccl(gpu_ranks: RankPool, plan: str, data: str) -> None:
    """`nccl` alone is a script's own group."""
    check(gpu_ranks.run(trained_here, 2, Job("gpt2", plan), data), gpus=torch.cuda.device_count())


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [NCCL], indirect=True)
@pytest.mark.parametrize(("n", "job"), CASES, ids=str)
def test_ranks_over_nccl_train_as_one_process_does(gpu_ranks: RankPool, n: int, job: Job) -> None:
    check(gpu_ranks.run(trained_here, n, job), gpus=torch.cuda.device_count())


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [NCCL], indirect=True)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_deadlocks_over_nccl(gpu_ranks: RankPool, schedule: str) -> None:
    plan = ("chunks 2" if schedule in V_SHAPED else "chunks 3") if schedule in INTERLEAVED else "chain"
    for call in ("train_step", "backward"):
        job = Job("mlp", plan, schedule, n_microbatches=8, call=call)
        check(gpu_ranks.run(trained_here, 2, job), gpus=torch.cuda.device_count())


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [SHARED, NCCL], indirect=True)
@pytest.mark.parametrize(
    "job",
    [Job("mlp", "chain"), Job("mlp", "replicas 2"), Job("mlp", "chain", "zb-h1"), Job("mlp", "chunks 3")],
    ids=str,
)
def test_stages_recorded_as_cuda_graphs(gpu_ranks: RankPool, job: Job, request: pytest.FixtureRequest) -> None:
    shared = request.node.callspec.params["gpu_ranks"] == SHARED
    for found in gpu_ranks.run(partial(recorded_here, shared=shared), 2, job):
        assert max(found["errors"]) < 1e-9
        assert found["own"] == {"GraphedStage"}


@pytest.mark.gpu
@gpus(1)
@pytest.mark.parametrize("gpu_ranks", [SHARED, NCCL], indirect=True)
def test_plans_run_before_one_is_followed(gpu_ranks: RankPool, request: pytest.FixtureRequest) -> None:
    shared = request.node.callspec.params["gpu_ranks"] == SHARED
    found = gpu_ranks.run(partial(tuned_here, shared=shared), 2)
    assert len({one["decision"] for one in found}) == 1
    for one in found:
        assert {"automatic 1", "automatic 2"} <= set(one["ran"])
        assert one["changed"] == []
        assert one["step"] == pytest.approx(one["plain"], rel=1e-4)
        assert one["models"] == 1
