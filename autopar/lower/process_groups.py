"""Collectives among processes: the only lines of autopar that call torch.distributed's collectives inside a graph.

They are the functional ones, which take the name of a process group and can stand in a graph. Their own autograd rules
are not used: the gradient of a functional all-reduce is another all-reduce, which is right for a sum that every rank
uses for a loss of its own, and wrong for one loss. All tensors are contiguous and exchanged along dimension 0.
"""

from __future__ import annotations

from typing import Any

import torch


def all_reduce(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """`operation`: "sum" or "max". `group`: name of the process group."""
    return _done(_ops().all_reduce(x, operation, group))


def all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """The tensors of all `n` ranks, joined."""
    return _done(_ops().all_gather_into_tensor(x, n, group))


def reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """This rank's part, one of `n`, of the sum over all ranks."""
    return _done(_ops().reduce_scatter_tensor(x, "sum", n, group))


def all_to_all(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Part r goes to rank r; the parts that came are joined in the order of ranks."""
    sizes = [x.shape[0] // n] * n
    return _done(_ops().all_to_all_single(x, sizes, sizes, group))


def _ops() -> Any:
    return torch.ops._c10d_functional


def _done(pending: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _ops().wait_tensor(pending)
    return result
