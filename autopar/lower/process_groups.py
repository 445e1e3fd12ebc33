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
    return finished(_ops().all_reduce(x, operation, group))


def all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """The tensors of all `n` ranks, joined."""
    return finished(started_all_gather(x, n, group))


def started_all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """As `all_gather`, not to be read before `finished`."""
    found: torch.Tensor = _ops().all_gather_into_tensor(x, n, group)
    return found


def reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """This rank's part, one of `n`, of the sum over all ranks."""
    return finished(started_reduce_scatter(x, n, group))


def started_reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """As `reduce_scatter`, not to be read before `finished`."""
    found: torch.Tensor = _ops().reduce_scatter_tensor(x, "sum", n, group)
    return found


def started_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over all ranks, in place, not to be read before `finished`."""
    found: torch.Tensor = _ops().all_reduce_(x, "sum", group)
    return found


def all_to_all(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Part r goes to rank r; the parts that came are joined in the order of ranks."""
    sizes = [x.shape[0] // n] * n
    return finished(_ops().all_to_all_single(x, sizes, sizes, group))


def finished(pending: torch.Tensor) -> torch.Tensor:
    """What a started collective gives, once it is there."""
    result: torch.Tensor = _ops().wait_tensor(pending)
    return result


def _ops() -> Any:
    return torch.ops._c10d_functional
