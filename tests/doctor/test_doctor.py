"""`autopar doctor`: every misconfiguration is found in a simulated machine, and nothing in a sound one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from autopar import DeviceError
from autopar.cli import app
from autopar.doctor import command, machine
from autopar.doctor.checks import findings, missing_extras
from autopar.doctor.links import DeviceFact, LinkFact
from autopar.doctor.machine import CacheFolder, Machine, Package, Torch, this_machine

TORCH = Package(Requirement("torch>=2.11"), None, "2.13.0")
SOUND = Machine(
    python="3.12.1",
    python_range=">=3.11",
    torch=Torch("2.13.0+cu128", "12.8", n_gpus=2, nccl=True),
    packages=(TORCH, Package(Requirement("rich>=13.7"), None, "15.0.0")),
    environment={"HOME": "/home/someone"},
    cores=8,
    memory=64 * 10**9,
    shared_memory=8 * 10**9,
    gpu_driver=True,
    networks=("eth0",),
    cache=CacheFolder("/home/someone/.cache/autopar", True, 10**11),
)
ON_CPU = replace(SOUND, torch=Torch("2.13.0+cpu", None), gpu_driver=False)
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("sound", [SOUND, ON_CPU, replace(SOUND, environment=TORCHRUN), replace(SOUND, packages=())])
def test_nothing_is_found_in_a_sound_machine(sound: Machine) -> None:
    assert findings(sound) == []


def with_variables(sound: Machine = SOUND, **variables: str) -> Machine:
    return replace(sound, environment={**sound.environment, **variables})


PROBLEMS = [
    (replace(SOUND, python="3.9.2"), "Python 3.9.2 is not supported", ">=3.11"),
    (replace(SOUND, torch=None, torch_error="ImportError: libcudart.so.12"), "libcudart.so.12", "install PyTorch"),
    (
        replace(SOUND, torch=Torch("2.10.1+cu126", "12.6", 1, True)),
        "torch 2.10.1+cu126 is not",
        'install "torch>=2.11"',
    ),
    (replace(SOUND, packages=(TORCH, Package(Requirement("rich>=13.7"), None, None))), "rich is missing", "rich>=13.7"),
    (
        replace(SOUND, packages=(TORCH, Package(Requirement("rich>=13.7"), None, "12.0"))),
        "rich 12.0 is installed, but autopar needs >=13.7",
        'pip install "rich>=13.7"',
    ),
    (replace(SOUND, torch=replace(SOUND.torch, nccl=False)), "without NCCL", "a build of torch with NCCL"),
    (replace(ON_CPU, torch=Torch("2.13.0", None, gloo=False)), "without gloo", "torch.distributed"),
    (with_variables(RANK="0", WORLD_SIZE="2"), "RANK, WORLD_SIZE are set", "start with torchrun"),
    (with_variables(RANK="0", WORLD_SIZE="2"), "but not MASTER_ADDR and MASTER_PORT", "start with torchrun"),
    (with_variables(**{**TORCHRUN, "RANK": ""}), "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set", "start with torchrun"),
    (with_variables(**{**TORCHRUN, "RANK": "2"}), "RANK=2 and WORLD_SIZE=2 do not go together", "from 0 to"),
    (with_variables(**{**TORCHRUN, "RANK": "x"}), "RANK=x and WORLD_SIZE=2 do not go together", "from 0 to"),
    (with_variables(**{**TORCHRUN, "MASTER_PORT": "first:29500"}), "MASTER_PORT=first:29500 is no port", "1 to 65535"),
    (with_variables(**{**TORCHRUN, "MASTER_PORT": "70000"}), "MASTER_PORT=70000 is no port", "1 to 65535"),
    (with_variables(**{**TORCHRUN, "LOCAL_WORLD_SIZE": "two"}), "LOCAL_WORLD_SIZE=two cannot be", "from 0 to"),
    (with_variables(**{**TORCHRUN, "LOCAL_RANK": "2"}), "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2 cannot be", "from 0 to"),
    (with_variables(GLOO_SOCKET_IFNAME="eth1"), "no network interface eth1 is up", "these interfaces: eth0"),
]

ADVICE = [
    (
        replace(ON_CPU, gpu_driver=True),
        "has an NVIDIA driver, but torch is built without CUDA",
        "build of torch for CUDA",
    ),
    (
        replace(SOUND, torch=Torch("2.13.0", "12.8"), gpu_driver=False),
        "there is no NVIDIA driver",
        "install the driver",
    ),
    (replace(SOUND, torch=Torch("2.13.0", "12.8")), "although there is a driver", "nvidia-smi"),
    (
        with_variables(replace(SOUND, torch=Torch("2.13.0", "12.8")), CUDA_VISIBLE_DEVICES=""),
        "CUDA_VISIBLE_DEVICES hides all GPUs",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (with_variables(CUDA_LAUNCH_BLOCKING="1"), "every kernel is waited for", "unset it"),
    (with_variables(OMP_NUM_THREADS="abc"), "OMP_NUM_THREADS=abc is no number of threads", "unset OMP_NUM_THREADS"),
    (with_variables(MKL_NUM_THREADS="0"), "MKL_NUM_THREADS=0 is no number of threads", "unset MKL_NUM_THREADS"),
    (with_variables(OMP_NUM_THREADS="1"), "computes on one of 8 cores", "unset OMP_NUM_THREADS"),
    (with_variables(ON_CPU, **{**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}), "16 ranks of torchrun", "use at most 8"),
    (replace(SOUND, cpu_quota=2.5), "2.5 CPUs at a time, but shows 8 cores", "to 2 cores"),
    (replace(SOUND, memory_limit=8 * 10**9), "8.0 GB of the machine's 64.0 GB", 'memory_limit="4GB"'),
    (replace(SOUND, shared_memory=64 * 2**20), "/dev/shm has 67 MB", "--shm-size"),
    (replace(SOUND, shared_memory=None), "there is no /dev/shm", "--ipc=host"),
    (replace(SOUND, networks=("eth0", "ib0")), "2 networks (eth0, ib0)", "GLOO_SOCKET_IFNAME=eth0"),
    (replace(SOUND, host_resolves=False), "own name has no address", "/etc/hosts"),
    (replace(SOUND, cache=CacheFolder("/cache", False, 10**11)), "/cache cannot be written", "AUTOPAR_CACHE_DIR"),
    (replace(SOUND, cache=CacheFolder("/cache", True, 10**6)), "has 1 MB left", "make room"),
    (with_variables(AUTOPAR_CACHE_DAYS="a week"), "AUTOPAR_CACHE_DAYS=a week is no number", "or inf"),
    (replace(SOUND, encoding="ANSI_X3.4-1968"), "stdout writes ANSI_X3.4-1968", "PYTHONUTF8=1"),
    (
        replace(SOUND, packages=(TORCH, Package(Requirement("lightning>=2.4"), "integrations", "2.1"))),
        "lightning 2.1 is installed, but autopar[integrations] needs >=2.4",
        'pip install "lightning>=2.4"',
    ),
]


@pytest.mark.parametrize(
    ("severity", "there", "what", "helps"),
    [("problem", *case) for case in PROBLEMS] + [("advice", *case) for case in ADVICE],
)
def test_a_misconfiguration_is_named_with_what_helps(severity: str, there: Machine, what: str, helps: str) -> None:
    (found,) = findings(there)
    assert found.severity == severity
    assert what in found.what
    assert helps in found.help


def test_fewer_cores_than_workers() -> None:
    assert findings(ON_CPU, devices=8) == []
    (found,) = findings(ON_CPU, devices=9)
    assert "9 workers share 8 cores" in found.what
    assert findings(SOUND, devices=9) == [], "GPUs need no core each"


def test_one_thread_is_what_torchrun_means() -> None:
    assert findings(with_variables(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="none", **TORCHRUN)) == []


@pytest.mark.parametrize("version", ["2.11.0", "2.14.0a0+git123", "2.13.0.dev20261101+cpu", "my build"])
def test_torch_of_a_supported_version_is_no_fault(version: str) -> None:
    assert findings(replace(ON_CPU, torch=Torch(version, None))) == []


def test_several_networks_are_no_fault_once_one_is_named() -> None:
    assert findings(with_variables(replace(SOUND, networks=("eth0", "ib0")), GLOO_SOCKET_IFNAME="ib0")) == []


def test_problems_come_first_and_decide_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    ill = with_variables(replace(SOUND, networks=("eth0", "ib0")), RANK="0")
    assert [one.severity for one in findings(ill)] == ["problem", "advice"]
    monkeypatch.setattr(command, "devices_and_links", lambda devices: ([], []))
    for there, status in ((ill, 1), (replace(SOUND, networks=("eth0", "ib0")), 0), (SOUND, 0)):
        monkeypatch.setattr(command, "this_machine", lambda there=there: there)
        assert CliRunner().invoke(app, ["doctor"]).exit_code == status


def test_the_text_has_versions_devices_links_cache_and_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Package(Requirement('transformers>=4.57; extra == "demo"'), "demo", None)
    there = replace(SOUND, packages=(*SOUND.packages, demo), cache=CacheFolder("/cache", True, 10**11, 2 * 10**6, 17))
    monkeypatch.setattr(command, "this_machine", lambda: there)
    devices = [DeviceFact("cuda:0", "NVIDIA H100", 79 * 10**9), DeviceFact("cuda:1", "NVIDIA H100", 79 * 10**9)]
    links = [LinkFact("cuda:0", "cuda:1", 9e-6, 3.5e11), LinkFact("cuda:1", "cuda:0", 9e-6, None)]
    monkeypatch.setattr(command, "devices_and_links", lambda devices_: (devices, links))
    text = CliRunner().invoke(app, ["doctor"]).stdout
    for part in (
        "torch 2.13.0+cu128 (supported: >=2.11)",
        "cuda:1: NVIDIA H100, 79.0 GB free",
        "cuda:0 -> cuda:1: 9 us, 350 GB/s",
        "cuda:1 -> cuda:0: 9 us, by reference",
        "cache /cache: 17 measurements, 2.0 MB, writable",
        'not installed: transformers (pip install "autopar[demo]")',
        "Nothing is wrong.",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= command.WIDTH
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["works"] is True
    assert found["links"][0]["bandwidth"] == 3.5e11
    assert "someone" not in json.dumps(found).replace("/home/someone/.cache", ""), "no environment variables"


def test_many_links_are_summed_up() -> None:
    names = [f"cuda:{i}" for i in range(4)]
    pairs = [(a, b) for a in names for b in names if a != b]
    alike = [LinkFact(a, b, 9e-6, None) for a, b in pairs]
    assert command._link_texts(alike) == ["cuda:0 -> cuda:1 and 11 more: 9 us, by reference"]
    different = [LinkFact(a, b, 9e-6, (i + 1) * 1e9) for i, (a, b) in enumerate(pairs)]
    lines = command._link_texts(different)
    assert lines[0] == "cuda:0 -> cuda:1: 9 us, 1 GB/s"
    assert lines[-1] == "6 faster links"
    assert len(lines) == 7


def test_a_machine_without_torch_gets_its_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_devices(_: Any) -> Any:
        raise AssertionError("devices are not looked at without torch")

    monkeypatch.setattr(command, "this_machine", lambda: replace(SOUND, torch=None, torch_error="ImportError: gone"))
    monkeypatch.setattr(command, "devices_and_links", no_devices)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "problem: torch cannot be imported: ImportError: gone." in result.stdout


def test_the_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Facts from files of the system, where these are what a container has."""
    import torch

    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("2000000000\n")
    facts = this_machine()
    assert facts.torch is not None
    assert facts.torch.version == torch.__version__
    assert (facts.cpu_quota, facts.memory_limit, facts.shared_memory) == (1.5, 2_000_000_000, None)
    assert facts.cache is not None
    assert facts.cache.path == os.environ["AUTOPAR_CACHE_DIR"]
    assert facts.cache.writable
    for unlimited in ("max 100000", "nonsense"):
        (tmp_path / "cpu.max").write_text(unlimited)
        (tmp_path / "memory.max").write_text("max\n")
        facts = this_machine()
        assert (facts.cpu_quota, facts.memory_limit) == (None, None)


