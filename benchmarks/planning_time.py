"""Seconds and memory of choosing for whole Llamas, from the model's code: sharding strategies over a mesh, and all of a
plan for a cluster."""

from __future__ import annotations

import itertools
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.analysis.operators import on_device
from autopar.capture.program import capture
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import choose
from autopar.sharding.mesh import make_mesh
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from cost_models import Cluster

META = torch.device("meta")


@dataclass(frozen=True)
class Case:
    """A Llama of the proportions of the 7B model (Touvron et al., LLaMA, 2023, table 2), in bfloat16."""

    layers: int
    mesh: tuple[int, ...]
    width: int = 4096
    samples: int = 64
    tokens: int = 2048  # of a sample
    nodes: int = 0  # of 8 H100; a whole plan: stages, meshes, replicas, recomputation, micro-batches and strategies

    @property
    def sizes(self) -> dict[str, Any]:
        """Llama 3 70B and 405B (Grattafiori et al., 2024, table 3) are of other proportions."""
        intermediate = {8192: 28672, 16384: 53248}.get(self.width)
        if intermediate is None:
            return {"intermediate_size": 43 * self.width // 16}
        return {"intermediate_size": intermediate, "num_key_value_heads": 8, "vocab_size": 128256}


CASES = {"llama_6.7b_32_layers_mesh_8x8": Case(32, (8, 8)), "llama_2_layers_mesh_4x4x4": Case(2, (4, 4, 4))}
CASES["llama_70b_64_h100_joint"] = Case(80, (), 8192, 128, nodes=8)
CASES["llama_405b_16384_h100_joint"] = Case(126, (), 16384, 2048, 8192, nodes=2048)
QUICK = {"llama_2_layers_mesh_2x2": Case(2, (2, 2), 64, 8)}


class Llama(nn.Module):
    """With its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=case.layers,
            hidden_size=case.width,
            num_attention_heads=max(1, case.width // 128),
            max_position_embeddings=case.tokens,
            **case.sizes,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def run_planning_time(quick: bool, kept: Kept) -> Report:
    """Every case in a process of its own, so that its peak memory is its own."""
    data, rows = {}, []
    for name in QUICK if quick else CASES:
        seconds, peak, text = kept.case(name, make=partial(_measured, name))
        data[name] = {"seconds": float(seconds), "peak_gb": float(peak)}
        rows.append((name.replace("_", " "), f"{float(seconds):.1f}", f"{float(peak):.2f}", text))
    note = (
        "From the model's code, with transformers imported: capture, costs, all strategies, the exact choice; for a "
        "cluster all of the plan."
    )
    table = Table("Planning", ("case", "seconds", "peak GB", "choice"), tuple(rows), note)
    return Report("Choosing sharding strategies", (table,), data, by_case=True)


def _measured(name: str) -> list[str]:
    """Seconds, peak gigabytes of the process, and the choice in a few words."""
    code = f"from benchmarks.planning_time import choose_case; choose_case({name!r})"
    # An installed package has its bytecode. Compiling it in every process does not belong to planning.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip().splitlines()[-1].split("|", 2)


def choose_case(name: str) -> None:
    """Choose for a case and print its figures."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - takes a second, which is no planning

    case = {**CASES, **QUICK}[name]
    start = time.perf_counter()
    with META:
        model = Llama(case).bfloat16().train()
        tokens = torch.empty(case.samples, case.tokens, dtype=torch.long)
    text = _plan_all(model, tokens, case) if case.nodes else _choose(model, tokens, case)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(f"{seconds}|{peak}|{text}")


def _choose(model: nn.Module, tokens: torch.Tensor, case: Case) -> str:
    program = capture(model, (tokens,), {}, trace_equal_layers_once=True)
    module = on_device(program.graph_module, program.device, META)
    n = math.prod(case.mesh)
    cluster = Cluster.preset("8xH100", nodes=-(-n // 8))
    mesh = make_mesh(case.mesh, [device.name for device in cluster.devices[:n]])
    found = choose(ShardingTask(module, [tokens], case.samples, cluster), mesh)
    proven = "proven optimal" if found.proven else f"within {found.seconds / found.bound - 1:.1%} of a bound"
    return f"{len(found.strategies)} operators, a step of {found.seconds * 1e3:.1f} ms; {proven}, width {found.width}"


def _plan_all(model: nn.Module, tokens: torch.Tensor, case: Case) -> str:
    cluster = Cluster.preset("8xH100", nodes=case.nodes)
    plan = autopar.plan(model, cluster, example_args=(tokens,), target=tokens, loss_fn=lambda loss, _: loss)
    each = [f"{stage.replicas} x mesh {stage.sharding.mesh if stage.sharding else 1}" for stage in plan.stages]
    runs = [(stage, len(list(equal))) for stage, equal in itertools.groupby(each)]
    stages = " | ".join(f"{n} stages of {stage}" if n > 1 else stage for stage, n in runs)
    recomputed = sum(stage.recompute for stage in plan.stages)
    text = f"{stages}, {plan.n_microbatches} micro-batches, {plan.schedule}, {recomputed} stages recompute"
    assert plan.predicted_step_time is not None
    assert plan.bound, "a plan for a cluster has a bound"
    gap = plan.predicted_step_time / plan.bound - 1
    searched = plan.optimality.partition(" under ")[0]  # within x % of the least objective
    return (
        f"{text}; a step of {plan.predicted_step_time:.3f} s, {searched} over the meshes looked at, "
        f"within {gap:.0%} of the work divided over all devices"
    )
