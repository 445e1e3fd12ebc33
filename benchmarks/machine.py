"""What a result depends on besides the code: the machine, the date, versions and thread settings."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

import autopar
from cost_models import parse_devices
from cost_models.hardware.devices import usable_cores

_PACKAGES = ("torch", "transformers", "numpy", "networkx")
CHANGING = ("date", "load average (1, 5, 15 min)")  # what differs from minute to minute on one machine
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")


def machine_header() -> dict[str, str]:
    """Name -> text, in the order to show. The load average tells whether others were at work."""
    processor = parse_devices("cpu")[0].kind.rpartition(",")[0]
    header = {
        CHANGING[0]: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{processor}, {usable_cores()} usable cores",
        "system": platform.platform(),
        "python": platform.python_version(),
        "autopar": autopar.__version__,
    }
    header |= gpu_header()
    header |= {name: _version(name) for name in _PACKAGES}
    header["torch threads of the caller"] = str(torch.get_num_threads())
    header |= {name: os.environ.get(name, "not set") for name in _THREAD_VARIABLES}
    if hasattr(os, "getloadavg"):
        header[CHANGING[1]] = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return header


def gpu_header() -> dict[str, str]:
    """The GPUs that PyTorch sees, their driver, and the CUDA version that PyTorch was built for; empty without one."""
    if not torch.cuda.is_available():
        return {}
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    shown = Counter(f"{card.name}, {card.total_memory / 2**30:.0f} GiB" for card in cards)
    header = {"GPUs": "; ".join(f"{count} x {card}" for card, count in shown.items())}
    return header | {"GPU driver": _driver(), "CUDA of torch": str(torch.version.cuda)}


def _driver() -> str:
    """As nvidia-smi has it."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ", ".join(dict.fromkeys(answer.stdout.split())) or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
