"""What ranks, or one process, do in tests of checkpoints: train, save, go on from a checkpoint under another plan."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import MODELS, Job, loss_of, plan_of
from rank_misuse import raised_by
from rank_states import OPTIMIZERS, ready, square
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.checkpoints import directories
from autopar.runtime.checkpoints import save as saving
from autopar.runtime.ranks.whole_state import whole_state_dict

BATCH = {"mlp": (8, 12), "mlp with dropout": (8, 12), "resnet": (8, 3, 16, 16), "attention": (8, 12, 24)}


@dataclass(frozen=True)
class Run:
    """Part of a training. Batches come from torch's default generator, whose state is part of a checkpoint."""

    job: Job  # its plan is for the number of ranks of the run
    folder: Path
    steps: int = 4
    save_at: int | None = None  # after this number of steps, counted from the first of all
    load: bool = False  # begin with the newest checkpoint
    placed_first: bool = False  # parameters are placed before the checkpoint is loaded
    asynchronous: bool = False
    plain: bool = False  # the model itself
    seed: int = 3


def batch(model: str) -> torch.Tensor:
    if model in BATCH:
        return torch.randn(BATCH[model], dtype=torch.float64)
    return torch.randint(0, 64, (8, 16))


def build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(run.seed)
    model = MODELS[run.job.model][0]().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch(run.job.model)


def losses(run: Run) -> list[float]:
    """Of the steps of this part."""
    model, optimizer, example = build(run)
    used = model
    if not run.plain:
        n = dist.get_world_size() if dist.is_initialized() else 2
        plan = plan_of(run.job, model, example, n)
        target = {"target": example, "loss_fn": _loss(run.job.model)}
        ahead = {"example_args": (example,), **target} if run.placed_first else {}
        devices = None if dist.is_initialized() else ["cpu"] * n
        used = autopar.parallelize(model, devices, plan=plan, **ahead)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    done = 0
    if run.load:
        found = autopar.load(run.folder, used, optimizer, extra={"scheduler": scheduler})
        assert found is not None
        done = found.step
    result, pending = [], None
    for step in range(done, done + run.steps):
        x = batch(run.job.model)
        optimizer.zero_grad()
        if isinstance(used, autopar.PipelinedModule):
            loss = used.train_step(x, target=x, loss_fn=_loss(run.job.model))
        else:
            loss = loss_of(run.job.model, used(x), x)
            loss.backward()
        optimizer.step()
        scheduler.step()
        result.append(loss.item())
        if step + 1 == run.save_at:
            extra = {"scheduler": scheduler}
            pending = autopar.save(
                run.folder, used, optimizer, step=step + 1, extra=extra, asynchronous=run.asynchronous
            )
    if pending is not None:
        assert pending.wait().is_dir()
    return result


def _loss(model: str) -> Callable[[Any, Any], torch.Tensor]:
    return lambda output, target: loss_of(model, output, target)


def killed_while_saving(folder: Path, point: str) -> None:
    """Save step 1 completely, and have rank 1 (at the end: rank 0) killed in the midst of saving step 2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    autopar.save(folder, model, step=1)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    rank = dist.get_rank()
    if point == "before writing" and rank == 1:
        saving.dcp = None  # type: ignore[assignment]
        saving.alone_warning_off = _killed
    if point == "after writing" and rank == 1:
        directories.File.of = _killed  # type: ignore[method-assign,assignment]
    if point == "before the manifest" and rank == 0:
        directories.json = None  # type: ignore[assignment]
        directories.step_of = _killed
    if point == "before the last name" and rank == 0:
        directories._sync = _killed
    autopar.save(folder, model, step=2)


def killed_while_saving_in_the_background(folder: Path) -> None:
    """Rank 1; rank 0 waits for the checkpoint, twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if dist.get_rank() == 1:
        directories.File.of = _killed  # type: ignore[method-assign,assignment]
    pending = autopar.save(folder, model, step=2, asynchronous=True)
    messages = [message_of(pending.wait) for _ in range(2)]
    assert messages[0] == messages[1]
    said = f"CheckpointError: {folder}/step-00000002 cannot be saved: AutoparError: rank 1 failed"
    assert messages[0].startswith(said)
    assert "its process ended: killed, or crashed" in messages[0]


