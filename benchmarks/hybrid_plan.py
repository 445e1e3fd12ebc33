"""What is trained, by what software, on what, and under which plan: values, and seconds told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.hybrid_layers import Arithmetic, Transformer
from cost_models import Cluster
from cost_models.hardware.device_specs import DeviceSpec
from cost_models.memory.training_memory import Precision

Recompute = Literal["none", "selective", "full"]

PARTS = {
    "compute": "computing",
    "recompute": "recomputing",
    "tensor": "tensor collectives",
    "shards": "gathering and reducing shards",
    "transfers": "sending to stages",
    "gradients": "gradients once a step",
    "optimizer": "the optimizer",
    "bubble": "waiting",
}
"""What a device's seconds go to, in words; shards are those of ZeRO, as far as computing does not hide them."""


@dataclass(frozen=True)
class System:
    """What training software does whatever the plan."""

    arithmetic: Arithmetic
    precision: Precision  # of what is held, and of what the collectives of a step carry
    optimizer_bytes: int  # read and written for each parameter in a step
    accumulates: bool  # gradients of every micro-batch are added to a buffer, even if it is the only one
    blocking_sends: bool  # a stage computes nothing while it sends


@dataclass(frozen=True)
class Job:
    """What is to be done."""

    model: Transformer
    system: System
    batch: int  # samples of a step, on all devices
    cluster: Cluster  # of one kind of device

    @property
    def node(self) -> int:
        """Devices of a node."""
        return len(self.cluster.node)

    @property
    def devices(self) -> int:
        return self.node * self.cluster.nodes

    @property
    def spec(self) -> DeviceSpec:
        return self.cluster.node[0]


@dataclass(frozen=True)
class Split:
    """A plan. Devices are numbered as by Megatron-LM, tensor ranks first, then replicas, then stages:

    stage 1   | 8  9 | 10 11 | 12 13 | 14 15 |    tensor 2, data 4, pipeline 2
    stage 0   | 0  1 |  2  3 |  4  5 |  6  7 |
                tensor        data -->
    """

    tensor: int
    pipeline: int
    data: int
    samples: int  # of a micro-batch
    chunks: int = 1  # stages a device: with more than one 1F1B is interleaved
    recompute: Recompute = "full"
    zero: int = 0  # stage of ZeRO over the replicas

    def microbatches(self, batch: int) -> int:
        """Of each replica."""
        return batch // (self.data * self.samples)

    def problems(self, job: Job) -> Iterator[tuple[str, str]]:
        """Fields that keep the job from running so, and why. Layers that are cut in two are none: operators are smaller
        yet."""
        model, devices = job.model, self.tensor * self.pipeline * self.data
        if devices != job.devices:
            yield "data", f"{self.tensor} x {self.pipeline} x {self.data} devices are not {job.devices}"
            return
        m = self.microbatches(job.batch)
        if model.heads % self.tensor or model.kv_heads % self.tensor:
            yield "tensor", f"{model.heads} heads, {model.kv_heads} of keys, are no multiple of {self.tensor} ranks"
        if m < 1 or m * self.data * self.samples != job.batch:
            yield "samples", f"{job.batch} samples are no multiple of {self.data} replicas x {self.samples}"
        if self.chunks > 1 and (self.pipeline == 1 or m % self.pipeline):
            yield "chunks", f"interleaving needs micro-batches ({m}) in multiples of 2 or more stages ({self.pipeline})"
        if self.zero > 1 and self.pipeline > 1:
            yield "zero", f"stage {self.zero} of ZeRO works on every micro-batch, which is not done in a pipeline"

    def __str__(self) -> str:
        words = [f"tensor {self.tensor}", f"pipeline {self.pipeline}", f"data {self.data}", f"samples {self.samples}"]
        words += [f"chunks {self.chunks}"] * (self.chunks > 1) + [f"recompute {self.recompute}"]
        return ", ".join(words + [f"ZeRO {self.zero}"] * (self.zero > 0))


@dataclass(frozen=True)
class Seconds:
    """Seconds by the keys of PARTS."""

    parts: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Seconds) -> Seconds:
        keys = self.parts.keys() | other.parts.keys()
        return Seconds({key: self.parts.get(key, 0.0) + other.parts.get(key, 0.0) for key in keys})

    def times(self, n: float) -> Seconds:
        return Seconds({key: n * value for key, value in self.parts.items()})

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one micro-batch."""

    forward: Seconds
    backward: Seconds

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def times(self, n: float) -> Pass:
        return Pass(self.forward.times(n), self.backward.times(n))

    @property
    def both(self) -> Seconds:
        return self.forward + self.backward
