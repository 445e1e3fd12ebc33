"""Devices: the workers that a user's words ask for, and the words that ask for none."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.analysis.batching import study
from autopar.capture.program import capture
from autopar.costs.measured import Measured
from autopar.runtime.arguments import tensors_of_training
from cost_models import DeviceError, available_memory, parse_devices
from cost_models.hardware import devices
from cost_models.memory.training_memory import FRAGMENTATION, WORKSPACE

GPU_MEMORY = 80 << 30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs; the second is current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "Some GPU")
    monkeypatch.setattr(devices, "available_memory", lambda place: GPU_MEMORY)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def names(devices: object) -> list[str]:
    return [worker.name for worker in parse_devices(devices)]  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_cpu_workers_share_cores_and_memory_equally(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    monkeypatch.setattr(devices, "available_memory", lambda place: 1000)
    parsed = parse_devices(["cpu"] * workers)
    assert [worker.name for worker in parsed] == [f"cpu:{i}" for i in range(workers)]
    assert {worker.memory for worker in parsed} == {1000 // workers}
    assert {worker.threads for worker in parsed} == {max(1, cores // workers)}
    assert len({worker.kind for worker in parsed}) == 1


def test_every_cpu_worker_keeps_its_tensors_on_the_one_cpu_device() -> None:
    for worker in parse_devices(["cpu", "cpu:3", torch.device("cpu", 1)]):
        assert worker.torch_device == torch.device("cpu")
        assert worker.shares_process_memory


def test_workers_with_other_thread_counts_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 4)
    assert parse_devices("cpu")[0].kind != parse_devices("cpu,cpu")[0].kind


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("cpu", ["cpu:0"]),
        ("cpu, cpu", ["cpu:0", "cpu:1"]),
        (torch.device("cpu"), ["cpu:0"]),
        (("cpu:7", "cpu:7"), ["cpu:0", "cpu:1"]),
    ],
)
def test_cpu_workers_are_numbered_in_order_of_appearance(written: object, expected: list[str]) -> None:
    assert names(written) == expected


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, ["cuda:0", "cuda:1"]),
        ("cuda", ["cuda:1"]),
        ("cuda:1,cuda:0", ["cuda:1", "cuda:0"]),
        (["cuda:0", "cuda:0", "cuda:0"], ["cuda:0", "cuda:0#1", "cuda:0#2"]),
        (["cuda:0", "cpu", torch.device("cuda", 1), "cpu"], ["cuda:0", "cpu:0", "cuda:1", "cpu:1"]),
    ],
)
def test_gpus_are_named_by_their_index(written: object, expected: list[str]) -> None:
    assert names(written) == expected


@pytest.mark.usefixtures("two_gpus")
def test_workers_on_one_gpu_share_its_memory_and_others_keep_theirs() -> None:
    first, alone, second = parse_devices(["cuda:0", "cuda:1", "cuda:0"])
    assert first.memory == second.memory == GPU_MEMORY // 2
    assert alone.memory == GPU_MEMORY
    assert first.torch_device == second.torch_device == torch.device("cuda:0")
    assert first.kind == alone.kind == "Some GPU"
    assert first.threads == 1
    assert not first.shares_process_memory


@pytest.fixture
def counted_gpus(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 1000 MiB: the driver has 100 free, and torch's allocator keeps 20 that no tensor uses."""
    monkeypatch.setattr(devices, "available_memory", available_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (100 << 20, 1000 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 70 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 50 << 20)


@pytest.mark.usefixtures("counted_gpus")
def test_what_a_job_holds_on_a_gpu_already_is_available_to_it() -> None:
    with FakeTensorMode():
        weight = torch.empty(4 << 20, device="cuda:0")  # 16 MiB
        resident = [
            weight,
            weight.detach(),
            weight.view(2, -1),
            torch.empty(1 << 20, device="cuda:1"),
            torch.empty(1 << 30),
        ]
        first, second = parse_devices(["cuda:0", "cuda:1"], resident)
        halves = parse_devices(["cuda:0", "cuda:0"], resident)
    assert (first.memory, second.memory) == ((100 + 20 + 16) << 20, (100 + 20 + 4) << 20)
    assert [half.memory for half in halves] == [first.memory // 2] * 2


@pytest.mark.usefixtures("counted_gpus")
@pytest.mark.parametrize("optimizer", ["adam", "made"])
def test_a_model_on_a_gpu_is_counted_once(optimizer: str) -> None:
    """Parameters, gradients and the optimizer's states, which plans count, lie on the GPU before the plan is made."""
    with FakeTensorMode():
        model = nn.Module()
        weight = model.weight = nn.Parameter(torch.empty(1 << 20, device="cuda:0"))  # 4 MiB
        made = torch.optim.Adam(model.parameters())
        made.state[weight] = {name: torch.empty_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        tensors = list(tensors_of_training(model, made if optimizer == "made" else optimizer))
        weight.grad = torch.empty_like(weight)
        with_gradient = list(tensors_of_training(model, made if optimizer == "made" else optimizer))
        known = [parse_devices("cuda:0", some)[0].memory for some in (tensors, with_gradient)]
    states = 8 if optimizer == "made" else 0
    assert known == [(120 + 4 + states) << 20, (120 + 8 + states) << 20]


@pytest.mark.usefixtures("counted_gpus")
def test_plans_keep_back_workspaces_and_gaps_of_what_a_gpu_has() -> None:
    device = replace(parse_devices("cuda:0")[0], memory=1 << 30)
    x = torch.randn(4, 8)
    program = capture(nn.Linear(8, 8), (x,), {})
    source = Measured(program, study(program, [x]), [x], [device], training=True)
    assert (
        source.devices[0].memory <= device.memory - WORKSPACE["cuda"] - FRAGMENTATION["cuda"] * source.devices[0].memory
    )


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (64, 2)])
def test_without_gpus_the_default_is_a_cpu_worker_a_core_up_to_two(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    assert names(None) == [f"cpu:{i}" for i in range(workers)]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("written", "named"),
    [
        ([], "empty"),
        ("", "''"),
        ("cpu,,cpu", "''"),
        (["tpu"], "'tpu'"),
        (["cuda:x"], "'cuda:x'"),
        (["cuda:-1"], "'cuda:-1'"),
        (["cuda"], "'cuda'"),
        (["cpu", "cuda:0"], "'cuda:0'"),
        (["mps"], "'mps'"),
        ([torch.device("meta")], "'meta'"),
        (["xpu:0"], "'xpu:0'"),
        ([0], "0 is of type int"),
        ([None], "None is of type NoneType"),
        (2, "devices is 2"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_can(written: object, named: str) -> None:
    with pytest.raises(DeviceError, match=named) as raised:
        names(written)
    assert '"cpu"' in str(raised.value) or '"cuda' in str(raised.value)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_out_of_range_is_answered_with_those_in_range() -> None:
    with pytest.raises(DeviceError, match=r"'cuda:2' is not there.*\"cuda:0\", \"cuda:1\""):
        parse_devices(["cuda:0", "cuda:2"])


def test_the_cpu_model_is_read_where_the_system_tells_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Acme 9000: fast\nmodel name\t: other\n")
    assert devices._cpu_model(cpuinfo) == "Acme 9000: fast"
    assert devices._cpu_model(tmp_path / "missing")


@pytest.mark.parametrize("error", [None, ValueError])
def test_operators_use_that_many_threads_inside_and_as_many_as_before_after_it(error: type[Exception] | None) -> None:
    before = torch.get_num_threads()
    with nullcontext() if error is None else pytest.raises(error), devices.operator_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        if error is not None:
            raise error
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("two_gpus")
def test_only_gpus_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    devices.synchronize(torch.device("cpu"), torch.device("cuda", 1), *parse_devices(["cpu", "cuda:0"]))
    assert waited == [torch.device("cuda", 1), torch.device("cuda", 0)]


def test_a_device_is_found_by_its_name_or_the_names_are_listed() -> None:
    workers = parse_devices(["cpu", "cpu"])
    assert devices.find_device(workers, "cpu:1") is workers[1]
    with pytest.raises(DeviceError, match=r"'cpu:2' is not among the devices cpu:0, cpu:1"):
        devices.find_device(workers, "cpu:2")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_default_is_every_visible_gpu() -> None:
    parsed = parse_devices()
    assert [worker.torch_device.index for worker in parsed] == list(range(torch.cuda.device_count()))
    assert all(worker.memory > 0 for worker in parsed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plan_has_the_same_memory_whether_its_model_lies_on_the_gpu_already() -> None:
    before = parse_devices("cuda:0")[0].memory
    model = nn.Linear(1 << 13, 1 << 13, device="cuda:0")  # 256 MiB
    assert abs(parse_devices("cuda:0", model.parameters())[0].memory - before) < 64 << 20
    assert parse_devices("cuda:0")[0].memory <= before - (192 << 20)
