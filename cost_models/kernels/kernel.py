"""One kernel: its kind, FLOPs and bytes, derived from its arguments.

A kernel reads every argument and writes every result once; the tables name those that touch less. FLOPs come from the
formulas of torch.utils.flop_counter: two per multiplication and addition, of products alone. Those of complex numbers
are four products of real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

ComputeKind = Literal["matmul", "convolution", "convolution_backward", "attention", "attention_backward"]
MemoryKind = (
    Literal["pointwise", "transcendental", "reduction", "normalization", "batch_norm", "pooling", "random"]
    | Literal["transcendental_backward", "normalization_backward", "batch_norm_backward", "pooling_backward"]
)
Kind = ComputeKind | MemoryKind
COMPUTE_KINDS: tuple[ComputeKind, ...] = get_args(ComputeKind)
MEMORY_KINDS: tuple[MemoryKind, ...] = tuple(kind for part in get_args(MemoryKind) for kind in get_args(part))

# Kernels that touch no memory, besides those that torch marks as views.
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("lift_fresh", "sym_size", "sym_numel", "sym_stride"),
}
# The first argument gives a shape only, or is overwritten unread.
_UNREAD = {
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"),
    *("fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"),
}
# They read as many bytes of the first argument as they write.
GATHERING = {
    *("embedding", "index_select", "gather", "index", "masked_select", "take"),
    *("nll_loss_forward", "nll_loss2d_forward"),
}
# The second argument gives a shape only: the kernel fills the gradient with zeros and writes those of the targets
# (torch: aten/src/ATen/native/cuda/NLLLoss2d.cu and Loss.cu).
_SHAPE_SECOND = {"nll_loss_backward", "nll_loss2d_backward"}
# They read and write as many bytes of the first argument as the other arguments have.
SCATTERING = {
    *("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "masked_scatter_"),
}
# The first entry whose text is part of the name decides; else the FLOPs and torch's tag for pointwise operators do.
_KINDS: tuple[tuple[str, Kind], ...] = (
    ("convolution", "convolution"),
    ("embedding", "pointwise"),
    ("softmax", "normalization"),
    ("batch_norm", "batch_norm"),
    ("_norm", "normalization"),
    ("pool", "pooling"),
    *((name, "random") for name in ("bernoulli", "dropout", "rand", "uniform", "normal", "exponential")),
    ("logical", "pointwise"),
    *((name, "transcendental") for name in ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "sin", "cos")),
    # Copies, which torch does not mark as pointwise.
    *((name, "pointwise") for name in ("clone", "copy", "cat", "stack", "pad", "slice_backward", "select_backward")),
    *((name, "pointwise") for name in ("zeros", "ones", "full", "arange", "index", "gather")),
)


ALIGNMENT = 4
"""Bytes: the least that a multiprocessor copies to its own memory without a detour through registers (cp.async of 4, 8
or 16 bytes: NVIDIA, PTX ISA, section 9.7.9.25). Rows of 16-bit numbers start so if their length is even."""


@dataclass(frozen=True)
class Kernel:
    """One call of a kernel."""

    operator: str  # "addmm"
    kind: Kind
    dtype: torch.dtype  # in which it computes: of complex numbers, that of their parts
    flops: int
    read: int  # bytes
    written: int  # bytes
    skipped: float = 0.0  # fraction of the FLOPs that the kernel leaves out: what a causal mask hides
    sizes: tuple[int, ...] = ()  # of a matrix product's result
    aligned: bool = True  # whether the rows of a product's matrices start at multiples of ALIGNMENT bytes
    channels: int = 0  # of a batch norm in training, which adds up each of them
    winograd: bool = False  # a convolution of `small_windows`

    @property
    def nbytes(self) -> int:
        return self.read + self.written


def make_kernel(
    name: str,
    kind: Kind,
    reads: Sequence[torch.Tensor],
    writes: Sequence[torch.Tensor],
    flops: int,
    skipped: float = 0.0,
) -> Kernel:
    """`reads` in the order of the kernel's arguments. `flops`: as if complex numbers were real."""
    read, written = [addressed_bytes(t) for t in reads], sum(addressed_bytes(t) for t in writes)
    if read and name in _UNREAD:
        read[0] = 0
    elif len(read) > 1 and name in _SHAPE_SECOND:
        read[1] = 0
    elif read and name in GATHERING:
        read[0] = min(read[0], written)
    elif len(read) > 1 and name in SCATTERING:
        read[0] = written = min(written, max(read[1:]))
    dtypes = [t.dtype for t in [*reads, *writes]]
    dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), (*dtypes, torch.float32)[0])
    if dtype.is_complex:
        dtype, flops = dtype.to_real(), 4 * flops
    sizes = tuple(writes[0].shape) if kind == "matmul" and writes else ()
    aligned = kind != "matmul" or all(_row_bytes(t) % ALIGNMENT == 0 for t in [*reads, *writes])
    channels = reads[0].shape[1] if kind.startswith("batch_norm") and reads and reads[0].dim() > 1 else 0
    return Kernel(name, kind, dtype, flops, sum(read), written, skipped, sizes, aligned, channels)


