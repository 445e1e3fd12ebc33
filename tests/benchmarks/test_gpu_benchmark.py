"""The benchmark of GPUs: its logic, and all of it on a CPU with tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_places import ON_GPU
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from benchmarks import gpu, gpu_memory, gpu_several
from benchmarks.__main__ import main
from benchmarks.gpu_checks import (
    PARTS,
    copies_and_kernels,
    data_sheet,
    in_turn,
    no_wait,
    overlapped,
)
from benchmarks.gpu_memory import growth, in_use
from benchmarks.gpu_models import MODELS
from benchmarks.gpu_setting import Finding, Setting
from benchmarks.machine import gpu_header
from cost_models.hardware import devices

CPU = torch.device("cpu")
TINY = Setting(CPU, quick=True, rounds=1, seconds=0.0, steps=3, backend="eager")


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny operators on several threads wait for each other."""
    monkeypatch.setattr(devices, "usable_cores", lambda: 1)


# -- all of it --------------------------------------------------------------------------------------------------------

GOALS = {
    "memory": {"peak memory predicted, 1 stage, 1 micro-batch", "peak memory predicted, 2 stages, 4 micro-batches"},
    "wrapped": {
        "one device, wrapped / eager",
        "one device, train_step / eager",
    },
    "compiled": {"one device, wrapped, compile=True / torch.compile"},
    "stages": {
        "two stages on one device / one, 1 micro-batch",
        "two stages on one device / one, 4 micro-batches",
        "step predicted by measured costs, 1 stage, 1 micro-batch",
        "step predicted by data-sheet costs",
    },
    "overlap": {"copies overlapped with computing"},
    "no_wait": {"no host synchronisation in a step"},
    "growth": {"growth of memory over 3 steps"},
}
ONLY_ON_GPUS = ("overlap", "no_wait")


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_every_goal_of_one_device_is_measured_on_a_cpu_or_says_why_not(name: str, part: Any) -> None:
    subject = MODELS[name](CPU, True)
    findings = list(part(subject, TINY))
    assert GOALS[part.__name__] <= {finding.promise for finding in findings}
    for finding in findings:
        assert finding.model == subject.name
        assert finding.goal
        if finding.value is None:
            assert finding.met is None
            assert finding.note
        else:
            assert finding.text
            assert part.__name__ not in ONLY_ON_GPUS
    assert all(p.grad is None for p in subject.workload.model.parameters())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_core")
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_several_devices_are_compared_with_one() -> None:
    findings = {f.promise: f for f in gpu_several.several("gpt2", "GPT-2 medium", TINY)}
    systems = ("automatic plan", "pipeline of 2", "DataParallel", "DistributedDataParallel")
    assert {f"speed-up over one device, {system} on 2" for system in systems} <= set(findings)
    assert all(finding.value is not None and finding.value > 0 for finding in findings.values())
    assert all(finding.met is None for finding in findings.values()), "CPU workers share the cores of one device"


