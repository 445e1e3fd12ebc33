"""How many bytes a device has free, and how many an optimizer adds to every parameter."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from cost_models.errors import DeviceError

OPTIMIZER_STATE: dict[str, int] = {
    "none": 0,
    "sgd": 0,
    "momentum": 1,  # the velocity
    "adam": 2,  # the first and second moment
    "adamw": 2,
}
"""Tensors of a parameter's own shape and dtype that an optimizer keeps for it, as torch.optim allocates them."""


OPTIMIZERS = (*OPTIMIZER_STATE, "adafactor")
"""What `optimizer_state_elements` knows."""


def optimizer_state_bytes(optimizer: str, parameter_bytes: int, shape: Sequence[int]) -> int:
    """Bytes of optimizer state for one trained parameter of `shape`, in the parameter's own dtype.

    Counts the state tensors alone, not the step counter (4 bytes a parameter tensor) nor gradients.

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    elements = math.prod(shape)
    return optimizer_state_elements(optimizer, shape) * parameter_bytes // elements if elements else 0


def optimizer_state_elements(optimizer: str, shape: Sequence[int]) -> int:
    """Numbers that an optimizer keeps for one trained parameter of `shape`, the step counter left out.

    Beside the optimizers of `OPTIMIZER_STATE` there is "adafactor": of the second moment of a matrix it keeps the sums
    of rows and columns alone, and of a vector all of it (Shazeer and Stern, Adafactor, 2018, algorithms 4 and 5).

    Raises:
        ValueError: `optimizer` is not a name of `OPTIMIZERS`.
    """
    elements = math.prod(shape)
    if optimizer == "adafactor":
        return elements // shape[-1] + elements // shape[-2] if len(shape) > 1 and elements else elements
    if optimizer not in OPTIMIZER_STATE:
        raise ValueError(f"unknown optimizer {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZER_STATE[optimizer] * elements


def available_memory(torch_device: torch.device) -> int:
    """Bytes that this process can still allocate on a CPU or CUDA device.

    CUDA: what the driver has free plus what PyTorch's allocator holds in its cache, since freed tensors go there and
    not back to the driver.

    Raises:
        DeviceError: the device is neither CPU nor CUDA.
    """
    if torch_device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(torch_device)
        cached = torch.cuda.memory_reserved(torch_device) - torch.cuda.memory_allocated(torch_device)
        return free + cached
    if torch_device.type == "cpu":
        return _available_ram()
    raise DeviceError(f"the memory of {str(torch_device)!r} is unknown; use a cpu or cuda device")


def _available_ram(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable where Linux tells it (it counts reclaimable page cache), else the free pages, else all pages."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
