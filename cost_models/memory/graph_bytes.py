"""Bytes of one pass over a torch.fx graph, counted by storages: of real tensors, or of tensors on the meta device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from cost_models.graphs import StorageNumbers, device_of, private_copy, run_nodes, tensors_in
from cost_models.kernels.autocast_casts import AutocastCasts
from cost_models.kernels.device_kernels import DeviceKernels
from cost_models.memory.saved_tensors import hooked

Place = int | None
"""A tensor of a node: i >= 0 is the i-th of `node.all_input_nodes`, -1 - j the j-th result, None one made inside."""


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of one pass at one micro-batch size."""

    rows: int
    output: dict[str, int]  # node -> bytes of its output tensors
    fresh: dict[str, int]  # node -> bytes of storages that it allocated for them
    saved: dict[str, list[tuple[int, int]]]  # node -> (storage id, bytes) kept for backward, parameters left out
    places: dict[str, list[Place]]  # node -> for each of `saved`, which tensor of the node lies there
    results: dict[str, dict[int, int]] = field(default_factory=dict)  # node -> storage id of what it returns -> bytes


def measure_bytes(
    module: fx.GraphModule,
    inputs: list[Any],
    rows: int,
    training: bool,
    device_type: str = "cpu",
    autocast: torch.dtype | None = None,
    *,
    derives: bool = False,
) -> GraphBytes:
    """One forward that counts bytes by storages: what each node returns, allocates, and keeps for backward. Values are
    freed after their last use, and nothing is kept for a backward.

    It runs where `inputs` are. On the meta device nothing is allocated, and the bytes are those of a pass on a device
    of `device_type`, whose kernels may keep other tensors than those of another, under `autocast` (None: off). Casts of
    parameters are left out of what is kept, as the parameters are: they do not grow with the batch. `derives`: code of
    the module may take derivatives in its forward, for which everything is kept until the end.
    """
    device = device_of(inputs)
    own = private_copy(module, device, gradients=False)
    number = StorageNumbers().of
    resident = {number(t) for t in [*own.parameters(), *own.buffers()]}
    output: dict[str, int] = {}
    fresh: dict[str, int] = {}
    saved: dict[str, list[tuple[int, int]]] = {}
    places: dict[str, list[Place]] = {}
    results: dict[str, dict[int, int]] = {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    lies_in = {node: [number(x)] for node, x in zip(placeholders, inputs, strict=False) if isinstance(x, torch.Tensor)}
    known: set[int] = {number(t) for t in inputs if isinstance(t, torch.Tensor)} | resident
    pending: dict[int, int] = {}
    casts = AutocastCasts(device_type)

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        """Nothing is kept, as no backward follows: an operator that kept its own result would never be freed."""
        key, nbytes = number(tensor), tensor.untyped_storage().nbytes()
        if key not in resident and nbytes and key not in {number(cast) for cast in casts.kept}:
            pending[key] = nbytes
        return tensor.detach() if derives else None

    def on_node(node: fx.Node, value: Any) -> None:
        tensors = tensors_in(value)
        output[node.name] = sum(t.numel() * t.element_size() for t in tensors)
        storages = {number(t): t.untyped_storage().nbytes() for t in tensors}
        fresh[node.name] = sum(n for key, n in storages.items() if key not in known)
        results[node.name] = {key: n for key, n in storages.items() if key not in resident}
        known.update(storages)
        saved[node.name] = sorted(pending.items())
        lies_in[node] = [number(t) for t in tensors]
        operands = [lies_in.get(source, []) for source in node.all_input_nodes]
        places[node.name] = [_place(storage, operands, lies_in[node]) for storage, _ in saved[node.name]]
        pending.clear()

    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(hooked(pack, lambda kept: kept))
        if device.type == "meta":
            stack.enter_context(DeviceKernels(device_type))
        if autocast is not None:
            stack.enter_context(torch.autocast(device_type, autocast))
            stack.enter_context(casts)
        run_nodes(own, inputs, on_node)
    return GraphBytes(rows, output, fresh, saved, places, results)


def _place(storage: int, operands: list[list[int]], results: list[int]) -> Place:
    read = next((i for i, mine in enumerate(operands) if storage in mine), None)
    if read is not None:
        return read
    return -1 - results.index(storage) if storage in results else None
