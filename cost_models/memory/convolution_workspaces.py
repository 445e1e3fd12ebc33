"""What convolutions on a GPU have in memory while they run, beside what they read and return: workspaces of cuDNN.

Which algorithm cuDNN chooses, and what it needs, depends on sizes, GPU and version, and only running it tells. So every
convolution of new sizes runs once, with tensors of its own on the GPU, and the allocator says how much it handed out
besides the result. It runs in a thread of its own, because modes that rehearse a step hold for the thread that asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from cost_models.memory.convolution_copies import BACKWARD, CONVOLUTION, ConvolutionKernel

log = logging.getLogger(__name__)

_BLOCK = 512  # bytes that allocations on a GPU are rounded up to (kMinBlockSize in c10/cuda/CUDACachingAllocator.h)

_known: dict[Any, int] = {}  # bytes by call


def kernels(func: Any, args: tuple[Any, ...], gpu: torch.device) -> list[ConvolutionKernel]:
    """The kernels of a call of `CONVOLUTION` or `BACKWARD` with tensors without values, in order, on a GPU at hand.

    None where torch has no cuDNN.
    """
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
    key = (func, specs, gpu, *_choices())
    if key not in _known:
        try:
            _known[key] = _in_a_thread(lambda: _allocated(func, specs, gpu))
        except torch.OutOfMemoryError:
            log.warning("a convolution of %s does not fit %s: its workspace is not counted", specs[0], gpu)
            _known[key] = 0
    return _known[key]


def _choices() -> tuple[bool, ...]:
    """What the caller lets cuDNN choose from."""
    cudnn = torch.backends.cudnn
    return (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)


def _spec(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def _allocated(func: Any, specs: Sequence[Any], gpu: torch.device) -> int:
    with torch.no_grad():
        args = [_made(spec, gpu) for spec in specs]
        func(*args)  # chooses an algorithm, for which it may try several
        before = _handed_out(gpu)
        results = func(*args)
        after = _handed_out(gpu)
    own = [x for x in (results if func is BACKWARD else [results]) if x is not None]
    return max(0, after - before - sum(-(-x.untyped_storage().nbytes() // _BLOCK) * _BLOCK for x in own))


def _made(spec: Any, gpu: torch.device) -> Any:
    match spec:
        case (tuple(shape), tuple(stride), torch.dtype() as dtype):
            return torch.empty_strided(shape, stride, dtype=dtype, device=gpu)
        case tuple():
            return list(spec)
    return spec


def _handed_out(gpu: torch.device) -> int:
    """Bytes that torch's allocator has handed out since the process began."""
    return cast(int, torch.cuda.memory_stats(gpu)["allocated_bytes.all.allocated"])


def _in_a_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="autopar-workspaces")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
