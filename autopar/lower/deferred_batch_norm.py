"""Batch norm whose running statistics are those of the whole batch, whatever micro-batches it came in.

Every micro-batch is normalised by its own statistics, as always. What it would add to the running ones is put aside,
and merged once all micro-batches are through (deferred batch norm, torchgpipe, Kim et al. 2020):

```
    micro-batch 0   n0, mean0, var0  \\
    micro-batch 1   n1, mean1, var1   >  n, mean, var of the batch  ->  one update of the running statistics
    micro-batch 2   n2, mean2, var2  /
```
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.cleanup import aten

Moments = tuple[int, torch.Tensor, torch.Tensor]  # values a channel, their mean, their variance (unbiased)


@dataclass(frozen=True)
class DeferredNorm:
    """One batch norm of a stage whose running statistics are updated after the batch."""

    key: str  # of the operator
    mean: str  # names of the buffers
    var: str
    tracked: str | None  # that counts batches
    momentum: float | None  # None: the mean over all batches so far


class Statistics:
    """What the micro-batches of one call put aside. Workers add in any order."""

    def __init__(self) -> None:
        self._moments: dict[tuple[str, int], Moments] = {}  # (operator, micro-batch)

    def add(self, key: str, microbatch: int, moments: Moments) -> None:
        self._moments[key, microbatch] = moments

    def of(self, key: str, microbatch: int) -> Moments | None:
        """What a norm put aside of a micro-batch; None if it did not run here."""
        return self._moments.get((key, microbatch))

    @torch.no_grad()
    def update(self, norms: Sequence[DeferredNorm], tensor: Callable[[str], torch.Tensor]) -> None:
        """Move the running statistics, `tensor(name)`, as one forward of the whole batch would."""
        for norm in norms:
            mine = [self._moments[k] for k in sorted(self._moments) if k[0] == norm.key]
            if not mine:
                continue
            _, mean, var = merged(mine)
            tracked = tensor(norm.tracked).add_(1) if norm.tracked is not None else None
            for name, new in ((norm.mean, mean), (norm.var, var)):
                running = tensor(name)
                if norm.momentum is not None:
                    running.mul_(1 - norm.momentum).add_(new.to(running), alpha=norm.momentum)
                    continue
                assert tracked is not None, "torch.nn's batch norms count batches where they keep statistics"
                share = tracked.to(running.device).double().reciprocal()  # a tensor: the host does not wait for a GPU
                running.mul_(1 - share).add_(new.to(running).mul(share))
        self._moments.clear()


def merged(parts: Sequence[Moments]) -> Moments:
    """The moments of all values from those of disjoint parts (Chan, Golub, LeVeque 1979, pairwise update).

    With n = na + nb and d = mean_b - mean_a, squares of deviations add up to Sa + Sb + d^2 na nb / n.
    """
    n, mean, var = parts[0]
    squares = _squares(n, var)
    for more, other_mean, other_var in parts[1:]:
        total, delta = n + more, other_mean.to(mean.device) - mean
        squares = squares + _squares(more, other_var).to(mean.device) + delta.square() * (n * more / total)
        mean = mean + delta * (more / total)
        n = total
    return n, mean, squares / (n - 1)


def _squares(n: int, var: torch.Tensor) -> torch.Tensor:
    """The sum of squared deviations; a single value has no variance (0 / 0) and deviates by nothing."""
    return var * (n - 1) if n > 1 else torch.zeros_like(var)


class _Thread(threading.local):
    statistics: Statistics | None = None
    microbatch = 0


_thread = _Thread()


@contextmanager
def collecting(statistics: Statistics, microbatch: int) -> Iterator[None]:
    """Inside, deferred batch norms of this thread put aside what they see of a micro-batch."""
    before = _thread.statistics, _thread.microbatch
    _thread.statistics, _thread.microbatch = statistics, microbatch
    try:
        yield
    finally:
        _thread.statistics, _thread.microbatch = before


def collecting_again() -> Callable[[], AbstractContextManager[None]]:
    """The context in which what runs here now may run again: deferred batch norms run the same kernels, and what they
    put aside is dropped."""
    if _thread.statistics is None:
        return nullcontext
    return lambda: collecting(Statistics(), _thread.microbatch)


def deferred_batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, cudnn: bool, key: str
) -> torch.Tensor:
    """Batch norm by the statistics of `x` ([n, channels, ...])."""
    statistics = _thread.statistics
    if statistics is None:
        return aten.batch_norm.default(x, weight, bias, None, None, True, 0.0, eps, cudnn)
    channels = x.shape[1]
    dtype = weight.dtype if weight is not None else torch.float32 if x.dtype.itemsize < 4 else x.dtype
    mean, var = (torch.zeros(channels, dtype=dtype, device=x.device) for _ in range(2))
    # Running statistics with a momentum of one are those of the micro-batch, and cost nothing beside the kernel.
    result = aten.batch_norm.default(x, weight, bias, mean, var, True, 1.0, eps, cudnn)
    statistics.add(key, _thread.microbatch, (x.numel() // channels, mean, var))
    return result


def deferred_counters(graph: fx.Graph) -> frozenset[str]:
    """The buffers `num_batches_tracked` of all batch norms of a program that keep running statistics.

    A plan may put the operator that counts a batch into another stage than its batch norm, so this looks at the whole
    program. A buffer that is not counted exactly once per call of its norm is left out.
    """
    norms = Counter(_counter_of(str(node.args[3].target)) for node in graph.nodes if _keeps_statistics(node))
    counts = Counter(counter for node in graph.nodes if (counter := _counted(node)) is not None)
    return frozenset(counter for counter, calls in norms.items() if counts[counter] == calls)


def defer_batch_norms(graph: fx.Graph, source: fx.GraphModule, counters: Collection[str]) -> tuple[DeferredNorm, ...]:
    """Make the batch norms of a stage's graph that keep running statistics leave them to `Statistics.update`.

    `source`: has the modules that the graph calls (where symbolic_trace made it). `counters`: of the whole program, see
    `deferred_counters`.
    """
    for node in list(graph.nodes):
        if _counted(node) in counters:
            node.replace_all_uses_with(node.args[0])  # the next count of a norm that is called again
            graph.erase_node(node)
    found = []
    for node in list(graph.nodes):
        if node.op == "call_module":
            found += _defer_module(graph, node, source.get_submodule(str(node.target)))
            continue
        if not _keeps_statistics(node):
            continue
        x, weight, bias, mean, var, _, momentum, eps, cudnn = node.args
        assert isinstance(mean, fx.Node)
        assert isinstance(var, fx.Node)
        counter = _counter_of(str(mean.target))
        tracked = counter if counter in counters else None
        found.append(DeferredNorm(node.name, str(mean.target), str(var.target), tracked, float(momentum)))
        node.target, node.args = deferred_batch_norm, (x, weight, bias, eps, cudnn, node.name)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    return tuple(found)


def _defer_module(graph: fx.Graph, node: fx.Node, norm: nn.Module) -> list[DeferredNorm]:
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not norm.training or norm.running_mean is None:
        return []
    path = str(node.target)
    with graph.inserting_before(node):
        weight, bias = (graph.get_attr(f"{path}.{name}") if norm.affine else None for name in ("weight", "bias"))
        args = (node.args[0], weight, bias, norm.eps, torch.backends.cudnn.enabled, node.name)
        call = graph.call_function(deferred_batch_norm, args)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    graph.erase_node(node)
    mean, var, tracked = (f"{path}.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
    return [DeferredNorm(node.name, mean, var, tracked, norm.momentum)]


def _keeps_statistics(node: fx.Node) -> bool:
    """Whether `node` is a batch norm that normalises by its input and updates running statistics."""
    return node.target is aten.batch_norm.default and bool(node.args[5]) and isinstance(node.args[3], fx.Node)


def _counter_of(mean: str) -> str:
    """The buffer that counts the batches of the norm with the buffer `mean`."""
    return f"{mean.rpartition('.')[0]}.num_batches_tracked".lstrip(".")


def _counted(node: fx.Node) -> str | None:
    """The buffer that `node` counts a batch in; None for other nodes."""
    if node.target is not aten.add_.Tensor:
        return None
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target is aten.add_.Tensor:
        source = source.args[0]  # the count of an earlier call of the same norm
    name = str(source.target) if isinstance(source, fx.Node) and source.op == "get_attr" else ""
    return name if name.endswith("num_batches_tracked") else None
