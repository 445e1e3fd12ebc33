"""Compiled stages on ranks compute what the stages of one process do."""

from __future__ import annotations

import re

import pytest
from rank_cases import Job
from rank_compiled import compiled, recorded, refused, searched
from rank_pool import RankPool

slow = pytest.mark.slow

TOLERANCE = 1e-9  # in float64


@slow
@pytest.mark.parametrize(
    ("n", "job", "backend"),
    [
        pytest.param(2, Job("mlp", "chain"), True, marks=pytest.mark.exhaustive),  # inductor takes most of a minute
        (2, Job("mlp with dropout", "chain"), "aot_eager"),
        (3, Job("skips", "chain", "zb-h1"), "aot_eager"),
        (3, Job("mlp", "replicas 2,1"), "aot_eager"),
        (2, Job("mlp", "chain stage"), "aot_eager"),
    ],
    ids=str,
)
def test_compiled_stages_of_ranks_give_the_same_numbers(ranks: RankPool, n: int, job: Job, backend: bool | str) -> None:
    for result in ranks.run(compiled, n, job, backend):
        assert max(result["errors"]) < TOLERANCE
        assert result["own"] == {"CompiledStage"}
        assert re.match(rf"compile={backend!r}: stages are compiled \(\d+\.\d s so far\)$", result["text"])


@slow
def test_the_stages_of_a_mesh_stay_as_they_are_and_say_why(ranks: RankPool) -> None:
    for result in ranks.run(compiled, 2, Job("gpt2", "hand tensor=2"), "aot_eager"):
        assert max(result["errors"]) < TOLERANCE
        assert "CompiledStage" not in result["own"]
        assert "its operators run on 2 devices, with collectives between them" in result["text"]


@slow
@pytest.mark.parametrize(
    ("n", "job"),
    [
        (2, Job("mlp", "chain")),
        (2, Job("mlp with dropout", "chain", "gpipe")),
        (3, Job("skips", "chain", "zb-h1")),
        (3, Job("mlp", "replicas 2,1")),
        (2, Job("mlp", "chunks 3")),
        (2, Job("tied", "chain")),
    ],
    ids=str,
)
def test_stages_of_ranks_recorded_as_cuda_graphs_give_the_same_numbers(ranks: RankPool, n: int, job: Job) -> None:
    for result in ranks.run(recorded, n, job):
        assert max(result["errors"]) < TOLERANCE
        assert result["own"] == {"GraphedStage"}
        assert result["replays"] > 0


@slow
def test_cuda_graphs_are_refused_on_ranks_without_gpus(ranks: RankPool) -> None:
    for message in ranks.run(refused, 2):
        assert message.startswith(
            "InputError: compile='graphs' records kernels of GPUs, and cpu:0, cpu:1 are none; give compile=True"
        )


@slow
def test_a_plan_that_ranks_search_is_priced_for_compiled_stages(ranks: RankPool) -> None:
    first, second = ranks.run(searched, 2)
    assert first["plan"] == second["plan"]
    for result in (first, second):
        assert max(result["errors"]) < 1e-5
        assert any(note.startswith("stages that are compiled are priced by whole steps") for note in result["notes"])
        assert result["text"].startswith("compile='aot_eager': stages are compiled")