def test_a_cache_that_was_filled_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cost_models import MeasurementCache

    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "new" / "folder"))
    before = this_machine().cache
    assert before is not None
    assert (before.n_measurements, before.n_bytes, before.writable) == (None, 0, True)
    with MeasurementCache() as cache:
        cache.put_many({"a": 1, "b": 2})
    after = this_machine().cache
    assert after is not None
    assert after.n_measurements == 2
    assert after.n_bytes > 0


def test_extras_are_those_of_the_package() -> None:
    """The metadata of the installed package, where it is installed."""
    packages = this_machine().packages
    if not packages:
        pytest.skip("autopar runs from a folder without being installed")
    by_name = {package.requirement.name: package.extra for package in packages}
    assert by_name["torch"] is None
    assert by_name["safetensors"] is not None
    lacking = tuple(replace(package, version=None) for package in packages)
    assert "transformers" in missing_extras(replace(SOUND, packages=lacking))["demo"]


def test_devices_that_are_not_there_are_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "--devices", "tpu"])
    assert result.exit_code == 2
    with pytest.raises(DeviceError, match="unknown device 'tpu'"):
        command.diagnose("tpu")


def test_a_gpu_that_is_not_there_is_a_problem_beside_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "this_machine", lambda: replace(ON_CPU, gpu_driver=True))
    result = CliRunner().invoke(app, ["doctor", "--devices", "cuda:0, cuda:1"])
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "problem: device 'cuda:0' is not there: PyTorch sees no CUDA device" in text
    assert "torch is built without CUDA" in text


