"""Tensors that require a gradient and are no parameters of the model: a graph holds them as constants, without one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from autopar.capture.module_state import held_values
from autopar.capture.node_names import describe
from cost_models.graphs import storage_key


def unregistered(model: nn.Module, exported: ExportedProgram, graph: fx.Graph) -> str:
    """Why `graph`, of `exported`, must be refused: it reads such a tensor of a model in training, other than under
    no_grad; "" if it reads none."""
    if not model.training:
        return ""
    hidden = {storage_key(p): name for name, p in _hidden_parameters(model) if p.requires_grad}
    names = {
        name: hidden.get(storage_key(value), f"'{name}'")
        for name, value in exported.constants.items()
        if isinstance(value, torch.Tensor) and (value.requires_grad or storage_key(value) in hidden)
    }
    names |= {name: f"buffer '{name}'" for name, buffer in model.named_buffers() if buffer.requires_grad}
    for node in graph.find_nodes(op="get_attr"):
        readers = [user for user in node.users if not _is_without_gradient(user)]
        if str(node.target) in names and readers:
            return (
                f"forward reads {names[str(node.target)]}, which requires a gradient and is no parameter of the model, "
                f"so that its gradient would be lost ({describe(readers[0])} reads it). Register it (nn.Parameter, "
                "nn.ParameterList, nn.ModuleList), make it an input, or detach it"
            )
    return ""


def _hidden_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Of modules that the model holds without knowing them, as in a plain list."""
    known = set(model.modules())
    for value in held_values(known):
        if isinstance(value, nn.Module) and value not in known:
            for name, parameter in value.named_parameters():
                yield f"'{name}' of a {type(value).__name__} in a plain list or dict", parameter


def _is_without_gradient(node: fx.Node) -> bool:
    """Whether a node is a block under no_grad."""
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled" and node.args[0] is False
