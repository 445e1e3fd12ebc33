"""What convolutions on a CPU have in memory while they run, beside what they read and return.

oneDNN computes on copies in layouts of its own, with channels in blocks: of 16 with AVX-512, of 8 with AVX2. The copies
of a kernel live together, until that of the result has been copied back:

    forward               x' w' y'       then  y' y
    backward of the input g' w' x'       then  x' and the gradient of x
    of the weight         g' x' w'       then  w' and the gradient of w

A transposed convolution is one whose forward and backward of the input have changed places.

Exceptions, but for windows of single elements:

    few channels   in the forward, inputs of fewer channels than a block are read as they are; in the backward of the
                   weight, inputs of at most three; of four and more, AVX-512 has blocks of 8 there
    strided        the backward of the input has channels last instead of blocks, and copies its result twice; groups
                   only if each has more channels than a block
    groups         no blocks are filled up. Groups that are no multiples of blocks of 4 (AVX2: of 8) have no copies but
                   the result's; in the backward of the weight, of 8
    each channel   its backward of the weight copies the weight only, except windows of three, and of single elements
    alone          that are not strided
    half           with AMX, channels last instead of blocks, and the result is copied twice

Other convolutions copy all windows of the input (`columns`), unless a window is a single element; groups are computed
one after the other and then joined. Measured with torch 2.13 on processors of both kinds; which convolutions oneDNN
computes: `use_mkldnn` in aten/src/ATen/native/Convolution.cpp. Scratch memory of threads is not counted.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten

CONVOLUTION, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default

_FEW_CHANNELS = 3
_BLOCK_OF_AVX2, _BLOCK_OF_AVX512 = 8, 16
_MANY = 16  # samples from which on oneDNN computes windows of single elements on one thread, too
_SMALL = 20480  # elements of a single sample up to which oneDNN does not compute small windows


class ConvolutionKernel(NamedTuple):
    """A kernel, and the bytes that live beside what it reads and returns."""

    result: int  # its number among the results of the operator
    before: int  # bytes, until its result is made
    beside: int  # bytes, while its result is made


def kernels(func: Any, args: tuple[Any, ...], result: Any, threads: int) -> list[ConvolutionKernel]:
    """The kernels of a call of `CONVOLUTION` or `BACKWARD` that returned `result`, in order, on `threads` threads.

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
        columns = 0 if single else math.prod(weight.shape[1:]) * (y.nbytes // weight.shape[0])
        if groups == 1:
            return [ConvolutionKernel(index, 0, columns) for index in (0, 1) if index < len(wanted) and wanted[index]]
        # One group after the other, with a copy of what it reads; then their results are joined.
        if func is CONVOLUTION:
            return [ConvolutionKernel(0, x.nbytes // groups + columns + y.nbytes, y.nbytes)]
        made = [index for index in (0, 1) if wanted[index]]
        results = sum((x, weight)[index].nbytes for index in made)
        before = (x.nbytes + y.nbytes) // groups + columns + results  # of the first one; all are joined at the end
        return [ConvolutionKernel(index, before if index == made[0] else results, results) for index in made]
    if transposed:
        x, y = y, x
    passes = _Blocked(x, y, weight, groups, max(stride) > 1)
    forward, of_input = passes.forward(), passes.of_input()
    if transposed:
        forward, of_input = of_input, forward
    if func is CONVOLUTION:
        return [ConvolutionKernel(0, *forward)]
    return [
        ConvolutionKernel(number, *copies)
        for number, copies in enumerate((of_input, passes.of_weight()))
        if wanted[number]
    ]


class _Copies(NamedTuple):
    """Bytes of copies in one pass."""

    before: int  # until the result is made
    beside: int  # while the result is made


class _Blocked(NamedTuple):
    """A convolution that oneDNN computes."""

    x: torch.Tensor
    y: torch.Tensor  # its result, or the gradient of that
    weight: torch.Tensor
    groups: int
    strided: bool

    @property
    def into(self) -> int:
        """Channels of x."""
        return self.weight.shape[1] * self.groups

    @property
    def out(self) -> int:
        """Channels of y."""
        return self.weight.shape[0]

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.into == self.out

    @property
    def grouped(self) -> bool:
        """In groups of several channels."""
        return self.groups > 1 and not self.depthwise

    def fills(self, block: int) -> bool:
        """Whether the channels of each group fill whole blocks of this size."""
        return all(count // self.groups % block == 0 for count in (self.into, self.out))

    @property
    def _alone_in_blocks(self) -> bool:
        """Whether the backward of the weight of each channel alone is computed in blocks."""
        return self.window == 3 or (self.window == 1 and not self.strided)

    @property
    def window(self) -> int:
        return max(self.weight.shape[2:])

    @property
    def half(self) -> bool:
        """In half precision on AMX."""
        return self.x.dtype != torch.float32 and _amx()

    def forward(self) -> _Copies:
        if self.half:
            return _Copies(self.x.nbytes + self.weight.nbytes + self.y.nbytes, 2 * self.y.nbytes)
        if self.grouped and not self.fills(_least_of_groups()):
            return _Copies(self.y.nbytes, self.y.nbytes)
        made = self._in_blocks(self.y, self.out)
        read_as_it_is = self.into < _block() and self.groups == 1 and self.window > 1
        return _Copies(self._input(read_as_it_is) + made, made)

    def of_input(self) -> _Copies:
        """The backward of the input."""
        if self.half:
            return _Copies(self.y.nbytes + self.weight.nbytes + self.x.nbytes, 2 * self.x.nbytes)
        if self.strided and (self.groups == 1 or self.out // self.groups > _block()):  # channels last
            return _Copies(self.y.nbytes + self._weight(self.into) + self.x.nbytes, 2 * self.x.nbytes)
        if self.grouped and not self.fills(_least_of_groups()):
            return _Copies(self.x.nbytes, self.x.nbytes)
        made = self._in_blocks(self.x, self.into)
        return _Copies(self._in_blocks(self.y, self.out) + self._weight(self.out, self.into) + made, made)

    def of_weight(self) -> _Copies:
        """The backward of the weight."""
        if self.half:
            return _Copies(self.y.nbytes + self.x.nbytes + self.weight.nbytes, self.weight.nbytes)
        blocked = self.groups == 1 or (self.fills(_BLOCK_OF_AVX2) if self.grouped else self._alone_in_blocks)
        if not blocked:
            return _Copies(self.weight.nbytes, self.weight.nbytes)
        windows = self.window > 1 and self.groups == 1
        read_as_it_is = self.into <= _FEW_CHANNELS and windows
        # Kernels of AVX-512 take no fewer channels, those of AVX2 do.
        block = _BLOCK_OF_AVX2 if windows and _FEW_CHANNELS < self.into < _block() else _block()
        made = self._weight(self.out, *(() if read_as_it_is else (self.into,)), block=block)
        return _Copies(self._in_blocks(self.y, self.out, block=block) + self._input(read_as_it_is, block=block), made)

    def _input(self, read_as_it_is: bool, block: int | None = None) -> int:
        """Bytes of the copies of the input and the weight."""
        if read_as_it_is:
            return self._weight(self.out, block=block)
        return self._in_blocks(self.x, self.into, block=block) + self._weight(self.out, self.into, block=block)

    def _weight(self, *channels: int, block: int | None = None) -> int:
        """Bytes of the copied weight, with these numbers of its channels in blocks."""
        return self._in_blocks(self.weight, *(channels[:1] if self.depthwise else channels), block=block)

    def _in_blocks(self, tensor: torch.Tensor, *channels: int, block: int | None = None) -> int:
        """Bytes of a tensor with these numbers of channels in blocks; groups fill theirs."""
        block, nbytes = block or _block(), tensor.nbytes
        for count in () if self.grouped else channels:
            nbytes = nbytes // count * (-(-count // block) * block)
        return nbytes


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether oneDNN computes a convolution of this size, unless few threads copy single elements faster."""
    large = groups > 1 or min(weight.shape[2:]) > _FEW_CHANNELS or x.shape[0] > 1 or x.numel() > _SMALL
    return torch.backends.mkldnn.is_available() and x.dtype in _onednn_dtypes() and large


@cache
def _onednn_dtypes() -> frozenset[torch.dtype]:
    """Dtypes of convolutions that oneDNN computes on this processor."""
    # torch has no public question for these two.
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported(), torch.ops.mkldnn._is_mkldnn_fp16_supported()
    half = (
        dtype for dtype, is_supported in zip((torch.bfloat16, torch.float16), supported, strict=True) if is_supported
    )
    return frozenset({torch.float32, *half})


def _avx2() -> bool:
    """Whether oneDNN has its kernels for AVX2, not those for AVX-512."""
    return "512" not in torch.backends.cpu.get_cpu_capability()


def _amx() -> bool:
    """Whether oneDNN has its kernels for AMX."""
    return bool(torch.cpu._is_amx_tile_supported())  # torch has no public question before torch 2.13


def _block() -> int:
    """Channels in a block."""
    return _BLOCK_OF_AVX2 if _avx2() else _BLOCK_OF_AVX512


def _least_of_groups() -> int:
    """Channels in the smallest blocks that groups may have in the forward and in the backward of the input."""
    return _BLOCK_OF_AVX2 if _avx2() else 4
