"""What measured seconds and compared values depend on besides operators and device: torch's build and settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch

# Whether products of float32 numbers round them first, to TF32 or bfloat16. The older `allow_tf32` is not read because
# it raises an error once a program has set the newer attribute; setting the older one changes the newer.
_FP32_PRECISIONS = (
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
)

# Attributes of torch that choose between kernels.
_SETTINGS = (
    *_FP32_PRECISIONS,
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.mkldnn.enabled",
)

# Read by OpenMP and MKL: how many threads may run, where, and whether they spin between operators.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "KMP_AFFINITY",
              "KMP_BLOCKTIME", "GOMP_CPU_AFFINITY")  # fmt: skip


def torch_environment() -> dict[str, Any]:
    """Torch's version and build, its settings that change which kernels run, and the variables of CPU threads.

    The values are JSON values. The number of threads an operator uses is not among them: measurements set it to
    `Device.threads`, which belongs to the device.
    """
    settings = {name: _setting(name) for name in _SETTINGS}
    settings["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
    return {
        "torch": str(torch.__version__),  # with the build's suffix: "2.11.0+cpu"
        "build": _build(),
        "settings": settings,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


@contextmanager
def float32_settings_kept() -> Iterator[None]:
    """Afterwards, how products of float32 numbers are rounded in this process is set as before.

    That includes settings that follow a more general one, and what torch cannot read any more through its older
    attributes.
    """
    before = {name: _setting(name) for name in _FP32_PRECISIONS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                _set(name, "none")  # follows the more general setting, as most do unless a program says otherwise
                if _setting(name) != value:
                    _set(name, value)


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 numbers keep their precision: no TF32, and no bfloat16 on a CPU. For the whole process.

    Afterwards the settings are as before. Where a program could read torch's older settings before
    (`cudnn.allow_tf32`, as `cudnn.flags` does), it can do so inside, too: torch raises where they differ from the newer
    ones.
    """
    with float32_settings_kept():
        tf32, matmul = _setting("backends.cudnn.allow_tf32"), _older_matmul_precision()
        try:
            if tf32:
                torch.backends.cudnn.allow_tf32 = False
            if matmul is not None:
                torch.set_float32_matmul_precision("highest")
            for name in _FP32_PRECISIONS:
                if _setting(name) is not None:
                    _set(name, "ieee")
            yield
        finally:
            if tf32:
                torch.backends.cudnn.allow_tf32 = True
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)


def _older_matmul_precision() -> str | None:
    """None where torch refuses to read it, because it differs from the newer settings."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@contextmanager
def readable_tf32() -> Iterator[None]:
    """`torch.backends.cudnn.allow_tf32` can be read: it raises once a program has set the newer `fp32_precision`
    otherwise. For what rounds nothing, since other settings may hold meanwhile; afterwards they are as before.

    torch.export turns oneDNN off and then reads `allow_tf32`: where that raises, it traces nothing, and oneDNN stays
    off.
    """
    with float32_settings_kept():
        for precision in (None, "tf32", "none"):
            if precision is not None:
                for name in ("backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision"):
                    _set(name, precision)
            try:
                _ = torch.backends.cudnn.allow_tf32
            except RuntimeError:
                continue
            break
        yield


def _set(name: str, value: str) -> None:
    where, _, last = name.rpartition(".")
    setattr(attrgetter(where)(torch), last, value)


def _setting(name: str) -> Any:
    """The value of an attribute of torch; None where this version of torch has none or refuses to read it."""
    try:
        return attrgetter(name)(torch)
    except (AttributeError, RuntimeError):
        return None


@cache
def _build() -> str:
    """A digest of compilers, libraries and CUDA versions that torch was built with, and of the CPU's vector units."""
    text = f"{torch.__config__.show()} cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