@pytest.mark.slow
def test_the_command_runs_without_the_rest_of_autopar(tmp_path: Path) -> None:
    """Where importing torch fails, `autopar doctor` says so, and no other command is needed for that."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')")
    root = str(Path(machine.__file__).parents[2])
    run = {"capture_output": True, "text": True, "cwd": tmp_path, "check": False, "timeout": 120}
    broken = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    done: Any = subprocess.run([sys.executable, "-m", "autopar", "doctor"], env=broken, **run)  # type: ignore[call-overload]
    assert done.returncode == 1, done.stderr
    assert "torch cannot be imported" in done.stdout
    sound = {**os.environ, "PYTHONPATH": root}
    run["cwd"] = root
    done = subprocess.run([sys.executable, "-m", "autopar", "doctor", "--json"], env=sound, **run)  # type: ignore[call-overload]
    assert json.loads(done.stdout)["devices"], done.stderr
    command_line = [sys.executable, "-m", "autopar", "doctor", "--devices", "tpu"]
    done = subprocess.run(command_line, env=sound, **run)  # type: ignore[call-overload]
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown device 'tpu'")


def test_a_cache_folder_that_cannot_be_looked_at_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "/" + "x" * 5000)  # longer than any file system allows
    cache = this_machine().cache
    assert cache is not None
    assert not cache.writable
