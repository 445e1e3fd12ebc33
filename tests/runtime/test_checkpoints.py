"""Checkpoints of one process: what is complete is loaded exactly, what is not is skipped and said."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.runtime.checkpoints import directories, optimizer_states
from autopar.runtime.checkpoints import save as saving
from autopar.runtime.checkpoints.export import export


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(self.norm(self.a(x)), 0.3, self.training))


Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": [m.a.weight, m.b.weight], "lr": 0.1}, {"params": [m.a.bias, m.norm.weight]}], lr=0.01
    ),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss

    return [torch.as_tensor(optimizer.step(closure)).item() for _ in range(n)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] *= 0.5
    autopar.save(tmp_path, model, optimizer, step=3)
    wanted = train(model, optimizer, 4)
    torch.manual_seed(1)
    again = Model()
    late = OPTIMIZERS[name](again)
    found = autopar.load(tmp_path, again, late)
    assert found is not None
    assert (found.step, found.path) == (3, tmp_path / "step-00000003")
    assert late.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert train(again, late, 4) == wanted
    assert all(not late.state.get(p) for p in again.unused.parameters())


def damaged(path: Path, how: str) -> str:
    """Damage a checkpoint. Returns what the warning says of it."""
    data = path / "__0_0.distcp"
    if how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        return "the content of __0_0.distcp has changed since it was written"
    if how == "cut off":
        size = data.stat().st_size
        data.write_bytes(data.read_bytes()[:-1])
        return f"__0_0.distcp has {size - 1} bytes instead of {size}"
    if how == "missing":
        data.unlink()
        return "__0_0.distcp is missing"
    if how == "metadata":
        content = bytearray((path / ".metadata").read_bytes())
        content[-20] ^= 1
        (path / ".metadata").write_bytes(content)
        return "the content of .metadata has changed"
    (path / "manifest.json").write_text("{" if how == "manifest" else '{"format": 99, "step": 2, "files": {}}')
    return "manifest.json is damaged" if how == "manifest" else "manifest.json has format 99"


@pytest.mark.parametrize("how", ["flipped", "cut off", "missing", "metadata", "manifest", "format"])
def test_a_damaged_checkpoint_is_skipped_and_said(tmp_path: Path, how: str) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        autopar.save(tmp_path, model, step=step)
    said = damaged(tmp_path / "step-00000002", how)
    with pytest.warns(autopar.AutoparWarning) as caught:
        found = autopar.load(tmp_path, model)
    assert found is not None
    assert found.step == 1
    assert bool((model.weight == 1).all())
    (message,) = [str(one.message) for one in caught]
    assert "a checkpoint cannot be used: " in message
    assert f"step-00000002 ({said}" in message
    assert message.endswith(f"loading {tmp_path}/step-00000001, which is complete")
    with pytest.raises(
        autopar.CheckpointError, match=r"no checkpoint of step 2 in .* that can be loaded: .*step-00000002 \("
    ):
        autopar.load(tmp_path, model, step=2)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.warns(autopar.AutoparWarning, match="there is no earlier one, so nothing is loaded"):
        assert autopar.load(tmp_path, model, required=False) is None


@pytest.fixture(scope="module")
def of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of step 1 are 1, those of step 2 are 2."""
    folder, model = tmp_path_factory.mktemp("two"), nn.Linear(2, 2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        autopar.save(folder, model, step=step)
    return folder


FILES = ["__0_0.distcp", ".metadata", "manifest.json"]


@given(
    st.sampled_from(FILES),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["flip", "byte", "cut"]),
    st.integers(1, 255),
)
def test_a_damage_anywhere_is_noticed_or_harmless(
    of_two_steps: Path, tmp_path_factory: pytest.TempPathFactory, name: str, place: float, how: str, value: int
) -> None:
    """One bit or byte of a file differs, or its end is missing. The manifest has words that nobody reads."""
    folder = tmp_path_factory.mktemp("damaged") / "runs"
    shutil.copytree(of_two_steps, folder)
    path = folder / "step-00000002" / name
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if how == "cut":
        content = content[:at]
    else:
        content[at] ^= value if how == "byte" else 1 << value % 8
    path.write_bytes(content)
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = autopar.load(folder, model)
    assert found is not None
    said = [str(one.message) for one in caught if "step-00000002 (" in str(one.message)]
    assert found.step == (1 if said else 2)
    assert bool((model.weight == found.step).all())
    if name != "manifest.json":
        assert name in said[0]
    assert said or how != "cut"
    shutil.rmtree(folder)


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    assert autopar.load(tmp_path, nn.Linear(2, 2), required=False) is None
    assert autopar.load(tmp_path / "none", nn.Linear(2, 2), required=False) is None
    with pytest.raises(autopar.CheckpointError, match="there is no checkpoint in"):
        autopar.load(tmp_path, nn.Linear(2, 2))


