"""All benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import (
    accuracy,
    automatic,
    distributed,
    estimates,
    gpu,
    inference,
    memory,
    models,
    network,
    overhead,
    partition_instances,
    peers,
    planning,
    planning_time,
    published,
    scale,
    training,
    zoo,
)
from benchmarks.kept import Kept
from benchmarks.output import Report


@dataclass(frozen=True)
class Run:
    """How a benchmark is run."""

    quick: bool = False  # tiny models and few steps
    kept: Kept = field(default_factory=Kept)  # results as they come
    folder: Path | None = None  # of --instances or --tables
    device: str | None = None  # of gpu
    models: tuple[str, ...] = ()  # of gpu
    parts: tuple[str, ...] = ()  # of gpu


# By name: what it shows, and how it runs.
BENCHMARKS: dict[str, tuple[str, Callable[[Run], Report | None]]] = {
    "tutorial": (
        "ResNet-50 on two CPU devices: the split-size curve of PyTorch's model-parallel tutorial",
        lambda run: training.run_training(models.resnet, run.quick, run.kept),
    ),
    "gpt": (
        "a GPT-2-like model with tied embeddings on two CPU devices, the same comparison",
        lambda run: training.run_training(models.gpt, run.quick, run.kept),
    ),
    "overhead": (
        "microseconds per micro-batch on tiny stages and per call on one device, and of stamps in a GPT-2's step",
        lambda run: overhead.run_overhead(overhead.QUICK if run.quick else overhead.FULL, run.kept),
    ),
    "automatic": (
        "ten models of 1 ms to 1.3 s a step: the automatic plan for two CPU devices against the plain model",
        lambda run: automatic.run_automatic(run.quick, run.kept),
    ),
    "inference": (
        "samples per second of classification and scoring by ResNet-50, ViT, BERT and GPT-2 on two CPU devices",
        lambda run: inference.run_inference(run.quick, run.kept),
    ),
    "peers": (
        "tiny stages, ResNet-50, GPT-2 and BERT by torchgpipe and torch.distributed.pipelining; steps against a bound",
        lambda run: peers.run_peers(run.quick, run.kept),
    ),
    "models": (
        "ResNet-50, GPT-2, BERT, T5, ViT, Llama and Mixtral: stages, times and errors against the plain model",
        lambda run: zoo.run_zoo(run.quick, run.kept),
    ),
    "estimates": (
        "ResNet-50, GPT-2, BERT, T5 and ViT estimated from kernel curves, and profiled, against their steps",
        lambda run: estimates.run_estimates(run.quick, run.kept),
    ),
    "memory": (
        "training steps of ResNet-50, GPT-2, BERT and T5: bytes predicted without running them, and measured",
        lambda run: memory.run_memory(run.quick, run.kept),
    ),
    "accuracy": (
        "automatic plans that lost, and predicted against measured steps: ResNet-50, GPT-2 and T5 under constraints",
        lambda run: accuracy.run_accuracy(run.quick, run.kept),
    ),
    "partition_instances": (
        "the public pipeline-partitioning graphs of NeurIPS 2020 (--instances DIR) against their published optima",
        lambda run: partition_instances.run_partition_instances(run.folder),
    ),
    "planning_time": (
        "seconds and memory of choosing sharding strategies for Llamas on meshes of 64 devices",
        lambda run: planning_time.run_planning_time(run.quick, run.kept),
    ),
    "planning": (
        "seconds and memory of planning: 10,000 operators, 1,024 devices, Llama 3 70B on 128 H100",
        lambda run: planning.run_planning(run.quick, run.kept),
    ),
    "gpu": (
        "ResNet-50, GPT-2 medium, a Llama of 1.1 billion parameters and T5 on GPUs: every promise, met or missed",
        lambda run: gpu.run_gpu(run.quick, run.device, run.models, run.parts, kept=run.kept),
    ),
    "distributed": (
        "BERT and GPT-2 on two processes: autopar, its threads, pipelining, DDP, FSDP2 and tensor parallelism by hand",
        lambda run: distributed.run_distributed(run.quick, run.kept),
    ),
    "network": (
        "two hosts as network namespaces, one rank each: plans made for two bandwidths, measured at both",
        lambda run: network.run_network(run.quick, run.kept),
    ),
    "scale": (
        "GPT-3, Llama 3 405B and a mixture of experts on 64 to 16,384 H100: plans, simulated steps, utilisation, cost",
        lambda run: scale.run_scale(run.quick, run.kept),
    ),
    "published": (
        "published training runs (--tables DIR): plans by hand, predicted and measured steps and memory",
        lambda run: published.run_published(run.folder, run.quick, run.kept),
    ),
}

# These measure the process itself, or run no steps: they run where freed memory is given back.
WITHOUT_KEPT_MEMORY = ("partition_instances", "planning", "planning_time", "published", "scale")

WITH_FIGURE = ("tutorial", "gpt")

# README's tables and figures come from these, in this order; they need no GPU, no network namespaces and no folder.
IN_README = (
    "tutorial",
    "gpt",
    "automatic",
    "inference",
    "accuracy",
    "memory",
    "estimates",
    "planning",
    "planning_time",
    "peers",
    "overhead",
    "models",
    "distributed",
)
