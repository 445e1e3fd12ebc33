"""How long planning takes for models and clusters that no test machine has.

Llamas are planned for from end to end: capture on the meta device, estimates from data sheets, search. The other cost
graphs are made up: transformer layers (norm, query, key and value side by side, attention, projection, two
matrix products, residual sums) whose times vary by a fifth, cut finely enough for the requested number of operators.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch.nn import functional

import autopar
from autopar import Plan
from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable
from autopar.costs.operator_cost import OperatorCost, Weight
from autopar.planner.search import make_plan
from autopar.planner.search_options import SearchOptions
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from cost_models import Device, Link

# (name, relative time, what it reads: operators of the same layer, or "in" for the layer's input, parameter bytes)
_LAYER = (
    ("norm", 0.02, ("in",), 1e4),
    ("query", 0.1, ("norm",), 4e6),
    ("key", 0.1, ("norm",), 4e6),
    ("value", 0.1, ("norm",), 4e6),
    ("attention", 0.1, ("query", "key", "value"), 0.0),
    ("projection", 0.1, ("attention",), 4e6),
    ("sum", 0.01, ("in", "projection"), 0.0),
    ("norm2", 0.02, ("sum",), 1e4),
    ("up", 0.2, ("norm2",), 16e6),
    ("gelu", 0.05, ("up",), 0.0),
    ("down", 0.2, ("gelu",), 16e6),
    ("out", 0.01, ("sum", "down"), 0.0),
)


@dataclass(frozen=True)
class Case:
    """A graph and a cluster."""

    layers: int
    devices: tuple[int, ...]  # of each kind; the second takes half as long
    batch: int


CASES = {
    "10000_nodes_64_devices_of_two_kinds": Case(834, (32, 32), 256),
    "100_layers_1024_devices": Case(100, (1024,), 2048),
}


@dataclass(frozen=True)
class Llama:
    """A Llama of Llama 3's proportions (Grattafiori et al., The Llama 3 Herd of Models, 2024, table 3), in bfloat16."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_value_heads: int
    vocabulary: int
    nodes: int  # of 8xH100
    batch: int  # sequences of 4096 tokens


AHEAD = {"llama_3_70b_128_h100": Llama(80, 8192, 28672, 64, 8, 128256, 16, 512)}
QUICK_AHEAD = {"llama_of_4_layers_8_h100": Llama(4, 64, 128, 4, 2, 100, 1, 32)}
QUICK = {"60_nodes_4_devices_of_two_kinds": Case(5, (2, 2), 16)}


def run_planning(quick: bool, kept: Kept) -> Report:
    """Every case in a process of its own, so that its peak memory is its own."""
    rows, data = [], {}
    for name in [*QUICK, *QUICK_AHEAD] if quick else [*CASES, *AHEAD]:
        seconds, peak, text = kept.case(name, make=partial(_measured, name))
        data[name] = {"seconds": seconds, "peak_gb": peak}
        rows.append((name.replace("_", " "), f"{seconds:.1f}", f"{peak:.2f}", text))
    columns = ("case", "seconds", "peak GB", "plan")
    note = "Llamas from the model's code to the plan; the made-up ones from a cost graph, the measuring left out."
    return Report("Planning time", (Table("Planning time", columns, tuple(rows), note),), data, by_case=True)


def _measured(name: str) -> tuple[float, float, str]:
    """Seconds, peak gigabytes of the process, and the plan in a few words."""
    code = f"from benchmarks.planning import plan_case; plan_case({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, peak, text = done.stdout.strip().splitlines()[-1].split("|", 2)
    return float(seconds), float(peak), text


def plan_case(name: str) -> None:
    """Plan a case and print its figures."""
    made_up = {**CASES, **QUICK}.get(name)
    costs = None if made_up is None else synthetic_costs(made_up)
    start = time.perf_counter()
    plan = (
        _plan_ahead({**AHEAD, **QUICK_AHEAD}[name])
        if costs is None
        else make_plan(costs, SearchOptions(loss_inside=True))
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    groups: dict[int, int] = {}
    for stage in plan.stages:
        groups[len(stage.devices)] = groups.get(len(stage.devices), 0) + 1
    shape = " + ".join(f"{n} x {size}" for size, n in sorted(groups.items()))
    words = f"{len(plan.stages)} stages ({shape} devices), {plan.n_microbatches} micro-batches, {plan.schedule}"
    print(f"{seconds}|{peak}|{words}; {plan.optimality}")


def _plan_ahead(case: Llama) -> Plan:
    """A training step, the loss inside the pipeline."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=case.layers,
        hidden_size=case.hidden,
        intermediate_size=case.inner,
        num_attention_heads=case.heads,
        num_key_value_heads=case.key_value_heads,
        vocab_size=case.vocabulary,
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16().train()
        tokens = torch.empty(case.batch, 4096, dtype=torch.long)

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    cluster = autopar.Cluster.preset("8xH100", nodes=case.nodes)
    inputs = {"input_ids": tokens, "use_cache": False}
    return autopar.plan(model, cluster, example_kwargs=inputs, target=tokens, loss_fn=loss)


def synthetic_costs(case: Case, seed: int = 0) -> CostGraph:
    """The cost graph of a made-up transformer on made-up devices."""
    graph, seconds = _graph(case, np.random.default_rng(seed))
    devices = tuple(
        Device(f"{'ab'[kind]}:{i}", torch.device("cuda", i), f"kind {'ab'[kind]}", int(40e9), 1)
        for kind, count in enumerate(case.devices)
        for i in range(count)
    )
    link = Link(5e-6, 50e9)
    links = {(a.name, b.name): link for a in devices for b in devices}
    names = tuple(graph)
    tables = []
    for kind in range(len(case.devices)):
        rows = tuple(sorted({1, case.batch}))
        forward = np.array([[seconds[n] * (r + 0.2) / (1 + kind) for n in names] for r in rows])
        tables.append(CostTable(f"kind {'ab'[kind]}", 1, names, rows, forward, 2 * forward, np.zeros((len(rows), 2))))
    return CostGraph(graph, case.batch, True, tuple(tables), devices, links, accumulate=1e-12)


def _graph(case: Case, random: np.random.Generator) -> tuple[nx.DiGraph, dict[str, float]]:
    """The operators with their bytes, and the seconds of each for a sample."""
    graph = nx.DiGraph()
    seconds = {}
    before: str | None = None
    storage = 0
    for layer in range(case.layers):
        here: dict[str, str] = {"in": before} if before else {}
        for name, share, reads, parameter in _LAYER:
            node = f"layer{layer}_{name}"
            here[name] = node
            seconds[node] = 1e-3 * share * float(random.uniform(0.8, 1.2))
            storage += 1
            nbytes = 4e5 * case.batch * (4 if name in ("up", "gelu") else 1)
            cost = OperatorCost(
                key=f"layers.{layer}/{name}#0",
                operator=name,
                module=f"layers.{layer}",
                source="",
                position=len(graph),
                replicable=False,
                output_bytes=nbytes,
                gradient_bytes=nbytes,
                allocated_bytes=nbytes,
                saved={storage: nbytes},
                parameters={node: Weight(int(parameter), True, (int(parameter) // 4,))} if parameter else {},
                weight_share=0.5 if parameter else 0.0,
                repeatable=True,
            )
            graph.add_node(node, cost=cost)
            for source in reads:
                if source in here:
                    graph.add_edge(here[source], node, nbytes=nbytes)
        before = here["out"]
    graph.graph["fused"] = []
    graph.graph["outputs"] = [before]
    return graph, seconds
