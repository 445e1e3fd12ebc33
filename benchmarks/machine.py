"""What a result depends on besides the code: the machine, the date, versions and thread settings."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

import autopar
from cost_models import parse_devices
from cost_models.hardware.devices import usable_cores

_PACKAGES = ("torch", "transformers", "numpy", "networkx")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")


def machine_header() -> dict[str, str]:
    """Name -> text, in the order to show. The load average tells whether others were at work."""
    processor = parse_devices("cpu")[0].kind.rpartition(",")[0]
    header = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{processor}, {usable_cores()} usable cores",
        "system": platform.platform(),
        "python": platform.python_version(),
        "autopar": autopar.__version__,
    }
    header |= {name: _version(name) for name in _PACKAGES}
    header["torch threads of the caller"] = str(torch.get_num_threads())
    header |= {name: os.environ.get(name, "not set") for name in _THREAD_VARIABLES}
    if hasattr(os, "getloadavg"):
        header["load average (1, 5, 15 min)"] = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return header


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
