"""What convolutions on a CPU have in memory while they run, beside what they read and return.

oneDNN computes on copies in layouts of its own, with channels in blocks. The copies of a kernel live together, until
that of the result has been copied back:

    forward               x' w' y'       then  y' y
    backward of the input g' w' x'       then  x' and the gradient of x; x' twice where windows are strided
    of the weight         g' x' w'       then  w' and the gradient of w

An input of at most three channels is read as it is, and so are tensors with fewer channels than a block. Other
convolutions copy all windows of the input (`columns`), unless a window is a single element. Measured with torch 2.13;
which convolutions oneDNN computes: `use_mkldnn` in aten/src/ATen/native/Convolution.cpp. Scratch memory of threads is
not counted.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten

CONVOLUTION, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default

_ONEDNN_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
_FEW_CHANNELS = 3
_MANY = 16  # samples from which on oneDNN computes windows of single elements on one thread, too
_SMALL = 20480  # elements of a single sample up to which oneDNN does not compute small windows


class ConvolutionKernel(NamedTuple):
    """A kernel, and the bytes that live beside what it reads and returns."""

    result: int  # its number among the results of the operator
    before: int  # bytes, until its result is made
    beside: int  # bytes, while its result is made


def kernels(func: Any, args: tuple[Any, ...], result: Any, threads: int) -> list[ConvolutionKernel]:
    """The kernels of a call of `CONVOLUTION` or `BACKWARD` that returned `result`, in order, on so many threads.

    None where the input is not contiguous: oneDNN reads channels last as they are.
    """
    if func is CONVOLUTION:
        x, weight, _, stride, padding, dilation, transposed, _, groups = args
        y, wanted = result, (True,)
    else:
        y, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = args
    if not x.is_contiguous():
        return []
    windows = max(weight.shape[2:]) > 1 or max(*stride, *dilation) > 1
    if not (_by_onednn(x, weight, groups) and (windows or x.shape[0] >= _MANY or threads > 1)):
        single = not windows and not any(padding)
        columns = 0 if single else math.prod(weight.shape[1:]) * groups * (y.nbytes // weight.shape[0])
        return [ConvolutionKernel(index, 0, columns) for index in (0, 1) if index < len(wanted) and wanted[index]]
    channels = weight.shape[1] * groups
    into, out = (weight.shape[0], channels) if transposed else (channels, weight.shape[0])
    if out < _block() or _FEW_CHANNELS < into < _block():
        return []  # too few channels for a block: read and written as they are
    read, there, made = _in_blocks(x.nbytes, into), _in_blocks(y.nbytes, out), weight.nbytes
    if groups == 1:
        made = _in_blocks(_in_blocks(made, into), out)
    copied = 0 if into <= _FEW_CHANNELS else read
    if func is CONVOLUTION:
        return [ConvolutionKernel(0, copied + made + there, there)]
    twice = 2 if max(stride) > 1 else 1  # from one layout to another, and from there to that of the gradient
    of_input = ConvolutionKernel(0, there + made + read, twice * read)
    of_weight = ConvolutionKernel(1, there + copied + made, made)
    return [kernel for kernel in (of_input, of_weight) if wanted[kernel.result]]


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether oneDNN computes a convolution of this size, unless few threads copy single elements faster."""
    large = groups > 1 or min(weight.shape[2:]) > _FEW_CHANNELS or x.shape[0] > 1 or x.numel() > _SMALL
    return torch.backends.mkldnn.is_available() and x.dtype in _ONEDNN_DTYPES and large


def _in_blocks(nbytes: int, channels: int) -> int:
    """Bytes of a tensor with its channels in blocks."""
    if channels <= _FEW_CHANNELS:
        return nbytes
    return nbytes // channels * (-(-channels // _block()) * _block())


def _block() -> int:
    """Channels in a block."""
    return 16 if "512" in torch.backends.cpu.get_cpu_capability() else 8
