"""Operators that have one kernel on a device, and that torch decomposes into many on the meta device.

What lies in memory differs: attention in one kernel never has its scores there, and a dropout on a GPU keeps one byte
an element. Code that runs a graph on meta tensors to learn what a device would hold runs it under `DeviceKernels`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

_ATTENTION = (torch.ops.aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention)
_RMS_NORM = (torch.ops.aten.rms_norm.default, torch.rms_norm, functional.rms_norm)
_DROPOUT = (torch.ops.aten.dropout.default, torch.dropout, functional.dropout)


class _Pretended(threading.local):
    device_type = ""


_pretended = _Pretended()


def device_type_of(tensor: torch.Tensor) -> str:
    """Of the device of `tensor`; inside `DeviceKernels`, a meta tensor is on the device that the code is run for."""
    own: str = tensor.device.type
    return _pretended.device_type or own if own == "meta" else own


class DeviceKernels(TorchFunctionMode):
    """Inside, attention and dropout of meta tensors save and allocate what they do on a device of `device_type`, and
    new tensors are meta tensors, whatever device their call names."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        substitutes: dict[Any, Callable[..., torch.Tensor | None]] = {}
        if device_type == "cpu":
            substitutes = dict.fromkeys(_ATTENTION, _attention_on_cpu)
        elif device_type == "cuda":
            substitutes = dict.fromkeys(_ATTENTION, _attention_on_gpu) | dict.fromkeys(_DROPOUT, _dropout_on_gpu)
            substitutes |= dict.fromkeys(_RMS_NORM, _rms_norm_on_gpu)
        self._substitutes = substitutes
        self._device_type, self._before = device_type, list[str]()

    def __enter__(self) -> DeviceKernels:
        self._before.append(_pretended.device_type)
        _pretended.device_type = self._device_type
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _pretended.device_type = self._before.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_aggregate((args, kwargs or {}), _meta_if_device)
        substitute = self._substitutes.get(func)
        result = None if substitute is None else substitute(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """In one kernel, if torch would choose that; else None.

    torch's own choice needs CPU tensors: they get these sizes and the memory of one row.
    """
    choice = torch._fused_sdp_choice(  # there is no public one
        _flat(query),
        _flat(key),
        _flat(value),
        attn_mask=None if attn_mask is None else _flat(attn_mask),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return None
    return _in_one_kernel(query, key, value, attn_mask)


def _attention_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """In one kernel; by products and a softmax where GPUs have none."""
    if not one_kernel_attention(query, key, attn_mask):
        return _by_products(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _in_one_kernel(query, key, value, attn_mask)


def one_kernel_attention(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether GPUs have a kernel for attention: not for a mask that requires a gradient, other than four dimensions,
    double precision, and groups of heads with a mask or in single precision (torch.nn.attention.SDPBackend)."""
    if query.dim() != 4 or query.dtype == torch.float64 or (mask is not None and mask.requires_grad):
        return False
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.shape[1] == key.shape[1] or (mask is None and half)


def _by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """With a dropout of the scores that keeps one byte a score, as on a GPU; None where nothing is dropped, or all.

    The dropout inside of torch's own attention is out of the reach of functions in Python. The rest is done as there
    (torch: aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math).
    """
    if not 0 < dropout < 1:
        return None
    dtype, groups = query.dtype, query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if dtype in (torch.float16, torch.bfloat16):  # sums are in float32
        query, key, value = query.float(), key.float(), value.float()
    if groups > 1:
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    scores = query * factor @ (key.transpose(-2, -1) * factor)
    if mask is not None:
        scores += torch.where(mask, 0.0, float("-inf")) if mask.dtype == torch.bool else mask
    kept: torch.Tensor = torch.native_dropout(torch.softmax(scores, -1), dropout, True)[0]
    return (kept @ value).to(dtype)


def _dropout_on_gpu(
    input: torch.Tensor, p: float = 0.5, train: bool = True, inplace: bool = False, *, training: bool | None = None
) -> torch.Tensor | None:
    """The kernel that keeps its mask as booleans; None where nothing is dropped, or all, or in place."""
    if inplace or not (train if training is None else training) or not 0 < p < 1:
        return None
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def one_kernel_norms(input: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether GPUs have a kernel for rms_norm: for a weight of the same dtype (torch: aten/src/ATen/native/
    layer_norm.cpp, rms_norm)."""
    return input.is_floating_point() and (weight is None or weight.dtype == input.dtype)


def _rms_norm_on_gpu(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    """In one kernel; None where GPUs have none."""
    if not one_kernel_norms(input, weight):
        return None
    normed: torch.Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))
    return normed


class _RMSNorm(torch.autograd.Function):
    """The memory of rms_norm in one kernel: keeps its arguments and a number for every row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[: input.dim() - dims], dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    if mask is not None and mask.dtype == torch.bool:  # kernels add the mask to the scores
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    attended: torch.Tensor = _Attention.apply(query, key, value, mask)
    return attended


class _Attention(torch.autograd.Function):
    """The memory of attention in one kernel: keeps its arguments, its result and a number for every row of scores
    (Dao et al., FlashAttention, 2022, algorithm 2). The values are never read."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
        sums = query.new_empty((batch, heads, length), dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        arguments = ctx.saved_tensors[:3]
        return *(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in arguments), None


def _meta_if_device(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same sizes and last stride in the memory of one row."""
    size, stride = (tensor.shape[-1], tensor.stride(-1)) if tensor.dim() else (1, 1)
    row = torch.empty(max(size * stride, 1), dtype=tensor.dtype, device="cpu")
    strides = [0] * (tensor.dim() - 1) + [stride] * (tensor.dim() > 0)
    return row.as_strided(tensor.shape, strides).detach().requires_grad_(tensor.requires_grad)
