"""Collectives behind kernels: which a training system overlaps with computing, and what of them a step still takes.

Collectives that are not on the path of activations may run while kernels do: gradients are reduced in buckets behind
the backward that makes them, parameters are gathered behind the computing before their reader. While both run, they
compete for multiprocessors, caches and memory, so that the kernels take longer:

    exposed      |== kernels ==|-- collectives --|
    overlapped   |== kernels, slower ==|                 as long as the longer of kernels with their slowdown
                 |-- collectives --|                     and of all collectives, which share one network

Every constant has its source in a comment. None is fitted to a published training run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

Seconds = TypeVar("Seconds", float, np.ndarray)

SLOWDOWN = 0.189
"""How much longer kernels take while a collective runs: 18.9 % on average (40.0 % at most) over GPT and LLaMA models on
A100, H100, MI210 and MI250, Lee et al.: Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed
Deep Learning, arXiv 2507.03114, 2025."""

CONTENTION = SLOWDOWN / (1 + SLOWDOWN)
"""Seconds that kernels lose in each second of a collective behind them: they do 1 / (1 + SLOWDOWN) of their work in it.
"""


@dataclass(frozen=True)
class Overlap:
    """What a training system overlaps with computing."""

    gradients: bool = False  # reducing gradients, behind the backward
    parameters: bool = False  # gathering parameters: ahead of their readers, and after the optimizer's step
    gathers: bool = False  # gathering activations again, behind the products for the gradients of what was gathered
    sends: bool = True  # sending activations and their gradients to other stages; otherwise the sender waits
    launches: bool = True  # launching kernels, behind collectives and other layers

    def __str__(self) -> str:
        used = [name for name in OVERLAPS if getattr(self, name)]
        if not self.launches:
            return SERIAL
        return "all" if len(used) == len(OVERLAPS) else "+".join(used) or "none"


OVERLAP_AT_HAND = Overlap()
"""What autopar's own runtime does: copies between stages have streams of their own (`runtime/step/transfers.py`).
Collectives inside of meshes are operators of a stage, and gradients of replicas are summed after the last backward."""

OVERLAPS = ("gradients", "parameters", "gathers", "sends")
"""What may run behind computing."""

SERIAL = "serial"
"""Layers and collectives run one after another, and the host launches a layer's kernels while that layer runs, never
ahead of it or behind a collective. So a step takes what its parts take alone, which is what simulators add up that
trace a layer and measure collectives:

    none      host    |l1|l2|l3|l4|                     serial    |l1|l2|             |l3|l4|
              device     |k1|k2|~~collective~~|k3|k4|                |k1|k2|~~coll.~~|   |k3|k4|
                         '-layer 1-'          '-layer 2-'

The seconds of a collective contain its launch."""


def overlap_named(text: str) -> Overlap:
    """`none`, `all`, `serial`, or names of OVERLAPS joined by a plus, such as `gradients+sends`.

    Raises:
        ValueError: another text; the message lists the names.
    """
    if text == SERIAL:
        return Overlap(sends=False, launches=False)
    words = text.split("+") if isinstance(text, str) else [""]
    names = list(OVERLAPS) if text == "all" else [] if text == "none" else words
    unknown = [name for name in names if name not in OVERLAPS]
    if unknown or len(set(names)) < len(names):
        some = ", ".join(OVERLAPS)
        raise ValueError(f"it is none, all, {SERIAL}, or some of {some} joined by +, got {text!r}")
    return Overlap(**{name: name in names for name in OVERLAPS})


def overlapped_pass(kernels: Seconds, network: Seconds) -> Seconds:
    """Seconds of a pass: as long as its kernels, or as its network is busy. Numbers, or arrays of passes.

    `kernels`: with collectives that wait for them, and CONTENTION of those that do not. `network`: s of all collectives
    of the pass.
    """
    return cast(Seconds, np.maximum(kernels, network))


def exposed_behind(seconds: float, kernels: float) -> float:
    """Seconds that a collective adds to `kernels` (s) that it starts with, and that what follows both waits for.

    Megatron-LM gathers the input of a product again while the product for that input's gradient runs
    (`LinearWithGradAccumulationAndAsyncCommunication`).
    """
    return max(CONTENTION * seconds, seconds - kernels)


def left_over(seconds: Seconds, room: Seconds, bucket: Seconds) -> Seconds:
    """Seconds that collectives add to a pass which they run behind. Numbers, or arrays of passes.

    `room`: s of the pass in which no other collective runs. `bucket`: s of the part for which there is nothing to run
    behind: the gradients that the pass makes last, or the parameters that it reads first.
    """
    apart = np.minimum(seconds, bucket)
    behind = seconds - apart
    added = apart + np.maximum(CONTENTION * behind, behind - np.maximum(room, 0.0))
    return cast(Seconds, added)
