"""What measured seconds of a call depend on besides hardware and torch's settings, for the keys of the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from autopar.analysis.example import Example
from autopar.capture import torch_private
from autopar.capture.program import Program
from autopar.capture.source_code import source_code
from cost_models import Device
from cost_models.graphs import get_attribute
from cost_models.measuring.autocast import autocasts


def graph_signature(program: Program) -> list[Any]:
    """What the measured times of a program depend on: operators, their connections, shapes and dtypes."""
    lines = []
    for node in program.graph.nodes:
        value = node.meta.get("val")
        shape = [str(s) for s in value.shape] + [str(value.dtype)] if isinstance(value, torch.Tensor) else []
        if node.op == "get_attr":
            tensor = get_attribute(program.graph_module, str(node.target))
            shape = [*map(str, tensor.shape), str(tensor.requires_grad)] if isinstance(tensor, torch.Tensor) else []
        target = node.name if node.op in ("placeholder", "get_attr") else str(node.target)
        lines.append(f"{node.name} {node.op} {target} {node.args} {node.kwargs} {shape}")
    shapes = [f"{i.path} {i.shape and tuple(i.shape)} {i.dtype} {i.batch_dim}" for i in program.inputs]
    text = "\n".join(lines)
    return [hashlib.sha256(text.encode()).hexdigest(), shapes, program.training]


def call_signature(example: Example, devices: Sequence[Device]) -> list[Any]:
    """What the measured steps of a call in this thread depend on beside the hardware."""
    autocast = [one.signature for one in autocasts(d.torch_device.type for d in devices).values()]
    return [graph_signature(example.program), example.training, loss_signature(example.loss, example.target), autocast]


def loss_signature(loss_fn: Any, target: Any) -> list[str]:
    """What the cost of a loss depends on, as far as visible: its code and the shapes of the target."""
    if loss_fn is None:
        return []
    code = source_code(loss_fn)
    if code is None:
        code = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    shapes = [str(tuple(t.shape)) for t in torch_private.tree_leaves(target) if isinstance(t, torch.Tensor)]
    return [code, repr(loss_fn) if isinstance(loss_fn, torch.nn.Module) else "", *shapes]
