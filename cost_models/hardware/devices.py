"""Devices: the workers of a job, parsed from a user's strings; their free memory, threads and synchronization."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cost_models.errors import DeviceError
from cost_models.graphs import storage_key

DEFAULT_CPU_WORKERS = 2  # without a GPU: enough to overlap two stages, and operators still get threads of their own


@dataclass(frozen=True)
class Device:
    """One worker of a job and the hardware it computes on.

    Several workers may share hardware: the cores of the machine, or one GPU. Each has its own name and its own share of
    the memory; `torch_device` is where its tensors live, and is the only thing to hand to `Tensor.to`.
    """

    name: str  # unique in a job: "cpu:0", "cpu:1", "cuda:0", and "cuda:0#1" for the second worker on the same GPU
    torch_device: torch.device
    kind: str  # devices of one kind cost the same and share measurements: "AMD EPYC, 1 thread", "NVIDIA H200"
    memory: int  # bytes free for this worker
    threads: int  # CPU threads for operators within this worker

    @property
    def shares_process_memory(self) -> bool:
        """Whether tensors live in the process's own memory, where every CPU worker can read them."""
        return self.torch_device.type == "cpu"


def parse_devices(
    devices: Sequence[str | torch.device] | str | torch.device | None = None, resident: Iterable[torch.Tensor] = ()
) -> tuple[Device, ...]:
    """The workers that `devices` describes, in order.

        None                    every visible GPU, else one CPU worker a core, at most 2
        "cpu"                   one CPU worker with all cores
        ["cpu", "cpu"]          two CPU workers, "cpu:0" and "cpu:1", that share cores and memory equally
        "cuda:0,cuda:1"         a string is split at commas
        ["cuda:0", "cuda:0"]    two workers on one GPU, "cuda:0" and "cuda:0#1", that share its memory equally

    CPU workers are numbered in order of appearance, whatever index they are written with; "cuda" is the current GPU.
    `resident`: tensors that the job will count itself, such as a model's parameters. Their bytes count as available on
    the devices where they lie now.

    Raises:
        DeviceError: no devices, an unknown or unsupported one, or a GPU that is not present.
    """
    places = _default_places() if devices is None else [_torch_device(entry) for entry in _entries(devices)]
    workers = Counter(places)
    held = _bytes_by_place(resident)
    memory = {place: (available_memory(place) + held[place]) // count for place, count in workers.items()}
    seen: Counter[torch.device] = Counter()
    parsed = []
    for place in places:
        parsed.append(_device(place, index=seen[place], workers=workers[place], memory=memory[place]))
        seen[place] += 1
    return tuple(parsed)


def _bytes_by_place(tensors: Iterable[torch.Tensor]) -> Counter[torch.device]:
    """The bytes of the storages of `tensors`, each counted once, by device."""
    held: Counter[torch.device] = Counter()
    seen: set[int] = set()
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        key = storage_key(tensor)
        if key not in seen:
            seen.add(key)
            held[tensor.device] += tensor.untyped_storage().nbytes()
    return held


def find_device(devices: Sequence[Device], name: str) -> Device:
    """The device called `name`.

    Raises:
        DeviceError: no such device; the message lists the names.
    """
    for device in devices:
        if device.name == name:
            return device
    raise DeviceError(f"{name!r} is not among the devices {', '.join(device.name for device in devices)}")


def gpu_of(name: str) -> str:
    """The GPU of a worker: "cuda:0" for "cuda:0#1". Workers on CPUs and planned devices are named for themselves."""
    return name.partition("#")[0]


def synchronize(*devices: torch.device | Device) -> None:
    """Wait until every CUDA device in `devices` is idle; CPU operators are complete when they return."""
    for device in devices:
        place = device.torch_device if isinstance(device, Device) else device
        if place.type == "cuda":
            torch.cuda.synchronize(place)


@contextmanager
def operator_threads(count: int) -> Iterator[None]:
    """Operators called from this thread use `count` CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def available_memory(torch_device: torch.device) -> int:
    """Bytes that this process can still allocate on a CPU or CUDA device.

    CUDA: what the driver has free plus what PyTorch's allocator holds in its cache, since freed tensors go there and
    not back to the driver. Of these bytes plans use `training_memory.usable_memory`, which leaves room for workspaces
    of libraries and for gaps between blocks.

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
    """MemAvailable where Linux reports it (it counts reclaimable page cache), else the free pages, else all pages."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _device(place: torch.device, index: int, workers: int, memory: int) -> Device:
    """Worker `index` of the `workers` that share `place`, with its share of the memory in bytes."""
    if place.type == "cpu":
        threads = max(1, usable_cores() // workers)
        kind = f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
        return Device(f"cpu:{index}", place, kind, memory, threads)
    name = str(place) if index == 0 else f"{place}#{index}"
    return Device(name, place, torch.cuda.get_device_name(place), memory, threads=1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _default_places() -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * min(usable_cores(), DEFAULT_CPU_WORKERS)


def _entries(devices: Sequence[str | torch.device] | str | torch.device) -> Sequence[str | torch.device]:
    if isinstance(devices, str):
        devices = [entry.strip() for entry in devices.split(",")]
    elif isinstance(devices, torch.device):
        devices = [devices]
    if not isinstance(devices, Sequence):
        raise DeviceError(f'devices is {devices!r}; give a list such as ["cuda:0", "cuda:1"] or ["cpu", "cpu"]')
    if not devices:
        raise DeviceError(
            'the list of devices is empty; name at least one, such as ["cpu"], or give None for the default'
        )
    return devices


def _torch_device(entry: str | torch.device) -> torch.device:
    """Where the tensors of a worker written as `entry` live: "cpu" without an index, or "cuda" with one."""
    if not isinstance(entry, str | torch.device):
        raise DeviceError(
            f'device {entry!r} is of type {type(entry).__name__}; give a string such as "cuda:0" or a torch.device'
        )
    try:
        place = torch.device(entry)
    except RuntimeError as error:
        raise DeviceError(
            f'unknown device {entry!r}; give "cpu", "cuda" or "cuda:<index>", or for devices that are not here a '
            'Cluster, such as Cluster.preset("8xH100")'
        ) from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise DeviceError(
            f'device {str(entry)!r} is of the unsupported type {place.type!r}; give "cpu" or "cuda:<index>"'
        )
    if not torch.cuda.is_available():
        raise DeviceError(f'device {str(entry)!r} is not there: PyTorch sees no CUDA device; give "cpu"')
    index = torch.cuda.current_device() if place.index is None else place.index
    if index >= torch.cuda.device_count():
        visible = ", ".join(f'"cuda:{i}"' for i in range(torch.cuda.device_count()))
        raise DeviceError(f"device {str(entry)!r} is not there; PyTorch sees {visible}")
    return torch.device("cuda", index)


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or its architecture where the system reports no name."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
