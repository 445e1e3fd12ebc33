"""Models built without values, on ranks: where their values come from, and what a rank holds meanwhile."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_cases import MODELS, Job, loss_of, plan_of
from rank_checkpoints import batch, message_of
from torch import nn

import autopar
from autopar.runtime.checkpoints.participants import participants
from autopar.runtime.initial_values import sources


def named_values(name: str, tensor: torch.Tensor) -> None:
    """An init_fn: weights at random, norms to one, everything else to zero."""
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.05)
    else:
        tensor.fill_(1 if "ln" in name and name.endswith("weight") else 0)


def first_losses(job: Job, where: str, weights: Path | None, named: bool = False, steps: int = 3) -> list[float]:
    """Of a model that is built `where`: "meta", "rank 0" (on the others without values) or "here"."""
    torch.manual_seed(5)
    example = batch(job.model)
    n = dist.get_world_size() if dist.is_initialized() else 2
    plan = plan_of(job, MODELS[job.model][0]().double(), example, n)
    torch.manual_seed(3)
    meta = where == "meta" or (where == "rank 0" and dist.get_rank() > 0)
    with torch.device("meta" if meta else "cpu"):
        model = MODELS[job.model][0]().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # of tensors without values
    devices = None if dist.is_initialized() else ["cpu"] * n
    source: dict[str, Any] = {"weights": weights} if weights is not None else {}
    source |= {"init_fn": named_values} if named else {}
    pm = autopar.parallelize(model, devices, plan=plan, **source)
    found = []
    torch.manual_seed(7)
    for _ in range(steps):
        x = batch(job.model)
        optimizer.zero_grad()
        loss = pm.train_step(x, target=x, loss_fn=lambda output, target: loss_of(job.model, output, target))
        optimizer.step()
        found.append(loss.item())
    return found


def sending_fails(rank: int) -> tuple[str, list[float]]:
    """The error when memory runs out on a rank while rank 0 sends parts; then the first entry of each, sent again."""
    team = participants()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    targets = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    left, bytes_of = [3], sources._bytes
    for p in model.parameters():
        nn.init.constant_(p, 2.0)

    def without_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
        left[0] -= 1
        if not left[0]:
            raise MemoryError("no memory left")
        return bytes_of(tensor)

    if team.rank == rank:
        sources._bytes = without_memory
    source = sources.FirstRankSource(team, model, list(targets))
    message = message_of(lambda: team.done("no values", lambda: source.fill(targets)))
    sources._bytes = bytes_of
    again = sources.FirstRankSource(team, model, list(targets))
    team.done("no values", lambda: again.fill(targets))
    return message, [tensor.flatten()[0].item() for tensor in targets.values()]


# -- memory ------------------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 12, 3072  # 12 x 36 MiB, more than the 32 MiB up to which the C library keeps freed blocks
WHOLE = LAYERS * WIDTH * WIDTH * 4  # bytes


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def small_weights(name: str, tensor: torch.Tensor) -> None:
    tensor.normal_(std=0.02)


def under_a_limit(where: str, weights: Path | None) -> dict[str, Any]:
    """A model of twice what a rank may allocate: its output, the rank's peak of memory, or what went wrong."""
    plan = autopar.Plan.from_split({"": 0}, devices=[["cpu:0", "cpu:1"]], n_microbatches=2)
    autopar.parallelize(nn.Linear(2, 2), plan=plan)(
        torch.ones(2, 2)
    )  # what torch and autopar need for themselves is there from now on
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    used = _status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(0.8 * WHOLE), resource.RLIM_INFINITY))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
        try:
            output = _output(where, weights)
        except (RuntimeError, MemoryError) as error:
            return {"failed": str(error)}
        return {"output": output, "peak": _status("VmHWM") - before}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _output(where: str, weights: Path | None) -> list[float]:
    with torch.device("meta" if where == "meta" else "cpu"):
        model = large()
    plan = autopar.Plan.from_split({str(i): int(i >= LAYERS // 2) for i in range(LAYERS)}, n_microbatches=2)
    source: dict[str, Any] = {"init_fn": small_weights} if weights is None else {"weights": weights}
    torch.manual_seed(11)
    pm = autopar.parallelize(model, plan=plan, **(source if where == "meta" else {}))
    with torch.no_grad():
        return pm(torch.ones(4, WIDTH)).sum(1).tolist()


def _status(key: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def refused(folder: Path) -> list[str]:
    """Models without values that cannot start, on each rank."""
    rank = dist.get_rank()
    autopar.save(folder / "other", nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)), step=1)
    autopar.save(folder / "part", nn.Sequential(nn.Linear(4, 4)), step=1)
    plan = autopar.Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)

    def start(where: str = "meta", **options: Any) -> None:
        with torch.device(where):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pm = autopar.parallelize(model, **options)
        if "save" not in str(options.get("init_fn")):
            pm(torch.ones(2, 4))

    def saved_early() -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pm = autopar.parallelize(model, plan=plan, init_fn=named_values)
        autopar.save(folder / "early", pm, step=1)

    return [
        message_of(call)
        for call in (
            lambda: start(plan=plan),
            lambda: start(weights=folder / "part"),
            lambda: start(weights=folder / "part", plan=plan),
            lambda: start(weights=folder / "other", plan=plan),
            lambda: start(weights=folder / "nothing", plan=plan),
            lambda: start("cpu", weights=folder / "part", plan=plan),
            lambda: start("meta" if rank == 0 else "cpu", plan=plan),
            saved_early,
        )
    ]
