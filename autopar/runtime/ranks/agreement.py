"""What all ranks must agree on before they compute: the program, the plan, the weights, and every call."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import InputError
from autopar.runtime.ranks.world import World

CHECK_EVERY = 100  # calls between two comparisons of the batch's content


def compare(world: World, facts: Mapping[str, tuple[str, str]]) -> None:
    """Raise InputError on all ranks where a fact differs. `facts`: by name (value, what would be right)."""
    found = world.gathered(dict(facts))
    for name, (value, advice) in found[0].items():
        others = [rank for rank, theirs in enumerate(found) if theirs.get(name, ("", ""))[0] != value]
        if others:
            there = found[others[0]].get(name, ("nothing", ""))[0]
            raise InputError(
                f"ranks differ in {name}: {value} on rank 0, {there} on rank {', '.join(map(str, others))}; {advice}"
            )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def weights_digest(model: nn.Module, without: Collection[str] = ()) -> str:
    """Of all values of parameters and buffers but those named."""
    crc = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in without:
            crc = _content(tensor.detach(), crc)
    return f"{crc:08x}"


class CallAgreement:
    """Compares every call of a module between the ranks: its kind and shapes always, its content now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._n_calls = 0

    def check(self, kind: Sequence[bool], inputs: Any, target: Any) -> None:
        """Raise InputError on all ranks unless they make the same call.

        `kind`: training step or forward, grad mode, mode of the model, whether outputs are returned.
        """
        leaves = torch_private.tree_leaves((inputs, target))
        shapes = zlib.crc32(repr([*kind, *map(_described, leaves)]).encode())
        content = 0
        if self._n_calls % CHECK_EVERY == 0:
            for leaf in leaves:
                content = _content(leaf, content) if isinstance(leaf, torch.Tensor) else content
        self._n_calls += 1
        own = torch.tensor([shapes, content], dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self._world.size)]
        torch.distributed.all_gather(found, own, group=self._world.control)
        for place, what in enumerate(("call (its kind, or the shapes of its batch)", "content of the batch")):
            others = [str(rank) for rank, theirs in enumerate(found) if theirs[place] != found[0][place]]
            if others:
                raise InputError(
                    f"ranks differ in the {what}: rank {', '.join(others)} from rank 0; every rank must make the same "
                    "calls with the whole batch (seed the data's order alike, and use no DistributedSampler)"
                )


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _content(tensor: torch.Tensor, before: int) -> int:
    whole = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(whole.view(torch.uint8).numpy().data, before) if whole.numel() else before
