"""Kernels of a layer, forward and backward, and the tensors that it keeps, noted as its operators are called.

Everything is on the meta device: tensors have sizes and storages that can be told apart, and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_models.graphs import storage_key, tensors_in
from cost_models.kernels.kernel import Kernel, MemoryKind, make_kernel
from cost_models.kernels.operator_work import count_call


@dataclass(frozen=True)
class Work:
    """What a device does for one micro-batch in one layer, in the embedding or in the head."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    again: tuple[Kernel, ...]  # of the forward, what selective recomputation runs once more
    kept: int  # bytes kept for the backward without recomputation
    kept_selective: int  # bytes kept under selective recomputation
    shapes: tuple[tuple[int, ...], ...]  # of the device's parameters

    @property
    def elements(self) -> int:
        """Numbers in its parameters."""
        return sum(math.prod(shape) for shape in self.shapes)


class Tape:
    """Notes what is called, piece by piece.

    A piece that runs `again` is what selective recomputation leaves out of the kept tensors: what it needs is kept
    where another piece made it, what it makes is made once more for the backward.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._forward: list[Kernel] = []
        self._backward: list[Kernel] = []
        self._again: list[Kernel] = []
        self._shapes: list[tuple[int, ...]] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # while one lives, its key is its own
        self._parameters: set[int] = set()
        self._saved: set[int] = set()
        self._inputs: set[int] = set()  # of pieces that run again
        self._remade: set[int] = set()
        self._parts: dict[int, int] = {}  # of what was gathered: the device's own part of it

    def input(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """What comes from elsewhere."""
        tensor = torch.empty(sizes, dtype=dtype or self.dtype, device="meta")
        self._storages[storage_key(tensor)] = tensor.untyped_storage()
        return tensor.requires_grad_(tensor.is_floating_point())

    def parameter(self, *sizes: int) -> Tensor:
        tensor = self.input(*sizes)
        self._shapes.append(sizes)
        self._parameters.add(storage_key(tensor))
        return tensor

    def gathered(self, part: Tensor, size: int) -> Tensor:
        """What all ranks' parts are together, `size` of the first dimension; only the own part is kept."""
        whole = self.input(size, *part.shape[1:])
        self._parts[storage_key(whole)] = storage_key(part)
        return whole

    def join(self, tensor: Tensor) -> None:
        """Note that a tensor's gradients from two readers are added."""
        self._backward.append(make_kernel("add", "pointwise", [tensor, tensor], [tensor], 0))

    def sum_weights(self, x: Tensor) -> None:
        """Note that the gradients of a norm's weights are summed up in a kernel of their own, which reads x and the
        result's gradient once more (PyTorch: aten/src/ATen/native/cuda/layer_norm_kernel.cu)."""
        self._backward.append(make_kernel("norm_weights_backward", "reduction", [x, x], [], 0))

    def call(self, function: Callable[..., Any], *args: Any, again: bool = False) -> Any:
        """The result of a function whose operators are kernels of their own."""
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result, work = count_call(function, args)
        self._note(work.forward, work.backward, args, tensors_in(result), saved, again)
        return result

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q k') v under a causal mask in one kernel; it keeps what goes in and what comes out.

        From samples x heads x tokens x numbers to a tensor of which no order is to be expected: the kernel writes the
        one that its reader wants.
        """
        function = torch.ops.aten.scaled_dot_product_attention.default
        result, work = count_call(function, (query, key, value, None, 0.0, True))
        inputs = [query, key, value]
        self._note(work.forward, work.backward, inputs, [result], [*inputs, result], False)
        return result

    def fused(
        self,
        reads: Sequence[Tensor],
        like: Tensor,
        *,
        also: Sequence[Tensor] = (),
        kept: Sequence[Tensor] | None = None,
        mask: bool = False,
        passes: bool = False,
        again: bool = False,
        kind: MemoryKind = "pointwise",
    ) -> Tensor:
        """A chain of operators in one kernel: `reads` come in, a tensor of the shape of `like` goes out.

        The backward reads the gradient and what is `kept` (None: all of `reads`), writes gradients of activations, and
        sums up that of every bias in a kernel of its own; see `sum_weights` for a norm's. `also`: read too and added to
        the result, so that its gradient is the result's. `mask`: of dropout, a byte for each element of the result,
        kept as well. `passes`: all is just added, and there is nothing to do in the backward.
        """
        out = torch.empty_like(like).requires_grad_()
        masks = [torch.empty(out.shape, dtype=torch.bool, device="meta")] if mask else []
        saved = [*(reads if kept is None else kept), *masks]
        weights = [t for t in reads if storage_key(t) in self._parameters]
        others = [t for t in reads if storage_key(t) not in self._parameters and t.requires_grad]
        forward = make_kernel("fused", kind, [*reads, *also], [out, *masks], 0)
        backward = [] if passes else [make_kernel("fused_backward", kind, [out, *saved], others, 0)]
        if kind != "normalization":
            backward += [make_kernel("sum", "reduction", [out], [weight], 0) for weight in weights]
        self._note([forward], backward, [*reads, *also], [out, *masks], saved, again)
        return out

    def masked_softmax(self, scores: Tensor) -> Tensor:
        """Scale, causal mask and softmax in one kernel that reads no scores behind the mask and keeps its result."""
        out = torch.empty_like(scores).requires_grad_()
        nbytes = scores.numel() * scores.element_size()
        forward = Kernel("masked_softmax", "normalization", self.dtype, 0, nbytes // 2, nbytes)
        backward = Kernel("masked_softmax_backward", "normalization_backward", self.dtype, 0, nbytes, nbytes)
        self._note([forward], [backward], [scores], [out], [out], True)
        return out

    def work(self) -> Work:
        """All of it."""

        def nbytes(needed: set[int]) -> int:
            kept = {self._parts.get(key, key) for key in needed} - self._parameters
            return sum(self._storages[key].nbytes() for key in kept)

        selective = (self._saved | self._inputs) - self._remade
        return Work(
            tuple(self._forward),
            tuple(self._backward),
            tuple(self._again),
            nbytes(self._saved),
            nbytes(selective),
            tuple(self._shapes),
        )

    def _note(
        self,
        forward: Sequence[Kernel],
        backward: Sequence[Kernel],
        args: Sequence[Any],
        results: Sequence[Tensor],
        saved: Sequence[Tensor],
        again: bool,
    ) -> None:
        self._forward += forward
        self._backward += backward
        found = {storage_key(t): t.untyped_storage() for t in [*results, *saved]}
        made = found.keys() - self._storages.keys()
        self._storages |= found
        self._saved |= {storage_key(t) for t in saved}
        if again:
            self._again += forward
            self._remade |= made
            self._inputs |= {storage_key(t) for t in args if isinstance(t, Tensor)}
