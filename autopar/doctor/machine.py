"""The facts that `autopar doctor` judges, read from the process, the operating system and the installed packages."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
NETWORKS = Path("/sys/class/net")


@dataclass(frozen=True)
class Torch:
    """What torch says of itself."""

    version: str  # with the build's suffix: "2.13.0+cpu"
    cuda: str | None  # version of CUDA that it is built for; None: built without
    n_gpus: int = 0  # that it sees
    nccl: bool = False
    gloo: bool = True


@dataclass(frozen=True)
class CacheFolder:
    """The directory that keeps measurements and predicted steps."""

    path: str
    writable: bool
    free_bytes: int  # on its disk
    n_bytes: int = 0  # of its files
    n_measurements: int | None = None  # None: there is no file, or it cannot be read


@dataclass(frozen=True)
class Package:
    """An installed or missing package that autopar names."""

    requirement: Requirement
    extra: str | None  # of autopar, that installs it; None: always installed
    version: str | None  # None: not installed


@dataclass(frozen=True)
class Machine:
    """What `checks` judges. Tests make one with any values."""

    python: str  # version
    python_range: str  # that the installed autopar supports, such as ">=3.11"; "": unknown
    torch: Torch | None  # None: it cannot be imported
    torch_error: str = ""  # why not
    packages: tuple[Package, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1  # that this process may run on
    cpu_quota: float | None = None  # CPUs that a container may use at a time; None: all
    memory: int | None = None  # bytes of the machine; None: unknown
    memory_limit: int | None = None  # bytes that a container may use; None: all
    shared_memory: int | None = None  # bytes of /dev/shm; None: there is none
    gpu_driver: bool = False  # whether the system has an NVIDIA driver
    networks: tuple[str, ...] = ()  # names of interfaces that are up, the loopback and virtual bridges left out
    host_resolves: bool = True  # whether the machine's own name has an address
    cache: CacheFolder | None = None
    encoding: str = "utf-8"  # of stdout
    linux: bool = True

    @property
    def torch_requirement(self) -> Requirement | None:
        """What the installed autopar needs of torch; None: unknown."""
        return next((p.requirement for p in self.packages if p.requirement.name == "torch"), None)


def this_machine() -> Machine:
    """The facts of this process and machine. Imports torch, and raises nothing."""
    found, error = _torch()
    return Machine(
        python=platform.python_version(),
        python_range=_python_range(),
        torch=found,
        torch_error=error,
        packages=_packages(),
        environment=dict(os.environ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=_cpu_quota(),
        memory=_memory(),
        memory_limit=_number(CGROUP / "memory.max"),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        gpu_driver=Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None,
        networks=_networks(),
        host_resolves=_host_resolves(),
        cache=_cache(),
        encoding=sys.stdout.encoding or "",
        linux=sys.platform.startswith("linux"),
    )


def _torch() -> tuple[Torch | None, str]:
    try:
        torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
        there = distributed.is_available()
        return Torch(
            str(torch.__version__),
            torch.version.cuda,
            torch.cuda.device_count() if torch.cuda.is_available() else 0,
            there and distributed.is_nccl_available(),
            there and distributed.is_gloo_available(),
        ), ""
    except Exception as error:  # a broken installation raises anything: ImportError, OSError, RuntimeError
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _python_range() -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return str(metadata.metadata("autopar").json.get("requires_python", ""))
    return ""


def _packages() -> tuple[Package, ...]:
    """Every package that autopar's metadata names; none where autopar is not installed, but runs from a folder."""
    try:
        lines, own = metadata.requires("autopar") or [], metadata.metadata("autopar")
    except metadata.PackageNotFoundError:
        return ()
    found, extras = [], own.get_all("Provides-Extra") or []
    for requirement in map(Requirement, lines):
        extra = next((e for e in extras if requirement.marker and requirement.marker.evaluate({"extra": e})), None)
        found.append(Package(requirement, extra, _version(requirement.name)))
    return tuple(found)


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _cpu_quota() -> float | None:
    """CPUs of the control group: `cpu.max` holds "max 100000" or microseconds in a period of microseconds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        quota, period = (CGROUP / "cpu.max").read_text().split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    return None


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _networks() -> tuple[str, ...]:
    """Interfaces with hardware behind them that are up; without /sys, all but the loopback."""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not NETWORKS.is_dir():
        return tuple(names)
    up = []
    for name in names:
        with contextlib.suppress(OSError):
            state = (NETWORKS / name / "operstate").read_text().strip()
            if state in ("up", "unknown") and not (NETWORKS / name / "bridge").exists():
                up.append(name)
    return tuple(up)


def _host_resolves() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _cache() -> CacheFolder | None:
    try:
        cache = importlib.import_module("cost_models.measuring.cache")
    except Exception:  # as torch, which it imports
        return None
    folder: Path = cache.cache_directory()
    try:
        there = folder if folder.exists() else next(parent for parent in folder.absolute().parents if parent.exists())
        return CacheFolder(
            str(folder),
            writable=there.is_dir() and os.access(there, os.W_OK | os.X_OK),
            free_bytes=shutil.disk_usage(there).free,
            n_bytes=sum(map(_size, folder.rglob("*"))) if folder.is_dir() else 0,
            n_measurements=_count(cache.default_cache_path()),
        )
    except OSError:  # a folder above it that may not be entered, a name that is too long, a disk that is gone
        return CacheFolder(str(folder), writable=False, free_bytes=0, n_bytes=0, n_measurements=None)


def _size(path: Path) -> int:
    """Bytes of a file; 0 for what is no file, or has been deleted since it was listed."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _count(file: Path) -> int | None:
    if not file.is_file():
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM measurements").fetchone()[0])
    except sqlite3.Error:
        return None
