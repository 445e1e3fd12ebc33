"""Which layers of the model a stage has, for tools that split models between layers.

A layer is an item of one of the model's outermost module lists: `transformer.h.3` of `transformer.h.3.mlp.act`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors.names import few
from autopar.plan.exits.configuration import NotExpressed

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


@dataclass(frozen=True)
class StageLayers:
    """The layers and other modules of all stages."""

    layers: tuple[tuple[str, ...], ...]  # by stage: paths of layers, in their order
    others: tuple[tuple[str, ...], ...]  # by stage: modules outside of layers, in program order
    cut: tuple[str, ...]  # layers with operators in several stages, which go whole to the stage that has most of them

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of every stage."""
        return tuple(map(len, self.layers))

    @property
    def lists(self) -> tuple[str, ...]:
        """Paths of the module lists that the layers are items of."""
        return tuple(dict.fromkeys(path.rpartition(".")[0] for stage in self.layers for path in stage))

    @property
    def even(self) -> bool:
        """Whether all stages have as many layers."""
        return len(set(self.counts)) == 1

    def cut_layers(self) -> Iterator[NotExpressed]:
        """What moves where a stage begins inside of a layer."""
        if self.cut:
            homes = {path: stage for stage, paths in enumerate(self.layers) for path in paths}
            texts = [f"{path} to stage {homes[path]}" for path in self.cut]
            yield NotExpressed("layers", f"stages begin inside of layers, which go whole: {few(texts)}")


def stage_layers(plan: Plan) -> StageLayers:
    """The layers of every stage. A plan without operators (made by hand, not priced) has those that its split names."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    others: list[dict[str, None]] = [{} for _ in plan.stages]
    listed = [(key.rpartition("/")[0], stage) for stage, one in enumerate(plan.stages) for key in one.operators]
    for path, stage in listed or plan.split:
        layer = layer_of(path)
        if layer:
            counts[layer][stage] += 1
        elif path:
            others[stage][path] = None
    # Of equal counts the earlier stage.
    homes = {path: max(sorted(by_stage), key=by_stage.__getitem__) for path, by_stage in counts.items()}
    layers = tuple(
        tuple(sorted((path for path, home in homes.items() if home == stage), key=_place))
        for stage in range(len(plan.stages))
    )
    cut = tuple(path for path, by_stage in counts.items() if len(by_stage) > 1)
    return StageLayers(layers, tuple(map(tuple, others)), cut)


def layer_of(path: str) -> str:
    """The layer that contains a module: its path up to the first number; "" outside of layers."""
    parts = path.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def _place(path: str) -> tuple[str, int]:
    owner, _, number = path.rpartition(".")
    return owner, int(number)


def even_counts(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """The layers of each stage as `Plan.by_hand` shares them out: the last stages have one more where they must."""
    stages = [i * n_stages // n_layers for i in range(n_layers)] if n_layers else []
    return tuple(stages.count(stage) for stage in range(n_stages))
