"""Tasks that srun starts are ranks: Slurm's variables as those that torchrun sets.

    SLURM_PROCID              RANK
    SLURM_STEP_NUM_TASKS      WORLD_SIZE           (or SLURM_NTASKS)
    SLURM_LOCALID             LOCAL_RANK
    SLURM_STEP_TASKS_PER_NODE LOCAL_WORLD_SIZE     "4(x2),3": the count at SLURM_NODEID (or SLURM_TASKS_PER_NODE)
    SLURM_STEP_NODELIST       MASTER_ADDR          "node[07-09,12]": the first node (or SLURM_JOB_NODELIST)
    SLURM_JOB_ID, SLURM_STEP_ID  MASTER_PORT       the same for all tasks of a step, different for steps at once

Only tasks of srun have SLURM_STEP_ID: a script that sbatch runs without srun is one process, whatever --ntasks says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import InputError

FIRST_PORT, PORTS = 20_000, 10_000  # below the ports that systems hand out themselves (Linux: from 32768)


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set for torch.distributed; nothing outside of srun, in a step of one task, or where RANK or WORLD_SIZE
    is set, as torchrun does in each task. MASTER_ADDR and MASTER_PORT stay where they are set.

    Raises InputError for variables that contradict each other, or that Slurm never sets so.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return {}
    size = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size < 2:
        return {}
    rank = _number(environment, "SLURM_PROCID")
    if rank >= size:
        raise InputError(f"SLURM_PROCID is {rank}, but the step has {size} tasks; start the script with srun")
    found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if "SLURM_LOCALID" in environment:
        found["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if per_node and "SLURM_NODEID" in environment:
        found["LOCAL_WORLD_SIZE"] = str(_tasks_on(per_node, _number(environment, "SLURM_NODEID")))
    if "MASTER_ADDR" not in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise InputError(
                f"srun started {size} tasks, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set; export "
                "MASTER_ADDR as the name of the first node"
            )
        found["MASTER_ADDR"] = first_node(nodes)
    if "MASTER_PORT" not in environment:
        job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
        found["MASTER_PORT"] = str(FIRST_PORT + (101 * job + step) % PORTS)
    return found


def first_node(nodes: str) -> str:
    """The first host of a list in Slurm's form, such as "gpu[07-09,12]-ib,login": "gpu07-ib"."""
    depth, end = 0, len(nodes)
    for place, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes[:end])


def _tasks_on(text: str, node: int) -> int:
    """The number of a node in a list such as "4(x2),3": 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise InputError(f"Slurm's tasks per node are written like 4(x2),3, got {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise InputError(f"SLURM_NODEID is {node}, but tasks per node are {text!r}, of {len(counts)} nodes")
    return counts[node]


def _number(environment: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is set."""
    name = next((name for name in names if name in environment), None)
    if name is None:
        raise InputError(f"{' and '.join(names)} are not set, although SLURM_PROCID is; start the script with srun")
    if not environment[name].isdigit():
        raise InputError(f"{name} must be a whole number >= 0, got {environment[name]!r}")
    return int(environment[name])
