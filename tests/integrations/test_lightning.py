"""Lightning with AutoparStrategy: the losses, weights and checkpoints of the plain LightningModule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autopar import InputError, PipelinedModule, Plan, parallelize

lightning = pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
from autopar.integrations import AutoparStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PLAN = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3)


class Task(lightning.LightningModule):
    """`net` beside a buffer of its own; it remembers what its steps called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.full((), 2.0))
        self.seen: list[tuple[str, type, bool]] = []
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.net(x)

    def _loss(self, batch: Any, where: str) -> torch.Tensor:
        self.seen.append((where, type(self.net), self.net.training))
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log(f"{where}_loss", loss)
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self._loss(batch, "train")

    def validation_step(self, batch: Any, _: int) -> None:
        self._loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch, "test")

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def task() -> Task:
    torch.manual_seed(1)
    return Task()


def loader() -> DataLoader[Any]:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(36, 16), torch.randn(36, 16)), batch_size=8)


def trainer(strategy: Any, place: Path, **more: Any) -> Any:
    options = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False, **more}
    return lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, default_root_dir=place, **options)


def strategy(**more: Any) -> AutoparStrategy:
    return AutoparStrategy(["cpu", "cpu"], plan=PLAN, cache=False, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
    ],
    ids=["default", "accumulation", "bf16"],
)
def test_fit_validate_test_and_predict_are_those_of_the_plain_module(more: dict[str, Any], tmp_path: Path) -> None:
    mine, plain = task(), task()
    for one, how in ((mine, strategy()), (plain, "auto")):
        runner = trainer(how, tmp_path, **more)
        runner.fit(one, loader(), loader())
        assert type(one.net) is nn.Sequential, "afterwards it is the module itself again"
        runner.test(one, loader(), verbose=False)
        one.predictions = torch.cat(runner.predict(one, loader()))
    close = {"rtol": 2e-2, "atol": 2e-2} if "precision" in more else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mine.losses, plain.losses, **close)
    torch.testing.assert_close(mine.predictions, plain.predictions, **close)
    torch.testing.assert_close(dict(mine.state_dict()), dict(plain.state_dict()), **close)
    assert all(kind is PipelinedModule for _, kind, _ in mine.seen)
    assert all(mode == (where == "train") for where, _, mode in mine.seen)


def test_a_checkpoint_goes_on_with_either(tmp_path: Path) -> None:
    whole, first = task(), task()
    trainer("auto", tmp_path).fit(whole, loader())
    half = trainer(strategy(), tmp_path, max_epochs=1)
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    assert set(torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]) == set(whole.state_dict())
    for how in (strategy(), "auto"):
        again = task()
        trainer(how, tmp_path).fit(again, loader(), ckpt_path=tmp_path / "half.ckpt")
        torch.testing.assert_close(dict(again.state_dict()), dict(whole.state_dict()), rtol=1e-4, atol=1e-5)


class Deep(Task):
    """The network lies deeper, beside another child with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"body": self.net, "head": nn.Linear(16, 16)})
        del self.net

    @property
    def net(self) -> nn.Module:
        return self.parts["body"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["head"](self.net(x))


def test_a_submodule_is_named_by_its_path(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = Deep()
    mine = copy.deepcopy(plain)
    for one, how in ((mine, strategy(module="parts.body")), (plain, "auto")):
        trainer(how, tmp_path).fit(one, loader())
    torch.testing.assert_close(mine.losses, plain.losses, rtol=1e-4, atol=1e-5)
    assert all(kind is PipelinedModule for _, kind, _ in mine.seen)


class Loose(Task):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("module", "path", "said"),
    [
        (Loose, None, r"Loose has the children \['net', 'head'\].*AutoparStrategy\(module=...\)"),
        (Task, "body", r"Task has no submodule 'body'; its children are \['net'\]"),
    ],
)
def test_what_cannot_be_pipelined_is_named(module: Any, path: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        trainer(strategy(module=path), tmp_path).fit(module(), loader())


def test_the_mode_of_a_module_is_the_models_however_it_is_set() -> None:
    """Lightning sets `training` of every module after a validation."""

    class Dropping(nn.Module):
        """The root itself reads its mode."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(nn.functional.dropout(self.a(x), 0.5, self.training))

    model = Dropping()
    pm = parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2), cache=False)
    for module in pm.modules():
        module.training = False
    x = torch.ones(4, 8)
    torch.testing.assert_close(pm(x), model.b(model.a(x)))
    model.training = True
    assert pm.training
