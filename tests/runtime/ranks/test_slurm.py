"""Slurm's variables as those of torchrun."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torchruns

from autopar import InputError
from autopar.runtime.ranks import world
from autopar.runtime.ranks.slurm import FIRST_PORT, PORTS, first_node, rank_variables

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "11",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


def test_a_task_of_srun_is_a_rank() -> None:
    found = rank_variables(TASK)
    port = int(found.pop("MASTER_PORT"))
    assert FIRST_PORT <= port < FIRST_PORT + PORTS
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
    }
    ports = {
        rank_variables(TASK | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": s})["MASTER_PORT"] for job in "12" for s in "01"
    }
    assert len(ports) == 4
    assert rank_variables(TASK | {"SLURM_NODEID": "2"})["LOCAL_WORLD_SIZE"] == "3"
    assert (
        rank_variables(TASK | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
        .keys()
        .isdisjoint({"MASTER_ADDR", "MASTER_PORT"})
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TASK | {"RANK": "0"},  # torchrun in every task
        TASK | {"SLURM_STEP_NUM_TASKS": "1"},
        {name: text for name, text in TASK.items() if name != "SLURM_STEP_ID"},  # sbatch without srun
    ],
)
def test_other_processes_are_no_ranks_of_slurm(environment: dict[str, str]) -> None:
    assert rank_variables(environment) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[001-004,7],login", "n001"),
        ("rack[2,4]-n[08-09],x", "rack2-n08"),
        ("10.77.0.1", "10.77.0.1"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_PROCID": "11"}, "SLURM_PROCID is 11, but the step has 11 tasks"),
        ({"SLURM_PROCID": "one"}, "SLURM_PROCID must be a whole number >= 0, got 'one'"),
        ({"SLURM_STEP_NODELIST": ""}, "neither SLURM_STEP_NODELIST nor MASTER_ADDR is set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4x2"}, "tasks per node are written like"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but tasks per node are '4(x2),3', of 3 nodes"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        rank_variables(TASK | changes)


SCRIPT = """
import sys, autopar, torch
from autopar import Plan
from torch import nn

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
pm = autopar.parallelize(model, plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=2))
loss = pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
print(f"{len(list(pm.parameters()))} tensors here, loss {loss.item():.6f}")
"""


@pytest.mark.slow
def test_a_script_runs_as_tasks_of_srun(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    variables = TASK | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    variables |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [
        torchruns.Started(
            str(path), ranks=None, env=variables | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        )
        for rank in range(2)
    ]
    done = [task.ended(120) for task in tasks]
    assert [task.returncode for task in done] == [0, 0], done
    texts = [task.stdout.splitlines()[-1] for task in done]
    assert texts[0] == texts[1]
    assert texts[0].startswith("2 tensors here, loss ")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number >= 0, got 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK must be a whole number >= 0, got '-1'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2, so that ranks are 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
    ],
)
def test_variables_of_a_broken_launch_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "shown_once", lambda rank: None)  # this process is no rank
    with pytest.raises(InputError, match=re.escape(message)):
        world.joined()
