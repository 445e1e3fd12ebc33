"""What is wrong with a machine, and what would help. Every check is a function of a `Machine`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from autopar.doctor.machine import Machine

LEAST_DISK = 100e6  # bytes: a cache of measurements takes a few MB, and SQLite needs room for its journal
LEAST_SHARED_MEMORY = 256e6  # bytes: Docker's default is 64 MB, which a few batches of a DataLoader fill

Severity = Literal["problem", "advice"]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    severity: Severity  # "problem": something does not work; "advice": it works, slowly or with a surprise
    subject: str  # "torch", "devices", "processes", "memory", "cache", "terminal", "packages"
    what: str  # what is so, and what follows
    help: str  # what would help


Check = Callable[[Machine], Iterator[Finding]]


def findings(machine: Machine, devices: int | None = None) -> list[Finding]:
    """All findings, problems first. `devices`: workers on the CPU that are wanted; None: those of the environment."""
    found = [finding for check in CHECKS for finding in check(machine)] + list(_workers(machine, devices))
    return sorted(found, key=lambda finding: finding.severity != "problem")


def _python(machine: Machine) -> Iterator[Finding]:
    if machine.python_range and not SpecifierSet(machine.python_range).contains(machine.python, prereleases=True):
        yield Finding(
            "problem",
            "python",
            f"Python {machine.python} is not supported",
            f"use Python {machine.python_range}",
        )


def _torch_version(machine: Machine) -> Iterator[Finding]:
    if machine.torch is None:
        help_ = "install PyTorch for this machine: https://pytorch.org/get-started"
        yield Finding("problem", "torch", f"torch cannot be imported: {machine.torch_error}", help_)
        return
    requirement = machine.torch_requirement
    if requirement is None:
        return
    try:
        version = Version(machine.torch.version)
    except InvalidVersion:
        return  # a build of one's own
    # Of a development version only the release counts, as 2.14.0a0 has what 2.13 has.
    if not requirement.specifier.contains(version.base_version):
        yield Finding(
            "problem",
            "torch",
            f"torch {machine.torch.version} is not supported",
            f'pip install "torch{requirement.specifier}"',
        )


def _gpus(machine: Machine) -> Iterator[Finding]:
    torch, environment = machine.torch, machine.environment
    if torch is None:
        return
    if torch.cuda is None and machine.gpu_driver:
        yield Finding(
            "advice",
            "devices",
            "this machine has an NVIDIA driver, but torch is built without CUDA: plans use the CPU",
            "install a build of torch for CUDA: https://pytorch.org/get-started",
        )
    if torch.cuda is not None and torch.n_gpus == 0:
        if environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
            why, help_ = "CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES, unless you want the CPU"
        elif machine.gpu_driver:
            why = "torch sees no GPU, although there is a driver: it may be too old, or the container has no GPU"
            help_ = "run nvidia-smi; start a container with --gpus all; update the driver"
        else:
            why = "there is no NVIDIA driver"
            help_ = "install the driver, or a smaller build of torch for the CPU if there is no GPU"
        yield Finding("advice", "devices", f"torch is built for CUDA {torch.cuda}, but {why}: plans use the CPU", help_)
    if torch.n_gpus > 1 and not torch.nccl:
        yield Finding(
            "problem",
            "processes",
            f"torch sees {torch.n_gpus} GPUs, but is built without NCCL: ranks under torchrun cannot use them",
            "install a build of torch with NCCL; one process with several GPUs works without it",
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "advice",
            "devices",
            "CUDA_LAUNCH_BLOCKING is set: every kernel is waited for, stages do not overlap, measured times are longer",
            "unset it, except to find the operator of an error",
        )


def _workers(machine: Machine, devices: int | None) -> Iterator[Finding]:
    ranks = _whole(machine.environment.get("LOCAL_WORLD_SIZE"))
    workers, whose = (devices, "workers") if devices is not None else (ranks, "ranks of torchrun on this machine")
    has_gpus = machine.torch is not None and machine.torch.n_gpus > 0
    if workers is not None and workers > machine.cores and not has_gpus:
        yield Finding(
            "advice",
            "devices",
            f"{workers} {whose} share {machine.cores} core{'s' * (machine.cores != 1)}: more workers than cores gain "
            "no time",
            f"use at most {machine.cores}",
        )
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cores:
        yield Finding(
            "advice",
            "devices",
            f"the container may use {machine.cpu_quota:g} CPUs at a time, but shows {machine.cores} cores: threads "
            "stop and go, and measured times move",
            f"bind the process to {max(1, math.floor(machine.cpu_quota))} cores: docker run --cpuset-cpus, or taskset",
        )


def _threads(machine: Machine) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = machine.environment.get(name, "")
        counts = text.split(",")  # OpenMP takes one number per nested level
        if text and not all(_positive(count.strip()) for count in counts):
            yield Finding(
                "advice",
                "devices",
                f"{name}={text} is no number of threads: it is ignored, and torch uses all cores",
                f"give a whole number of at least 1, or unset {name}",
            )
    under_torchrun = "TORCHELASTIC_RUN_ID" in machine.environment
    if machine.environment.get("OMP_NUM_THREADS") == "1" and machine.cores > 1 and not under_torchrun:
        yield Finding(
            "advice",
            "devices",
            f"OMP_NUM_THREADS=1: torch outside of autopar computes on one of {machine.cores} cores, the plain model "
            "beside a plan, too. Workers of a plan use their share of the cores. Measurements are kept for each value",
            "unset OMP_NUM_THREADS",
        )


def _memory(machine: Machine) -> Iterator[Finding]:
    if machine.memory_limit is not None and machine.memory is not None and machine.memory_limit < machine.memory:
        gigabytes = machine.memory_limit / 1e9
        yield Finding(
            "advice",
            "memory",
            f"the container may use {gigabytes:.1f} GB of the machine's {machine.memory / 1e9:.1f} GB, which plans for "
            "CPU devices do not know",
            f'give memory_limit="{gigabytes / 2:.3g}GB" for each of two CPU workers',
        )
    if not machine.linux:
        return
    if machine.shared_memory is None or machine.shared_memory < LEAST_SHARED_MEMORY:
        there = (
            "there is no /dev/shm" if machine.shared_memory is None else f"/dev/shm has {_mb(machine.shared_memory)}"
        )
        yield Finding(
            "advice",
            "memory",
            f"{there}: workers of a DataLoader and NCCL exchange tensors there, and die when it is full",
            "start the container with --shm-size=8g or --ipc=host",
        )


def _launcher(machine: Machine) -> Iterator[Finding]:
    """Variables of torchrun. Slurm's need none of these."""
    environment = machine.environment
    rank, world = _whole(environment.get("RANK")), _whole(environment.get("WORLD_SIZE"))
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        there = ", ".join(name for name in needed if environment.get(name))
        yield Finding(
            "problem",
            "processes",
            f"{there} {'are' if ',' in there else 'is'} set, as by torchrun, but not {' and '.join(missing)}: the "
            "ranks cannot find each other",
            "start with torchrun, which sets all of them, or unset those that are left from another job",
        )
    elif world is None or rank is None or rank >= world:
        yield Finding(
            "problem",
            "processes",
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} do not go together",
            "start with torchrun, or give each process a RANK from 0 to WORLD_SIZE - 1",
        )
    elif not _is_port(environment["MASTER_PORT"]):
        yield Finding(
            "problem",
            "processes",
            f"MASTER_PORT={environment['MASTER_PORT']} is no port: the ranks cannot find each other",
            "give the port on which rank 0 listens, from 1 to 65535, the same on all machines",
        )
    local_rank, local_world = (environment.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    whole_rank, whole_world = _whole(local_rank), _whole(local_world)
    wrong = [
        f"{name}={text}"
        for name, text, number in (
            ("LOCAL_RANK", local_rank, whole_rank),
            ("LOCAL_WORLD_SIZE", local_world, whole_world or None),
        )
        if text is not None and number is None
    ]
    if whole_rank is not None and whole_world is not None and not wrong and whole_rank >= whole_world:
        wrong = [f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world}"]
    if wrong:
        yield Finding(
            "problem",
            "processes",
            f"{' and '.join(wrong)} cannot be: each rank's device on its machine is chosen by LOCAL_RANK",
            "start with torchrun, or give the processes of a machine a LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1",
        )


def _network(machine: Machine) -> Iterator[Finding]:
    named = machine.environment.get("GLOO_SOCKET_IFNAME")
    if named:
        absent = [name for name in named.split(",") if name not in (*machine.networks, "lo")]
        if absent:
            there = ", ".join(machine.networks) or "none"
            yield Finding(
                "problem",
                "processes",
                f"GLOO_SOCKET_IFNAME={named}, but no network interface {' or '.join(absent)} is up",
                f"name one of these interfaces: {there}",
            )
    elif len(machine.networks) > 1:
        yield Finding(
            "advice",
            "processes",
            f"there are {len(machine.networks)} networks ({', '.join(machine.networks)}): ranks on several machines "
            "may choose different ones, and wait for each other",
            f"set GLOO_SOCKET_IFNAME={machine.networks[0]} and NCCL_SOCKET_IFNAME, or the one that reaches the others",
        )
    if not machine.host_resolves and not named:
        yield Finding(
            "advice",
            "processes",
            "the machine's own name has no address: process groups over gloo may not start",
            "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    if machine.torch is not None and not machine.torch.gloo:
        yield Finding(
            "problem",
            "processes",
            "torch is built without gloo: torchrun cannot start ranks",
            "install a build of torch with torch.distributed; one process works without it",
        )


def _cache(machine: Machine) -> Iterator[Finding]:
    cache = machine.cache
    if cache is None:
        return
    if not cache.writable:
        yield Finding(
            "advice",
            "cache",
            f"{cache.path} cannot be written: every plan measures all operators again",
            "set AUTOPAR_CACHE_DIR to a directory of yours",
        )
    elif cache.free_bytes < LEAST_DISK:
        yield Finding(
            "advice",
            "cache",
            f"the disk of {cache.path} has {_mb(cache.free_bytes)} left: measurements may be lost",
            "make room, or set AUTOPAR_CACHE_DIR",
        )
    days = machine.environment.get("AUTOPAR_CACHE_DAYS")
    if days and not _is_age(days):
        yield Finding(
            "advice",
            "cache",
            f"AUTOPAR_CACHE_DAYS={days} is no number of days: 30 is used",
            "give a number of at least 0, or inf",
        )


def _terminal(machine: Machine) -> Iterator[Finding]:
    if machine.encoding.lower().replace("-", "") not in ("utf8", "utf8sig"):
        yield Finding(
            "advice",
            "terminal",
            f"stdout writes {machine.encoding or 'an unknown encoding'}: other letters show as escapes or fail",
            "set LANG=C.UTF-8 or PYTHONUTF8=1",
        )


def _packages(machine: Machine) -> Iterator[Finding]:
    """Packages that are always needed and missing; versions that do not fit, of extras, too."""
    for package in machine.packages:
        requirement, version = package.requirement, package.version
        if requirement.name == "torch":
            continue
        if version is None and package.extra is None:
            yield Finding(
                "problem", "packages", f"{requirement.name} is missing", f'pip install "{_bare(requirement)}"'
            )
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            needed = f"autopar[{package.extra}]" if package.extra else "autopar"
            yield Finding(
                "advice" if package.extra else "problem",
                "packages",
                f"{requirement.name} {version} is installed, but {needed} needs {requirement.specifier}",
                f'pip install "{_bare(requirement)}"',
            )


CHECKS: tuple[Check, ...] = (
    _python,
    _torch_version,
    _packages,
    _gpus,
    _threads,
    _memory,
    _launcher,
    _network,
    _cache,
    _terminal,
)


def missing_extras(machine: Machine) -> dict[str, list[str]]:
    """Extras of autopar that lack packages: extra -> names of the packages. Missing extras are no fault."""
    missing = defaultdict(list)
    for package in machine.packages:
        if package.extra is not None and package.version is None:
            missing[package.extra].append(package.requirement.name)
    return dict(missing)


def _bare(requirement: object) -> str:
    return str(requirement).partition(";")[0].strip()


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _positive(text: str) -> bool:
    return bool(_whole(text))


def _is_port(text: str) -> bool:
    return 1 <= (_whole(text) or 0) <= 65535


def _is_age(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f} MB"
