"""The fastest split of a job that fits, and in words what makes it faster than another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from benchmarks.hybrid import Step, predict
from benchmarks.hybrid_costs import memory_of, stages_of
from benchmarks.hybrid_plan import PARTS, Job, Recompute, Split

MAX_SAMPLES = 64  # of a micro-batch
MAX_CHUNKS = 8

_NOTICEABLE = 0.005  # of a step


@dataclass(frozen=True)
class Space:
    """What a search may choose from, beside the sizes of the groups."""

    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    tensor: int | None = None  # at most; None: the devices of a node
    pipeline: int | None = None  # at most; None: one stage a layer
    data: int | None = None  # at most; None: all devices
    whole_layers: bool = True  # a stage is made of whole layers
    chunks: int = MAX_CHUNKS  # at most


@dataclass(frozen=True)
class Found:
    split: Split
    step: Step
    candidates: int  # that can run and fit
    simulated: int  # the others were ruled out by a bound


def splits(job: Job, space: Space) -> Iterator[Split]:
    """All of the space that can run, whether they fit or not."""
    model, layers = job.model, job.model.layers
    for tensor in _divisors(job.devices, space.tensor or job.node):
        if model.heads % tensor or model.kv_heads % tensor:
            continue
        for pipeline in _divisors(job.devices // tensor, space.pipeline or layers):
            data = job.devices // (tensor * pipeline)
            if job.batch % data or data > (space.data or data) or (space.whole_layers and layers % pipeline):
                continue
            for samples in _divisors(job.batch // data, MAX_SAMPLES):
                whole = _divisors(layers // pipeline, space.chunks) if layers % pipeline == 0 else [1]
                for chunks in whole:
                    for recompute in space.recompute:
                        for zero in space.zero if data > 1 else (0,):
                            split = Split(tensor, pipeline, data, samples, chunks, recompute, zero)
                            if not any(split.problems(job)):
                                yield split


def search(job: Job, space: Space | None = None, also: Iterable[Split] = ()) -> Found | None:
    """The fastest of the space, and of the splits in `also`, that fits; None if nothing does. Exact: candidates are
    simulated in the order of their lower bounds, until the next bound is above the best.

    O(candidates) bounds, and few simulations.
    """
    candidates = dict.fromkeys([*splits(job, space or Space()), *also])
    fitting = [split for split in candidates if memory_of(job, split).total <= job.spec.memory]
    bounds = {split: stages_of(job, split).bound(split, split.microbatches(job.batch)) for split in fitting}
    best: tuple[Step, Split] | None = None
    simulated = 0
    for split in sorted(fitting, key=bounds.__getitem__):
        if best is not None and bounds[split] >= best[0].seconds:
            break
        step = predict(job, split)
        simulated += 1
        if best is None or step.seconds < best[0].seconds:
            best = step, split
    return None if best is None else Found(best[1], best[0], len(fitting), simulated)


def difference(theirs: tuple[Split, Step], ours: tuple[Split, Step]) -> str:
    """What `ours` does otherwise, and which seconds that saves and costs; the largest first."""
    changes = [
        f"{f.name} {_shown(f.name, getattr(ours[0], f.name))} instead of {_shown(f.name, getattr(theirs[0], f.name))}"
        for f in fields(Split)
        if getattr(ours[0], f.name) != getattr(theirs[0], f.name)
    ]
    if not changes:
        return "the same plan"
    before, after = theirs[1], ours[1]
    moved = {part: after.parts[part] - before.parts[part] for part in PARTS}
    told = sorted((part for part in PARTS if abs(moved[part]) > _NOTICEABLE * before.seconds), key=lambda p: moved[p])
    words = [f"{PARTS[part]} {abs(moved[part]):.2f} s {'less' if moved[part] < 0 else 'more'}" for part in told]
    return f"{', '.join(changes)}: {', '.join(words) or 'hardly any difference'}"


def _shown(name: str, value: int | str) -> str:
    return f"stage {value}" if name == "zero" else str(value)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
