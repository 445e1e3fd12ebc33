"""The options of `parallelize`, `plan`, `compare`, `profile` and the command line: names, types, defaults and checks.

parallelize(model, n_microbatches=4) ---+
plan(model, tune=2), compare(...) ------+--> PlanOptions --> SearchOptions (planner): what one search needs
autopar plan --n-microbatches 4 --------+               \\--> RunSettings (runtime): how the model is run
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.schedule.builders import SCHEDULES
from cost_models import OPTIMIZERS, PRECISIONS, optimizer_name, parse_bytes
from cost_models.collectives.overlap import OVERLAPS, overlap_named
from cost_models.kernels.launches import MODES
from cost_models.memory.optimizer_step import FUSED, IMPLEMENTATIONS, Implementation, implementation_of

BatchDim = int | dict[str, int | None] | None
# Sizes that change between calls: see runtime/signatures/dynamic.py.
Dynamic = bool | Mapping[str, bool | int | Sequence[int] | Mapping[int, bool | Sequence[int]]] | None
Tune = int | Literal["auto"]
Data = Literal["whole", "per-rank"]  # what every rank passes to a call: the whole batch, or samples of its own
BATCH_NORM = ("per-microbatch", "deferred", "exact")


class CompareKeywords(TypedDict, total=False):
    """The options of `compare`."""

    n_microbatches: int | None
    schedule: str | None
    max_replicas: int | None
    max_shards: int | None
    memory_limit: float | str | None
    launch: str | None
    precision: str | None
    optimizer_step: Implementation | None
    overlap: str | None
    batch_norm: str
    batch_dim: BatchDim
    strict: bool
    cache: bool


class PlanKeywords(CompareKeywords, total=False):
    """The options of `plan`: all that there are."""

    optimizer: str | torch.optim.Optimizer
    tune: Tune
    candidates: Mapping[str, Plan] | None
    calibrate: bool
    verify: bool
    compile: bool | str
    watch_nan: bool
    dynamic: Dynamic


# What says how a step is run where nothing is measured: on a cluster that is not at hand.
AHEAD_ONLY = ("launch", "precision", "optimizer_step", "overlap")
_CHOICES: dict[str, Collection[str]] = {
    "schedule": SCHEDULES,
    "launch": MODES,
    "precision": PRECISIONS,
    "optimizer_step": IMPLEMENTATIONS,
    "batch_norm": BATCH_NORM,
}

HELP = {  # the texts of `--help`, for the options of the command line
    "n_microbatches": "Number of micro-batches per batch.",
    "schedule": f"Pipeline schedule: {', '.join(SCHEDULES)}.",
    "max_replicas": "Maximum number of devices per stage; 1 for a pure pipeline.",
    "max_shards": "Maximum number of devices that share the operators of a stage; 1 for no sharding. "
    "Default: any number with --cluster, else 1.",
    "launch": f"With --cluster: how kernels are launched: {', '.join(MODES)}. Default: eager.",
    "precision": "With --cluster: which copies of a parameter there are, in which dtypes: "
    f"{', '.join(PRECISIONS)}. Default: all in the dtype of the parameter.",
    "optimizer_step": f"With --cluster: kernels of the optimizer's step: {', '.join(IMPLEMENTATIONS)}.",
    "overlap": "With --cluster: which communication computing hides: none, all, or some of "
    f"{', '.join(OVERLAPS)} joined by +; serial: one layer or collective after another, and no kernel is launched "
    "ahead of its layer. Default: sends, as autopar's own runtime does.",
    "memory_limit": "Usable memory of each device, such as 8GB, 500MiB or 8e9 (bytes).",
    "optimizer": f"Optimizer whose state must fit in memory: {', '.join(OPTIMIZERS)}.",
    "batch_norm": f"Statistics of batch norm: {', '.join(BATCH_NORM)}.",
    "tune": "Run this many of the best plans for a few steps and use the fastest; auto: the best plan beside the plain "
    "model; 0: run none.",
    "calibrate": "Scale all predictions by a few measured steps of the whole model, even with --tune 0.",
    "strict": "Refuse a model with parts that cannot be captured, instead of running these as single operators.",
    "cache": "Read measurements from disk and store new ones.",
}

COMMAND_LINE_TYPES: dict[str, Any] = {  # where not those of PlanOptions
    "memory_limit": str | None,
    "optimizer_step": str | None,
    "optimizer": str,
    "tune": str,
}


@dataclass(frozen=True)
class PlanOptions:
    """What the user fixes. Raises InputError that lists everything wrong. `parallelize` documents every option."""

    n_microbatches: int | None = None  # None, here and below: the search chooses
    schedule: str | None = None
    max_replicas: int | None = None
    max_shards: int | None = None
    launch: str | None = None
    precision: str | None = None
    optimizer_step: Implementation | None = None
    overlap: str | None = None
    memory_limit: float | str | None = None  # on each device, bytes or "8GB"; None: what the device has free
    optimizer: str | torch.optim.Optimizer = "adamw"  # kept as its name
    batch_norm: str = "per-microbatch"
    batch_dim: BatchDim = None
    tune: Tune = "auto"
    candidates: Mapping[str, Plan] | None = None
    calibrate: bool = False
    verify: bool = False
    strict: bool = False
    compile: bool | str = False
    watch_nan: bool = False
    dynamic: Dynamic = None
    cache: bool = True

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise InputError("; ".join(problems))
        if self.optimizer_step is None:
            object.__setattr__(self, "optimizer_step", implementation_of(self.optimizer))
        # The name alone: the options outlive the call, and an optimizer holds the parameters of the model.
        object.__setattr__(self, "optimizer", self.optimizer_name)

    @property
    def memory_bytes(self) -> float | None:
        """The usable memory of each device in bytes; None: what the device has free."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @property
    def optimizer_name(self) -> str:
        """One of OPTIMIZERS."""
        return optimizer_name(self.optimizer)

    @property
    def launches(self) -> str:
        """How kernels are launched where nothing is measured: as `launch` says, or else as `compile` does."""
        return self.launch or _launch_of(self.compile)

    @property
    def that_run(self) -> list[str]:
        """Options in use that run plans, and so need the devices."""
        used = {"tune": self.tune not in (0, "auto"), "candidates": bool(self.candidates), "calibrate": self.calibrate}
        return [name for name, is_used in used.items() if is_used]

    def _problems(self) -> Iterator[str]:
        for name in ("n_microbatches", "max_replicas", "max_shards"):
            value = getattr(self, name)
            if value is not None and not _whole(value, least=1):
                yield f"{name} must be a whole number of at least 1, got {value!r}"
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            known = isinstance(value, str) and value in choices
            if not known and not (value is None and name != "batch_norm"):
                yield f"{name} must be one of {', '.join(choices)}, got {value!r}"
        for name in ("strict", "calibrate", "verify", "watch_nan", "cache"):
            if not isinstance(getattr(self, name), bool):
                yield f"{name} must be True or False, got {getattr(self, name)!r}"
        for name, read in (("optimizer", optimizer_name), ("memory_limit", parse_bytes), ("overlap", overlap_named)):
            value = getattr(self, name)
            try:
                if value is not None or name == "optimizer":
                    read(value)
            except ValueError as error:
                yield f"{name} cannot be used: {error}"
            else:
                if name == "optimizer" and self.optimizer_step == "fused" and read(value) not in ("none", *FUSED):
                    yield f"optimizer_step='fused', but torch fuses only {', '.join(FUSED)}, not {read(value)}"
        yield from self._compile_problems()
        yield from _batch_dim_problems(self.batch_dim)
        yield from _dynamic_problems(self.dynamic)
        yield from self._tuning_problems()

    def _compile_problems(self) -> Iterator[str]:
        if not isinstance(self.compile, bool) and self.compile != "graphs":
            named = torch.compiler.list_backends(exclude_tags=None) if isinstance(self.compile, str) else ()
            if self.compile not in named:  # for debugging are many of them: those are taken, and not listed
                backends = ", ".join(torch.compiler.list_backends())
                yield f"compile must be True, False, 'graphs' or a backend of torch ({backends}), got {self.compile!r}"
                return
        if self.compile == "graphs" and self.dynamic not in (None, False):
            yield (
                "compile='graphs' records kernels for fixed sizes, and dynamic= opens sizes; leave dynamic= out, or "
                "give compile=True"
            )
        meant = _launch_of(self.compile)
        if self.compile and self.launch in MODES and self.launch != meant:
            yield (
                f"compile={self.compile!r} says launch={meant!r}, but launch={self.launch!r} is given; leave one of "
                "them out"
            )

    def _tuning_problems(self) -> Iterator[str]:
        if self.tune != "auto" and not _whole(self.tune, least=0):
            yield f"tune must be 'auto' or a whole number of at least 0, got {self.tune!r}"
        elif self.candidates and self.tune == 0:
            yield "candidates are compared by running them; give tune=1 or more, or leave it out"
        for name, plan in (self.candidates or {}).items():
            if not isinstance(plan, Plan):
                yield f"candidates[{name!r}] must be a Plan, got {type(plan).__name__}"


