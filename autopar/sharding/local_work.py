"""What one device of a mesh computes of an operator: the kernels of the operator's call on the device's parts.

A product of a part has other tiles than the whole one, and an operator moves the bytes of its own operands: a strategy
that cuts the columns of a weight does not read less of the input. So the operator is counted again on the local shapes,
on the meta device:

    linear  x [512, 1024] w [4096, 1024]     strategy R S0 -> S1 on 4 devices
        -> linear  x [512, 1024] w [1024, 1024]: addmm of 512 x 1024; backward: 512 x 1024 and 1024 x 1024

Calls on equal parts are counted once, whichever meshes and strategies they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.sharding.layouts import Placements, local_shape, parts
from autopar.sharding.local import takes_sizes
from autopar.sharding.strategies import Strategy
from cost_models.graphs import may_have_gradient, tensors_in
from cost_models.kernels.kernel import Kernel
from cost_models.kernels.operator_work import OperatorWork, count_call


class WholeCall(NamedTuple):
    """An operator's call on whole tensors."""

    node: fx.Node
    operands: tuple[Any, ...]  # of its rule; the layouts of a strategy belong to them
    values: Mapping[fx.Node, Any]  # tensors on meta
    trained: Callable[[fx.Node], bool]  # whether a gradient flows to what a node makes
    work: OperatorWork  # what was counted of it


class _Part(NamedTuple):
    """A tensor of a local call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    def tensor(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.trained and may_have_gradient(made))


class LocalWorks:
    """The work of operators on parts, counted at its first use."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[tuple[int, ...], ...], OperatorWork] | None] = {}

    def of(self, call: WholeCall, strategy: Strategy, mesh: Sequence[int], *, training: bool) -> OperatorWork | None:
        """What each device computes under a strategy; None where the call on parts is not the operator's own.

        That is so where the arguments have sizes that would have to be cut, too, and where the devices work together.
        """
        target = call.node.target
        if strategy.special or not isinstance(target, torch._ops.OpOverload) or takes_sizes(target):
            return None
        whole = [(-1,) * len(mesh)] * len(call.operands)
        sums = self._sums(call, self._counted(call, whole, mesh, training))
        found = self._counted(call, strategy.inputs, mesh, training)
        if sums is None or found is None:
            return None
        shapes, work = found
        results = [tuple(t.shape) for t in tensors_in(call.values[call.node])]
        expected = [local_shape(o, shape, mesh) for o, shape in zip(strategy.outputs, results, strict=True)]
        if list(shapes) != expected:
            return None
        added = tuple(_smaller(kernel, self._share(call, kernel, strategy, mesh)) for kernel in sums)
        return OperatorWork(work.forward, work.backward + added)

    def _counted(
        self, call: WholeCall, layouts: Sequence[Placements], mesh: Sequence[int], training: bool
    ) -> tuple[tuple[tuple[int, ...], ...], OperatorWork] | None:
        """(shapes of the results, work) of the call on parts in `layouts`."""
        described = _described(call, layouts, mesh)
        if described is None:
            return None
        args, kwargs = described
        key = repr((str(call.node.target), args, kwargs, training))
        if key not in self._known:
            self._known[key] = _count(call.node.target, args, kwargs, training)
        return self._known[key]

    def _sums(
        self, call: WholeCall, whole: tuple[tuple[tuple[int, ...], ...], OperatorWork] | None
    ) -> tuple[Kernel, ...] | None:
        """The kernels of the counted work that add gradients to others; None if the call itself has other kernels."""
        if whole is None:
            return None
        own, counted = whole[1], call.work
        n = len(own.backward)
        same = own.forward == counted.forward and own.backward == counted.backward[:n]
        added = counted.backward[n:]
        return added if same and all(kernel.operator == "add_" for kernel in added) else None

    def _share(self, call: WholeCall, kernel: Kernel, strategy: Strategy, mesh: Sequence[int]) -> float:
        """Of the operand whose gradient the kernel adds up: the part that each device has."""
        for operand, layout in zip(call.operands, strategy.inputs, strict=True):
            value = call.values.get(operand) if isinstance(operand, fx.Node) else None
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() == kernel.written:
                return 1 / parts(layout, mesh)
        return 1.0


def _described(
    call: WholeCall, layouts: Sequence[Placements], mesh: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with a `_Part` for every tensor; None if the rule's operands are not the arguments' tensors."""
    named = [(o, layout) for o, layout in zip(call.operands, layouts, strict=True) if isinstance(o, fx.Node)]
    left = iter(named)
    misfits = []

    def part(node: fx.Node) -> Any:
        value = call.values[node]
        if not isinstance(value, torch.Tensor):
            misfits.append(node)
            return None
        operand, layout = next(left, (None, None))
        if operand is not node or layout is None:
            misfits.append(node)
            return None
        shape = local_shape(layout, value.shape, mesh)
        return _Part(shape, _stride(value, shape), value.dtype, call.trained(node))

    schema = call.node.target._schema  # type: ignore[union-attr]
    ordered = {a.name: call.node.kwargs[a.name] for a in schema.arguments if a.name in call.node.kwargs}
    args, kwargs = fx.node.map_arg((call.node.args, ordered), part)
    return None if misfits or next(left, None) is not None else (args, dict(kwargs))


def _stride(value: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a dense part whose dimensions have the order of the whole tensor's, and stay broadcast where that is."""
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (value.stride(d), -d)):
        if value.stride(d) or value.shape[d] == 1:
            stride[d] = step
            step *= shape[d]
    return tuple(stride)


def _count(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
) -> tuple[tuple[tuple[int, ...], ...], OperatorWork] | None:
    try:
        with torch.set_grad_enabled(training):
            result, work = count_call(target, _tensors(args), _tensors(kwargs))
    except (RuntimeError, NotImplementedError, IndexError, ValueError):  # sizes that do not fit, data-dependent results
        return None
    return tuple(tuple(t.shape) for t in tensors_in(result)), work


def _tensors(value: Any) -> Any:
    """Nested arguments with a tensor for every `_Part`."""
    if isinstance(value, _Part):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        items = [_tensors(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _tensors(item) for name, item in value.items()}
    return value


def _smaller(kernel: Kernel, share: float) -> Kernel:
    """A kernel that only moves bytes, on a share of them."""
    return Kernel(kernel.operator, kernel.kind, kernel.dtype, 0, int(kernel.read * share), int(kernel.written * share))
