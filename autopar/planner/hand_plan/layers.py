"""The layers of a model, and the stages that they make.

Layers are what the model repeats: the items of its outermost module lists. A model without any has its modules with
parameters as layers.

    GPT-2        transformer.h.0 .. transformer.h.11
    ResNet-50    layer1.0 .. layer4.2
    an MLP       0, 2, 4     (of a Sequential of linear layers and activations)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from autopar.analysis.operators import compute_nodes
from autopar.capture.program import Program, module_path

_FEWEST = 2  # equal modules in a row that count as layers


def layers_of(model: nn.Module, program: Program) -> tuple[str, ...]:
    """Module paths of the layers, in the order in which the program first runs an operator of theirs."""
    first: dict[str, int] = {}
    for place, node in enumerate(compute_nodes(program.graph)):
        parts = module_path(node).split(".")
        for depth in range(1, len(parts) + 1):
            first.setdefault(".".join(parts[:depth]), place)
    repeated = [path for path in _repeated(model, "") if path in first]
    with_parameters = [
        path for path, module in model.named_modules() if path in first and list(module.parameters(recurse=False))
    ]
    return tuple(sorted(repeated or with_parameters, key=first.__getitem__))


def _repeated(module: nn.Module, path: str) -> Iterator[str]:
    """Outermost modules that stand in a list with others of their class and with parameters."""
    children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    numbered = [(name, child) for name, child in children if name.isdecimal()]
    classes = {type(child) for _, child in numbered}
    is_list = len(numbered) >= _FEWEST and len(classes) == 1 and not isinstance(numbered[0][1], nn.Sequential)
    for name, child in children:
        own = f"{path}.{name}" if path else name
        if is_list and name.isdecimal():
            yield own
        else:
            yield from _repeated(child, own)


def stages_of_layers(layers: Sequence[str], n_stages: int) -> Mapping[str, int]:
    """The stage of every layer: as many for each stage as possible, the last stages one more where they do not divide.

    `n_stages`: at most the number of layers.
    """
    return {path: i * n_stages // len(layers) for i, path in enumerate(layers)}


def stages_without_operators(stage_of: Mapping[str, int], n_stages: int) -> list[int]:
    """Their numbers. `stage_of`: of every operator."""
    used = set(stage_of.values())
    return [stage for stage in range(n_stages) if stage not in used]