def _launch_of(compile: bool | str) -> str:
    """How kernels are launched by what `compile` says: through inductor, as CUDA graphs, or by another backend."""
    named = "inductor" if compile is True else compile
    graphs = {"cudagraphs": "cuda-graphs", "graphs": "cuda-graphs"}
    return {"inductor": "compiled", **graphs}.get(str(named), "eager")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _batch_dim_problems(batch_dim: object) -> Iterator[str]:
    dims = batch_dim.values() if isinstance(batch_dim, dict) else [batch_dim]
    names = batch_dim if isinstance(batch_dim, dict) else ()
    if any(dim is not None and type(dim) is not int for dim in dims) or not all(
        isinstance(name, str) for name in names
    ):
        yield (
            "batch_dim must be the number of a dimension, such as 0 or -1, or a dict from names of inputs to such "
            f"numbers or None, got {batch_dim!r}"
        )


def _dynamic_problems(dynamic: object) -> Iterator[str]:
    if dynamic is None or isinstance(dynamic, bool):
        return
    if not isinstance(dynamic, Mapping):
        yield f"dynamic must be True, False or a dict from input names to dimensions, got {dynamic!r}"
        return
    for name, wanted in dynamic.items():
        if wanted is True:
            continue
        dims = wanted if isinstance(wanted, (Mapping, tuple, list)) else [wanted]
        buckets = [ends for ends in wanted.values() if ends is not True] if isinstance(wanted, Mapping) else []
        if any(type(dim) is not int for dim in dims):
            yield f"dynamic[{name!r}] must be True, dimensions, or a dict from dimensions to buckets, got {wanted!r}"
        elif not all(map(_are_sizes, buckets)):
            yield f"the buckets in dynamic[{name!r}] must be sizes of at least 1, such as (128, 512), got {wanted!r}"


def _are_sizes(value: object) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(_whole(size, least=1) for size in value)
