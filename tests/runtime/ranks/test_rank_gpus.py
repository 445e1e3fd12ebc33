"""Ranks with a GPU each, over NCCL, shown on pretended ones (support/pretend_nccl.py).

Whole training steps give what one process gives. No operator mixes devices, tensors of GPUs travel over NCCL and all
others over gloo, nothing is read or reused before a stream has got there, and no host waits for its GPU.
"""

from __future__ import annotations

import pytest
from rank_cases import Job
from rank_gpus import OnGpus, trained
from rank_pool import RankPool


def check(found: list[OnGpus], *, shared: bool = False) -> None:
    for rank, one in enumerate(found):
        assert one.losses == found[0].losses
        assert one.error <= 1e-9
        assert one.waits == []
        assert one.devices == {f"cuda:{0 if shared else rank}"}


def test_a_pipeline_on_two_gpus_trains_as_one_process_does(ranks: RankPool) -> None:
    found = ranks.run(trained, 2, Job("mlp", "chain", steps=3))
    check(found)
    assert all({"isend", "irecv"} <= one.carried for one in found)


CASES = [
    *[(2, Job("mlp", "chain", schedule, steps=3)) for schedule in ("gpipe", "zb-h1")],
    (2, Job("mlp", "chunks 3", steps=3)),
    (3, Job("gpt2", "chain", "zb-h1", call="backward", steps=3)),
    (3, Job("skips", "chain", call="backward")),
    (2, Job("mlp", "chain stage")),
    (3, Job("cnn", "replicas 2,1", steps=3)),
    (3, Job("gpt2", "replicas 1,2")),
    (2, Job("gpt2", "hand tensor=2", call="backward")),
    (4, Job("gpt2", "hand tensor=2 pipeline=2", steps=3)),
    (4, Job("gpt2", "hand tensor=2 data=2 zero=3")),
    *[(2, Job("gpt2", f"hand data=2 zero={zero}", steps=3)) for zero in (1, 2, 3)],
    (4, Job("tied", "hand pipeline=2 data=2 zero=1", steps=3)),
    (2, Job("tied", "chain")),
]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cpu", "cuda"])
@pytest.mark.parametrize(("n", "job"), CASES, ids=str)
def test_ranks_on_gpus_train_as_one_process_does(ranks: RankPool, n: int, job: Job, data: str) -> None:
    check(ranks.run(trained, n, job, data))
