"""The schedule of a plan as a CSV: torch.distributed.pipelining reads, validates and simulates it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exit_plans import degrees, plan_with
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopar import Plan, PlanError
from autopar.plan.degrees import Degrees
from autopar.plan.stage import Stage, StageTransfer
from autopar.schedule.builders import make_schedule, ranks_of_stages

PLAIN = Degrees(1, 2, 1, 1, "1f1b", 1, 0, "none", False, 8)


class TorchStage(SimpleNamespace):
    """What torch's schedules ask of a stage before anything runs."""

    def __init__(self, index: int, ranks: int, n_stages: int) -> None:
        super().__init__(group=None, stage_index=index, group_rank=0, group_size=ranks, num_stages=n_stages)
        self.submod = None


def torch_runtime(m: int, ranks: int, n_stages: int, schedule: str = "1f1b") -> Any:
    """Of the first rank."""
    order = ranks_of_stages(schedule, ranks, n_stages // ranks)
    stages = [TorchStage(s, ranks, n_stages) for s, rank in enumerate(order) if rank == 0]
    return torch_schedules._PipelineScheduleRuntime(stages, m, loss_fn=lambda *_: None)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "m"),
    [
        *[(name, p, 1, m) for name in ("gpipe", "1f1b", "zb-h1") for p, m in ((1, 3), (2, 1), (3, 7), (4, 8))],
        *[("interleaved-1f1b", p, v, m) for p, v, m in ((2, 2, 4), (2, 3, 6), (4, 2, 8), (3, 2, 4))],
        *[("zb-v", p, 2, m) for p, m in ((2, 4), (3, 5), (4, 2))],
    ],
)
def test_torch_reads_validates_and_simulates_the_schedule(
    schedule: str, ranks: int, chunks: int, m: int, tmp_path: Path
) -> None:
    plan = plan_with(Degrees(1, ranks, 1, 1, schedule, chunks, 0, "none", False, m), ranks * chunks)
    path = tmp_path / "schedule.csv"
    plan.schedule_csv().save(path)
    runtime = torch_runtime(m, ranks, ranks * chunks, schedule)
    rank_of = ranks_of_stages(schedule, ranks, chunks)
    runtime._load_csv(str(path))  # raises where an action is missing or comes too early
    computing = {
        rank: [a for a in actions if a.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")]
        for rank, actions in runtime.pipeline_order_with_comms.items()  # with sends and receives, which torch added
    }
    torch_schedules._simulate_comms_compute(computing, rank_of.__getitem__, ranks * chunks)  # raises at a deadlock
    assert runtime.stage_index_to_group_rank == dict(enumerate(rank_of))
    runtime._dump_csv(str(tmp_path / "again.csv"), format="compute_only")
    assert (tmp_path / "again.csv").read_text().split() == path.read_text().split()


def test_torch_refuses_a_schedule_with_a_missing_backward(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(plan_with(PLAIN, 2).schedule_csv().text.replace(",1B7", ""))
    with pytest.raises(AssertionError):
        torch_runtime(8, 2, 2)._load_csv(str(path))


@given(degrees().filter(lambda d: d.pipeline > 1), st.integers(1, 3))
def test_each_copy_of_a_pipeline_has_the_rows_of_the_csv(wanted: Degrees, copies: int) -> None:
    """Micro-batch i of a plan with r replicas is micro-batch i div r of copy i mod r."""
    m = wanted.n_microbatches * copies
    table = make_schedule(wanted.schedule, m, [copies] * wanted.pipeline, chunks=wanted.chunks)
    names = [tuple(f"cuda:{p}.{i}" for i in range(copies)) for p in range(wanted.pipeline)]
    stages = tuple(Stage(names[rank], (f"layers.{s}/linear#0",)) for s, rank in enumerate(wanted.rank_of))
    text = Plan(stages, m, wanted.schedule).schedule_csv().text
    for copy in range(copies):
        rows = [
            [f"{a.stage}{a.phase.value}{a.microbatch // copies}" for a in table.actions[rank * copies + copy]]
            for rank in range(wanted.pipeline)
        ]
        assert [row.split(",") for row in text.split()] == rows


def test_skips_and_replicas_are_named_beside_the_csv() -> None:
    stages = tuple(Stage((f"a{s}", f"b{s}"), (f"layers.{s}/linear#0",)) for s in range(3))
    skip = StageTransfer(0, 2, 1, 1, 0.0)
    lost = {one.name: one.why for one in Plan(stages, 4, transfers=(skip,)).schedule_csv().not_expressed}
    assert "0 -> 2" in lost["transfers"]
    assert "2 of every stage" in lost["replicas"]
    with pytest.raises(PlanError, match="stage 0 has 2, stage 1 has 1 replicas"):
        Plan((Stage(("a", "b"), ("x/linear#0",)), Stage(("c",), ("y/linear#0",))), 4).schedule_csv()
