"""What messages and reports call a node of a graph: its operator, its module, and the line of the user's code."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from autopar.capture import torch_private

_OWN_FILES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the whole package


def module_path(node: fx.Node) -> str:
    """Path of the innermost module whose forward created `node`; "" for the root."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    if path == torch_private.NO_MODULE:
        return ""
    return re.sub(r"@\d+$", "", path)  # export numbers the second call of the same module


def source_line(node: fx.Node) -> str:
    """`file:line` of the user's code that created `node`; "" if unknown."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    lines = [(name, line) for name, line in lines if not name.startswith(_OWN_FILES)]
    outside = [(name, line) for name, line in lines if "/torch/nn/" not in name and "/torch/export/" not in name]
    chosen = (outside or lines)[-1:]
    return f"{chosen[0][0]}:{chosen[0][1]}" if chosen else ""


def described_with_code(node: fx.Node) -> str:
    """`describe(node)`, and below it the lines of the user's model that called it."""
    source = users_frames(node)
    return describe(node) + (f"\nThe model's code:\n{source}" if source else "")


def users_frames(node: fx.Node) -> str:
    """The traceback of the user's code that created `node`, without autopar's own frames."""
    frames = re.split(r"(?m)^(?=  File )", node.meta.get("stack_trace") or "")
    return "".join(f for f in frames if f.strip() and f'File "{_OWN_FILES}' not in f).rstrip()


def describe(node: fx.Node) -> str:
    """An operator as messages name it: `aten.relu in module 'layer1.0' (model.py:12)`."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
    line = source_line(node)
    return f"{name} in module '{module_path(node) or '(root)'}'" + (f" ({line})" if line else "")
