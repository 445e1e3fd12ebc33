"""Bytes of one pass over a torch.fx graph, counted by real storages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cost_models.graphs import device_of, private_copy, run_nodes, tensors_in


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of one pass at one micro-batch size."""

    rows: int
    output: dict[str, int]  # node -> bytes of its output tensors
    fresh: dict[str, int]  # node -> bytes of storages that it allocated for them
    saved: dict[str, list[tuple[int, int]]]  # node -> (storage id, bytes) kept for backward, parameters left out


def measure_bytes(module: fx.GraphModule, inputs: list[Any], rows: int, training: bool) -> GraphBytes:
    """One pass that counts bytes by real storages: what each node returns, allocates, and keeps for backward."""
    own = private_copy(module, device_of(inputs))
    resident = {t.untyped_storage().data_ptr() for t in [*own.parameters(), *own.buffers()]}
    output: dict[str, int] = {}
    fresh: dict[str, int] = {}
    saved: dict[str, list[tuple[int, int]]] = {}
    known: set[int] = {t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor)} | resident
    pending: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # while it lives its address is its identity
        if storage.data_ptr() not in resident:
            pending[storage.data_ptr()] = storage.nbytes()
        return tensor

    def on_node(node: fx.Node, value: Any, _: float) -> None:
        tensors = tensors_in(value)
        output[node.name] = sum(t.numel() * t.element_size() for t in tensors)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        fresh[node.name] = sum(n for pointer, n in storages.items() if pointer not in known)
        known.update(storages)
        alive.append(value)
        saved[node.name] = sorted(pending.items())
        pending.clear()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.set_grad_enabled(training), hooks:
        run_nodes(own, inputs, on_node)
    return GraphBytes(rows, output, fresh, saved)