def _row_bytes(tensor: torch.Tensor) -> int:
    """From one row of a matrix to the next, or from one column where these lie together; 0 for vectors."""
    strides = [stride for size, stride in zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True) if size > 1]
    return max(strides, default=0) * tensor.element_size() if len(strides) > 1 else 0


def addressed_bytes(tensor: torch.Tensor) -> int:
    """Bytes that are addressed: a broadcast dimension is read again and again, from the cache."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in strides if stride or not size) * tensor.element_size()


def arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Those of a call of an overload by name, without those that have their default."""
    names = (argument.name for argument in function._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def small_windows(given: Mapping[str, Any]) -> bool:
    """Whether a convolution has windows of 3 x 3 that move by one, for which Winograd's algorithm needs fewer products.

    `given`: the arguments of its forward or backward.
    """
    weight = given.get("weight")  # an operator of the user's own may call it otherwise
    same = all(step == 1 for name in ("stride", "dilation") for step in given.get(name, ()))
    square = isinstance(weight, torch.Tensor) and tuple(weight.shape[2:]) == (3, 3)
    return same and square and given.get("groups", 1) == 1


def kind_of(function: Any, name: str, flops: int, given: Mapping[str, Any]) -> Kind:
    """The kind of an overload whose operator has `name`. `given`: its arguments."""
    if flops and "convolution" not in name:
        return "matmul"
    if "batch_norm" in name and (name.endswith("_no_training") or given.get("training") is False):
        return "pointwise"  # batch norm in evaluation has nothing to add up
    kind = next((kind for part, kind in _KINDS if part in name), None)
    if kind is None:
        return "pointwise" if torch.Tag.pointwise in function.tags else "reduction"
    backward = f"{kind}_backward"
    return backward if "_backward" in name and backward in COMPUTE_KINDS + MEMORY_KINDS else kind


# Products in which every row meets one of several matrices, of torch and of transformers: torch has no formula.
_GROUPED = {"_grouped_mm": 1, "grouped_mm_fallback": 1, "grouped_mm_fallback_backward": 2}


def formulas() -> dict[Any, Any]:
    """torch.utils.flop_counter's, by packet of overloads; its own counter shows them, and users add theirs."""
    return FlopCounterMode(display=False).flop_registry


def flops_of(function: Any, args: Any, kwargs: Any, result: Any) -> int:
    """FLOPs of one call of an overload of an operator; 0 where it computes no products."""
    packet = function.overloadpacket
    if products := _GROUPED.get(packet.__name__):
        a, b = args[:2]  # the rows of `a` are grouped, or else the columns of `b`
        return 2 * products * (a.numel() * b.shape[-1] if a.dim() == 2 else b.numel() * a.shape[-2])
    formula = formulas().get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
