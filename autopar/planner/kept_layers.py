"""Layers that keep what they make although the plan says that layers run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from autopar.analysis.blocks import Blocks
from autopar.analysis.example import Example
from autopar.capture.node_names import module_path
from autopar.errors.names import few
from autopar.hints.module_paths import nearest


def notes_on_kept_layers(example: Example) -> tuple[str, ...] | None:
    """Which layers keep all, and why; () where all run again, None where the model repeats none."""
    blocks = Blocks(example.program, example.batching.storages)
    if not blocks.layers:
        return None
    kept = [layer for layer in blocks.layers if layer not in blocks.all]
    why = {
        "a single operator keeps nothing but what enters it": [layer for layer in kept if len(layer) == 1],
        "they cannot run again as they have run": [layer for layer in kept if len(layer) > 1],
    }
    return tuple(
        f"kept, because {reason}: {few(paths)}"
        for reason, of in why.items()
        if (paths := _paths_of(of, example.program.layers))
    )


def _paths_of(layers: Iterable[frozenset[fx.Node]], paths: Collection[str]) -> list[str]:
    """The modules, among `paths`, that calls of layers are of."""
    first = (min(layer, key=lambda node: node.name) for layer in layers)
    return list(dict.fromkeys(path for node in first if (path := nearest(module_path(node), paths))))