@ON_GPU
@pytest.mark.parametrize("part", [no_wait, growth], ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_what_needs_no_clock_is_met_on_a_gpu(name: str, part: Any, devices: list[str]) -> None:
    setting = replace(TINY, device=torch.device(devices[0]))
    findings = list(part(MODELS[name](setting.device, True), setting))
    assert all(finding.met for finding in findings), findings


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_the_same_at_every_call_and_their_second_stage_is_a_module(name: str) -> None:
    one, other = (MODELS[name](CPU, True) for _ in range(2))
    for a, b in zip(one.workload.model.parameters(), other.workload.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.workload.target, other.workload.target)
    assert sorted(one.split.values()) == [0, 1]
    for path in one.split:
        one.workload.model.get_submodule(path)
    assert one.rows(2).batch_size == 2
    assert (next(one.workload.model.parameters()).dtype == torch.bfloat16) == (name == "llama")


@pytest.mark.parametrize(("name", "millions"), [("resnet", 25.6), ("gpt2", 354.8), ("llama", 1100.0), ("t5", 222.9)])
def test_the_full_models_have_their_published_sizes(name: str, millions: float) -> None:
    model = MODELS[name](torch.device("meta"), False).workload.model
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


# -- its logic --------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_refuses_and_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu", "--quick", "--results", str(tmp_path)]) == 1
    assert "sees no CUDA device; --device cpu" in capsys.readouterr().err
    assert main(["gpu", "--device", "meta"]) == 2
    assert main(["gpu", "--device", "cpu", "--models", "resnet,nonsense"]) == 2
    assert "no model nonsense; gpu has resnet, gpt2, llama, t5" in capsys.readouterr().err
    assert main(["gpu", "--device", "cpu", "--parts", "memory,nonsense"]) == 2
    assert "no part nonsense; gpu has memory, wrapped, stages" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_part_that_fails_is_a_goal_missed_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def works(subject: Any, setting: Setting) -> Iterator[Finding]:
        yield Finding(subject.name, "works", "at most 1", 0.5, "0.500", True)

    def fails(subject: Any, setting: Setting) -> Iterator[Finding]:
        yield Finding(subject.name, "half", "at most 1", 2.0, "2.000", False)
        raise RuntimeError("out of memory\nand a long story")

    def skipped(subject: Any, setting: Setting) -> Iterator[Finding]:
        yield Finding(subject.name, "skipped", "some", None, "", None, "for a reason")

    monkeypatch.setattr(gpu, "PARTS", (fails, works, skipped))

    def several(name: str, title: str, setting: Setting) -> Iterator[Finding]:
        yield from ()

    monkeypatch.setattr(gpu, "several", several)
    arguments = ["--quick", "--device", "cpu", "--models", "resnet", "--results", str(tmp_path)]
    assert main(["gpu", *arguments, "--json", str(tmp_path / "out.json")]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert [(f["promise"], f["text"], f["met"]) for f in data["findings"]] == [
        ("half", "2.000", None),  # goals are those of a GPU
        ("fails", "failed", False),
        ("works", "0.500", None),
        ("skipped", "", None),
    ]
    page = (tmp_path / "gpu-quick.md").read_text()
    assert "0 met, 1 missed, 3 not judged" in page
    assert "RuntimeError: out of memory" in page
    assert "for a reason" in page
    assert data["machine"]["torch"]
    capsys.readouterr()


def test_goals_are_judged_on_a_gpu() -> None:
    found = [
        Finding("m", promise, "at most 1", value, str(value), value <= 1) for promise, value in (("a", 1), ("b", 2))
    ]
    on_gpu = replace(TINY, device=torch.device("cuda:0"))
    assert [gpu.judged(finding, on_gpu).met for finding in found] == [True, False]
    title = gpu.report_of(found, on_gpu).title
    assert title == "Goals on cuda:0: 1 met, 1 missed, 0 not judged"


def test_rounds_take_as_long_as_they_should_and_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: clock.now)
    ran: list[str] = []

    def step(name: str, seconds: float) -> Any:
        def run() -> None:
            ran.append(name)
            clock.now += seconds

        return run

    setting = replace(TINY, rounds=2, seconds=1.0)
    seconds = in_turn({"a": step("a", 0.25), "b": step("b", 0.125)}, setting, lambda: None)
    assert seconds == {"a": (0.25, 0.25), "b": (0.125, 0.125)}
    order = "".join(ran)
    assert order[:4] == "abab"
    rounds = [order[start : start + 8] for start in range(4, len(order), 8)]
    assert len(rounds) == 3
    assert all(one in ("aaaabbbb", "bbbbaaaa") for one in rounds), "each round has each system once, in any order"


@dataclass
class _Event:
    """Of torch.profiler."""

    name: str
    start: float
    end: float
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool = False

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start, end=self.end)


def test_copies_between_places_are_distinguished_from_kernels() -> None:
    events = [
        _Event("Memcpy HtoD (Pinned -> Device)", 0, 4),
        _Event("Memcpy PtoP (Device -> Device)", 5, 6),
        _Event("Memcpy DtoD (Device -> Device)", 0, 9),
        _Event("Memset (Device)", 0, 9),
        _Event("sm90_xmma_gemm", 2, 3),
        _Event("aten::mm", 0, 9, DeviceType.CPU),
        _Event("autopar stage 0 forward", 0, 9),
        _Event("my range", 0, 9, is_user_annotation=True),
    ]
    copies, kernels = copies_and_kernels(events)
    assert copies == [(0, 4), (5, 6)]
    assert kernels == [(2, 3)]
    assert overlapped(copies, kernels) == 1


_INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=6)


@given(_INTERVALS, _INTERVALS)
def test_overlap_is_the_time_of_copies_during_which_some_kernel_runs(copies: Any, kernels: Any) -> None:
    ticks = [sum(s <= t < e for s, e in copies) for t in range(30) if any(s <= t < e for s, e in kernels)]
    assert overlapped(copies, kernels) == sum(ticks)


@pytest.mark.parametrize(
    ("card", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_cards_have_their_own_data_sheet_or_none(card: str, sheet: str | None) -> None:
    from cost_models import Cluster

    assert data_sheet(card) == sheet
    if sheet is not None:
        assert Cluster.preset(f"1x{sheet}").devices


@pytest.mark.slow
def test_bytes_in_use_are_those_of_tensors_that_live() -> None:
    before = in_use(CPU)
    kept = torch.zeros(1000)
    view = kept[10:]
    assert in_use(CPU) - before == 4000
    del kept, view
    assert in_use(CPU) == before


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_a_step_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[torch.Tensor] = []

    class Leaking:
        def train_step(self, **call: Any) -> None:
            leaked.append(torch.zeros(25))

        def close(self) -> None: ...

    monkeypatch.setattr(gpu_memory.autopar, "parallelize", lambda *args, **options: Leaking())
    (finding,) = growth(MODELS["gpt2"](CPU, True), replace(TINY, steps=7))
    assert finding.value == 700
    assert finding.met is False


def test_the_header_names_card_and_driver_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_header() == {}
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    header = gpu_header()
    assert header["GPUs"] == "2 x NVIDIA H100 80GB HBM3, 80 GiB"
    assert header["GPU driver"]
