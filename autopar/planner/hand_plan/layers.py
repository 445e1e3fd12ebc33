"""The layers of a model, and the stages that they make.

Layers are what the model repeats (`capture.layers`). A model without any has its modules with parameters as layers.

    GPT-2        transformer.h.0 .. transformer.h.11
    ResNet-50    layer1.0 .. layer4.2
    an MLP       0, 2, 4     (of a Sequential of linear layers and activations)

Modules with parameters may lie inside one another. No stage then ends between those that need each other:

    0.parametrizations.weight    computes a weight of 0, from parameters alone: it is part of layer 0
    block                        has a parameter that scales what its layers return: it is none, and follows them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn

from autopar.analysis.operators import compute_nodes
from autopar.capture.node_names import module_path
from autopar.capture.program import Program
from autopar.hints.module_paths import ancestors, nearest


def layers_of(model: nn.Module, program: Program) -> tuple[str, ...]:
    """Module paths of the layers, in the order in which the program first needs an operator of theirs.

    One that reads no input of the model (the computation of a weight, a table of positions) is needed where the first
    operator runs that reads its result and such an input.
    """
    nodes = compute_nodes(program.graph)
    reached = set(program.graph.find_nodes(op="placeholder"))  # and what reads an input of the model
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    needed = {node: number for number, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node not in reached:
            needed[node] = min((needed[user] for user in node.users if user in needed), default=needed[node])
    first: dict[str, tuple[int, int]] = {}
    for number, node in enumerate(nodes):
        for path in ancestors(module_path(node)):
            first[path] = min(first.get(path, (needed[node], number)), (needed[node], number))
    repeated = [path for path in program.layers if path in first]
    if repeated:
        return tuple(sorted(repeated, key=first.__getitem__))
    with_parameters = [
        path for path, module in model.named_modules() if path in first and list(module.parameters(recurse=False))
    ]
    return tuple(sorted(_apart(with_parameters, nodes, reached), key=first.__getitem__))


def _apart(paths: Sequence[str], nodes: Sequence[fx.Node], reached: set[fx.Node]) -> list[str]:
    """The modules among `paths` that may each be the last one of a stage.

    nodes: of the program, in order. reached: those that read an input of the model.
    """
    numbers: dict[str, list[int]] = {path: [] for path in paths}  # of its own operators that read an input
    for number, node in enumerate(nodes):
        owner = nearest(module_path(node), numbers)
        if owner is not None and node in reached:
            numbers[owner].append(number)
    reads_inner = {
        outer
        for inner in paths
        for outer in ancestors(inner)[:-1]
        if numbers[inner] and numbers.get(outer) and numbers[inner][0] < numbers[outer][-1]
    }
    left = set(paths) - reads_inner
    found = {path for path in left if numbers[path] or left.isdisjoint(ancestors(path)[:-1])}
    used = {nearest(module_path(node), found) for node in nodes}
    return [path for path in paths if path in found and path in used]


def stages_of_layers(layers: Sequence[str], n_stages: int) -> Mapping[str, int]:
    """The stage of every layer: as many for each stage as possible, the last stages one more where they do not divide.

    `n_stages`: at most the number of layers.
    """
    return {path: i * n_stages // len(layers) for i, path in enumerate(layers)}


def stages_without_operators(stage_of: Mapping[str, int], n_stages: int) -> list[int]:
    """Their numbers. `stage_of`: of every operator."""
    used = set(stage_of.values())
    return [stage for stage in range(n_stages) if stage not in used]