def _killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def messages(folder: Path) -> list[tuple[str, str, bool]]:
    """Errors of calls that do not fit, on each rank, and whether rank 0 alone shows them."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    autopar.save(folder, model, optimizer, step=1, extra={"a": 1})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (folder / "a file").touch()
    calls: list[Callable[[], Any]] = [
        lambda: autopar.save(folder / f"rank{rank}", model, step=1),
        lambda: autopar.save(folder, model, optimizer if rank else None, step=1),
        lambda: autopar.save(folder, model, torch.optim.SGD(model.parameters()) if rank else optimizer, step=1),
        lambda: autopar.save(folder / "a file", model, step=1),
        lambda: autopar.load(folder / f"rank{rank}", model),
        lambda: autopar.load(folder, model, step=1 + rank),
        lambda: autopar.load(folder / "none", model, required=not rank),
        lambda: autopar.load(folder, model, None if rank else optimizer),
        lambda: autopar.load(folder, model, torch.optim.SGD(model.parameters()) if rank else optimizer),
        lambda: autopar.load(folder, model, extra={"a": scheduler} if rank else {}),
        lambda: autopar.load(folder, model, random_state=not rank),
        lambda: autopar.load(folder / "none", model),
        lambda: autopar.load(folder, model, step=7),
        lambda: autopar.load(folder, model if rank else nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.ReLU())),
        lambda: autopar.load(folder, model, extra={"b": scheduler}),
        lambda: autopar.load(folder, model, extra={"a": 1}),
        lambda: autopar.load(folder, model, torch.optim.SGD(model.parameters())),
        lambda: autopar.load(folder, model, torch.optim.AdamW([nn.Parameter(torch.ones(3))])),
    ]
    return [raised_by(call) for call in calls]


def refused_on_ranks(folder: Path) -> list[tuple[list[tuple[str, str, bool]], list[float], list[float]]]:
    """Of loads that do not fit, into a model before its first call and after it: their errors, the losses of training
    that goes on afterwards, and those of training without such loads."""
    rank, x = dist.get_rank(), torch.linspace(-1, 1, 8 * 12, dtype=torch.float64).view(8, 12)

    def made(seed: int, placed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))).double()
        plan = autopar.Plan.by_hand(model, None, pipeline=2, micro_batch=4, example_args=(x,))
        pm = autopar.parallelize(model, plan=plan)
        optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
        return pm, trained(pm, optimizer, 2)[0] if placed else optimizer

    def trained(
        model: nn.Module, optimizer: torch.optim.Optimizer, n: int
    ) -> tuple[torch.optim.Optimizer, list[float]]:
        found = []
        for _ in range(n):
            optimizer.zero_grad()
            loss = square(model, x)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return optimizer, found

    autopar.save(folder, *made(0, True), step=2)
    results = []
    for placed in (False, True):
        pm, optimizer = made(1, placed)
        other = torch.optim.AdamW(pm.parameters(), lr=0.1)
        calls: list[Callable[[], Any]] = [
            lambda pm=pm, optimizer=optimizer: autopar.load(folder, pm, None if rank else optimizer),
            lambda pm=pm, other=other: autopar.load(folder, pm, other),
            lambda pm=pm: autopar.load(folder, pm, torch.optim.SGD([nn.Parameter(torch.ones(3))])),
        ]
        errors = [raised_by(call) for call in calls]
        results.append((errors, trained(pm, optimizer, 3)[1], trained(*made(1, placed), 3)[1]))
    return results


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def states_go_on(folder: Path, name: str, degrees: dict[str, Any]) -> dict[str, float]:
    """How far parameters are, after steps that follow a checkpoint, from those of one process without checkpoints. By
    way: from ranks to ranks, from ranks to one process, from one process to ranks."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, n: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = square(model, x)
            loss.backward()
            return loss

        for _ in range(n):
            optimizer.step(closure)

    def made(on_ranks: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        pair = ready(0, **degrees)
        model = pair[1] if on_ranks else pair[0]
        return model, OPTIMIZERS[name](model.parameters())

    x = ready(0, **degrees)[2]
    plain, wanted = made(False)
    step(plain, wanted, x, 3)
    autopar.save(folder / "plain", plain, wanted, step=3)
    step(plain, wanted, x, 3)
    pm, optimizer = made(True)
    step(pm, optimizer, x, 3)
    autopar.save(folder / "ranks", pm, optimizer, step=3)
    found = {}
    for way, source, on_ranks in (
        ("ranks to ranks", "ranks", True),
        ("ranks to one process", "ranks", False),
        ("one process to ranks", "plain", True),
    ):
        model, late = made(on_ranks)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        autopar.load(folder / source, model, late)
        step(model, late, x, 3)
        others = dict(plain.named_parameters())
        found[way] = max(
            ((p.full_tensor() if isinstance(p, DTensor) else p) - others[n]).abs().max().item()
            for n, p in model.named_parameters()
        )
    return found


def extras(folder: Path, save: bool) -> Any:
    """Extra values that differ between ranks."""
    model = nn.Linear(2, 2)
    if save:
        autopar.save(folder, model, step=5, extra={"own": dist.get_rank(), "same": "x"})
    found = autopar.load(folder, model)
    assert found is not None
    return found.extra


def copied_first(folder: Path) -> list[float]:
    """What an asynchronous save writes although the parameters change meanwhile; then what the next one writes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    found = []
    for step in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float(step))
        autopar.save(folder, model, step=step, asynchronous=True)  # the second waits for the first
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(-1.0)
    for step in (1, 2):
        autopar.load(folder, model, step=step)
        found.append(sum(p.mean().item() for p in model.parameters()) / 16)
    return found


class Counted(nn.Module):
    """A layer with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class TiedAndCounted(nn.Module):
    """Two layers with a state each, and a head that is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Counted(), Counted(), nn.Linear(12, 12)
        self.head.weight = self.a.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.b(self.a(x)))
        return out


def whole_state() -> tuple[list[str], dict[str, Any], bool]:
    """Of a placed model on rank 0: names, what is no tensor, and whether tied names have one tensor. Ranks have counted
    another number of calls each."""
    torch.manual_seed(0)
    model = TiedAndCounted().double()
    names = list(model.state_dict())
    pm = autopar.parallelize(model, plan=autopar.Plan.from_split({"a": 0, "b": 1, "head": 1}, n_microbatches=2))
    pm(torch.randn(4, 12).double())
    for layer in (model.a, model.b):
        layer.calls = 10 + dist.get_rank()
    whole = whole_state_dict(pm)
    if dist.get_rank():
        assert not whole
        return names, {}, True
    fresh = TiedAndCounted().double()
    fresh.load_state_dict(whole)
    assert (fresh.a.calls, fresh.b.calls) == (10, 11)
    objects = {name: value for name, value in whole.items() if not isinstance(value, torch.Tensor)}
    assert list(whole) == names
    return list(whole), objects, whole["head.weight"] is whole["a.linear.weight"]
