"""What convolutions on a GPU have in memory while they run, beside what they read and return: workspaces of cuDNN.

Which algorithm cuDNN chooses, and what it needs, depends on sizes, GPU and version, and only running it tells. So every
convolution of new sizes runs once, with tensors of its own on the GPU, and the allocator says how much it was asked for
besides the result. It runs in a thread of its own, because modes that rehearse a step hold for the thread that asks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import torch

from cost_models.measuring.environment import torch_environment
from cost_models.memory.allocations import Convolutions
from cost_models.memory.convolution_copies import BACKWARD, CONVOLUTION, ConvolutionKernel

log = logging.getLogger(__name__)

_known: dict[Any, int] = {}  # bytes by call


def workspaces_on(gpu: torch.device) -> Convolutions:
    """The kernels of convolutions on a GPU at hand, in order. None where torch has no cuDNN."""
    return partial(_kernels, gpu)


def _kernels(gpu: torch.device, func: Any, args: tuple[Any, ...], _: Any) -> list[ConvolutionKernel]:
    if not torch.backends.cudnn.is_available() or not torch.backends.cudnn.enabled:
        return []
    if func is CONVOLUTION:
        return [ConvolutionKernel(0, 0, _workspace(func, args, gpu))]
    *others, wanted = args
    found = []
    for result in (0, 1):  # the gradient of a bias is a sum
        if wanted[result]:
            alone = [place == result for place in range(3)]
            found.append(ConvolutionKernel(result, 0, _workspace(func, (*others, alone), gpu)))
    return found


def _workspace(func: Any, args: tuple[Any, ...], gpu: torch.device) -> int:
    """Bytes that a call allocates besides its results."""
    specs = tuple(_spec(x) for x in args)
    key = (func, specs, gpu, *torch_environment()["settings"].values())
    if key not in _known:
        try:
            with ThreadPoolExecutor(1) as thread:
                _known[key] = thread.submit(_allocated, func, specs, gpu).result()
        except torch.OutOfMemoryError:
            log.warning("a convolution of %s does not fit %s: its workspace is not counted", specs[0], gpu)
            _known[key] = 0
    return _known[key]


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _allocated(func: Any, specs: Sequence[Any], gpu: torch.device) -> int:
    with torch.no_grad():
        args = [_made(spec, gpu) for spec in specs]
        func(*args)  # chooses an algorithm, for which it may try several
        before = _asked_for(gpu)
        results = func(*args)
        after = _asked_for(gpu)
    own = [x for x in (results if func is BACKWARD else [results]) if x is not None]
    return after - before - sum(x.untyped_storage().nbytes() for x in own)


def _made(spec: Any, gpu: torch.device) -> Any:
    match spec:
        case (tuple(shape), tuple(stride), torch.dtype() as dtype):
            return torch.empty_strided(shape, stride, dtype=dtype, device=gpu)
        case tuple():
            return list(spec)
    return spec


def _asked_for(gpu: torch.device) -> int:
    """Bytes that torch's allocator was asked for since the process began."""
    return cast(int, torch.cuda.memory_stats(gpu)["requested_bytes.all.allocated"])
