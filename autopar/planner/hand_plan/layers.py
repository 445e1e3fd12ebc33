"""The layers of a model, and the stages that they make.

Layers are what the model repeats (`capture.layers`). A model without any has its modules with parameters as layers.

    GPT-2        transformer.h.0 .. transformer.h.11
    ResNet-50    layer1.0 .. layer4.2
    an MLP       0, 2, 4     (of a Sequential of linear layers and activations)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from autopar.analysis.operators import compute_nodes
from autopar.capture.program import Program, module_path


def layers_of(model: nn.Module, program: Program) -> tuple[str, ...]:
    """Module paths of the layers, in the order in which the program first runs an operator of theirs."""
    first: dict[str, int] = {}
    for place, node in enumerate(compute_nodes(program.graph)):
        parts = module_path(node).split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), place)
    repeated = [path for path in program.layers if path in first]
    with_parameters = [
        path for path, module in model.named_modules() if path in first and list(module.parameters(recurse=False))
    ]
    return tuple(sorted(repeated or with_parameters, key=first.__getitem__))


def stages_of_layers(layers: Sequence[str], n_stages: int) -> Mapping[str, int]:
    """The stage of every layer: as many for each stage as possible, the last stages one more where they do not divide.

    `n_stages`: at most the number of layers.
    """
    return {path: i * n_stages // len(layers) for i, path in enumerate(layers)}


def stages_without_operators(stage_of: Mapping[str, int], n_stages: int) -> list[int]:
    """Their numbers. `stage_of`: of every operator."""
    used = set(stage_of.values())
    return [stage for stage in range(n_stages) if stage not in used]
