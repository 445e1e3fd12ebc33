"""Collectives among processes: the only lines of autopar that call torch.distributed's collectives inside a graph.

They are the functional ones, which take the name of a process group and can stand in a graph. Their own autograd rules
are not used: the gradient of a functional all-reduce is another all-reduce, which is right for a sum that every rank
uses for a loss of its own, and wrong for one loss. All tensors are contiguous and exchanged along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_on_host: set[str] = set()  # names of process groups that carry tensors of the CPU alone


def carry_on_host(group: str, on_host: bool) -> None:
    """Whether a new process group of this name carries tensors of GPUs through the CPU's memory."""
    (_on_host.add if on_host else _on_host.discard)(group)


def all_reduce(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """`operation`: "sum" or "max". `group`: name of the process group."""
    return finished(_ops().all_reduce(_carried(x, group), operation, group)).to(x.device)


def all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """The tensors of all `n` ranks, joined."""
    return finished(started_all_gather(_carried(x, group), n, group)).to(x.device)


def started_all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """As `all_gather`, of a tensor that the group carries; not to be read before `finished`."""
    found: torch.Tensor = _ops().all_gather_into_tensor(x, n, group)
    return found


def reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """This rank's part, one of `n`, of the sum over all ranks."""
    return finished(started_reduce_scatter(_carried(x, group), n, group)).to(x.device)


def started_reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """As `reduce_scatter`, of a tensor that the group carries; not to be read before `finished`."""
    found: torch.Tensor = _ops().reduce_scatter_tensor(x, "sum", n, group)
    return found


def started_all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over all ranks, in place, of a tensor that the group carries; not to be read before `finished`."""
    found: torch.Tensor = _ops().all_reduce_(x, "sum", group)
    return found


def all_to_all(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    """Part r goes to rank r; the parts that came are joined in the order of ranks."""
    sizes = [x.shape[0] // n] * n
    return finished(_ops().all_to_all_single(_carried(x, group), sizes, sizes, group)).to(x.device)


def started_sum(numbers: Sequence[float], group: str) -> torch.Tensor:
    """Numbers of the hosts, added up over gloo, not to be read before `finished_numbers`."""
    return started_all_reduce(torch.tensor(numbers, dtype=torch.float64), group)


def largest(numbers: Sequence[float], group: str) -> list[float]:
    """The largest of the hosts' numbers at every place, over gloo."""
    return finished_numbers(_ops().all_reduce(torch.tensor(numbers, dtype=torch.float64), "max", group))


def finished_numbers(pending: torch.Tensor) -> list[float]:
    """What was started on numbers of the hosts gives. The host waits for it, and for no GPU."""
    found: list[float] = finished(pending).tolist()
    return found


def finished(pending: torch.Tensor) -> torch.Tensor:
    """What a started collective gives, once it is there."""
    result: torch.Tensor = _ops().wait_tensor(pending)
    return result


def _carried(x: torch.Tensor, group: str) -> torch.Tensor:
    """A tensor where the group carries it."""
    return x.cpu() if group in _on_host else x


def _ops() -> Any:
    return torch.ops._c10d_functional