def changed(change: Callable[[Model], Any]) -> Model:
    model = Model()
    change(model)
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lacks": (lambda: changed(lambda m: m.add_module("c", nn.Linear(1, 1))), r"it lacks 'c.weight', 'c.bias'; build"),
    "surplus": (
        lambda: changed(lambda m: delattr(m, "unused")),
        "it has 'unused.weight', 'unused.bias', which the mod",
    ),
    "shape": (lambda: Model(9), r"the shape differs of 'a.weight' \(\(8, 8\), in the model \(9, 8\)\).* and \d more"),
    "dtype": (lambda: Model().double(), r"the dtype differs of 'a.weight' \(torch.float32, in the model torch.float64"),
    "tied": (lambda: changed(lambda m: setattr(m.a, "weight", m.b.weight)), "other parameters are tied: none, in the"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path: Path, name: str) -> None:
    autopar.save(tmp_path, Model(), step=1)
    make, message = OTHERS[name]
    other = make()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(autopar.InputError, match=f"step-00000001 is a checkpoint of another model: {message}"):
        autopar.load(tmp_path, other)
    assert all(bool((value == before[name]).all()) for name, value in other.state_dict().items())


def test_torch_reads_the_checkpoint_itself(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    path = autopar.save(tmp_path, model, optimizer, step=2).path
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    wanted = {f"optimizer.{k}": v for k, v in flat.items() if k.startswith("state.") and v.numel() > 1}
    wanted |= {f"model.{name}": value for name, value in model.state_dict().items()}
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(found, checkpoint_id=path)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {key for key in saved if key.startswith(("model.", optimizer_states.STATE))} == set(wanted)


def test_a_failure_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saving, "complete", full)
        started = autopar.save(tmp_path, model, step=1, asynchronous=True)
        with pytest.raises(autopar.CheckpointError, match=r"step-00000001 cannot be saved: OSError: .*No space left"):
            autopar.save(tmp_path, model, step=2)
    assert started.done
    assert list(tmp_path.iterdir()) == []
    assert autopar.save(tmp_path, model, step=2, asynchronous=True).wait() == tmp_path / "step-00000002"


@pytest.mark.parametrize("error", [RuntimeError("gloo: Connection closed by peer"), MemoryError(), SystemExit()])
def test_whatever_ends_a_save_in_the_background_is_raised_by_every_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model, words = nn.Linear(2, 2), f"step-00000001 cannot be saved: .*({type(error).__name__}|Connection closed)"

    def write(_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(saving._Writing, "write", write)
        started = autopar.save(tmp_path, model, step=1, asynchronous=True)
        for _ in range(2):
            with pytest.raises(autopar.CheckpointError, match=words):
                started.wait()
    autopar.save(tmp_path, model, step=2)  # does not raise it again


def test_an_asynchronous_save_copies_what_modules_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model, other, goes_on = Counts(2, 2), Counts(2, 2), threading.Event()
    model.seen = {"numbers": [1], "mean": torch.ones(2)}
    write = saving._Writing.write

    def later(self: Any) -> None:
        goes_on.wait()
        write(self)

    monkeypatch.setattr(saving._Writing, "write", later)
    started = autopar.save(tmp_path, model, step=1, asynchronous=True)
    model.seen["numbers"].append(2)
    model.seen["mean"].zero_()
    goes_on.set()
    started.wait()
    autopar.load(tmp_path, other)
    assert other.seen["numbers"] == [1]
    assert other.seen["mean"].tolist() == [1.0, 1.0]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        autopar.save(tmp_path, model, step=1)
    nn.init.constant_(model.weight, 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.load(tmp_path / "step-00000001", model)
    assert bool((model.weight == 2.0).all())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    autopar.save(tmp_path, model, step=1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            autopar.save(tmp_path, model, step=1)
    found = autopar.load(tmp_path, nn.Linear(2, 2))
    assert found is not None
    assert found.path == directories.partial_of(tmp_path / "step-00000001")


def test_modules_with_extra_state_get_it_back(tmp_path: Path) -> None:
    class Counts(nn.Linear):
        n = 0

        def get_extra_state(self) -> Any:
            return {"n": self.n}

        def set_extra_state(self, state: Any) -> None:
            self.n = state["n"]

    model, other = Counts(2, 2), Counts(2, 2)
    model.n = 7
    autopar.save(tmp_path, model, step=1)
    autopar.load(tmp_path, other)
    assert other.n == 7


def test_export_writes_whole_tensors_in_the_original_names(tmp_path: Path) -> None:
    model, file = Model(), tmp_path / "model.safetensors"
    for step in (1, 2):
        nn.init.constant_(model.a.weight, step)
        autopar.save(tmp_path / "runs", model, step=step)
    for options, step in (((), 2), (("--step", "1"), 1)):
        assert command(0, tmp_path / "runs", file, *options).endswith(f"from {tmp_path}/runs/step-0000000{step}\n")
        found = load_file(file)
        assert set(found) == set(model.state_dict())
        assert all(torch.equal(found[name], value) for name, value in model.state_dict().items() if name != "a.weight")
        assert bool((found["a.weight"] == step).all())
    (tmp_path / "empty").mkdir()
    assert "error: there is no checkpoint in" in command(1, tmp_path / "empty", file)
    assert "error: there is no directory" in command(2, tmp_path / "none", file)
    assert "give a name that ends in .safetensors" in command(2, tmp_path / "runs", tmp_path / "model.bin")
    assert "there is no directory" in command(2, tmp_path / "runs", tmp_path / "no" / "model.safetensors")


def test_export_names_the_extra_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(autopar.InputError, match=re.escape('pip install "autopar[safetensors]"')):
        export(tmp_path, tmp_path / "model.safetensors")


def command(status: int, *arguments: object) -> str:
    """What `autopar export` prints, or its error."""
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == status, result.stderr
    return result.stderr if status else result.stdout
