"""What ranks do with plans that cut optimizer states finer than parameters. Each returns what its test compares."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_behaviour import message_of
from rank_cases import of_rank_0
from tied_models import Tied
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Plan
from autopar.runtime.ranks.gradients import buckets
from autopar.runtime.ranks.gradients.gathered import GatheredValues
from autopar.runtime.signatures.captures import CallArguments
from autopar.sharding.stage_sharding import Stored


def odd() -> nn.Module:
    """Some of its parameters cannot be cut in two."""
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 7), nn.LayerNorm(7))


def ready(
    zero: int, build: Callable[[], nn.Module] = odd, *, changed: str = "", **degrees: Any
) -> tuple[nn.Module, Any, torch.Tensor]:
    """A model as it was, its ranks, placed, and a batch. `changed`: the plan is made without ZeRO, of "mesh"es or of
    whole "replicas", and `Plan.with_` cuts states afterwards."""
    n = torch.distributed.get_world_size()
    model, x, plan = planned(zero, n, build, **degrees)
    if changed == "mesh":  # of this model, which lives on
        plan = Plan.by_hand(model, ["cpu"] * n, example_args=(x,), micro_batch=4 // n, data=n)
    if changed == "replicas":
        plan = Plan.from_split({"": 0}, n_microbatches=4, devices=[[f"cpu:{rank}" for rank in range(n)]])
        plan = autopar.plan(model, plan=plan, example_args=(x,), cache=False)
    plan = plan.with_(zero=zero) if changed else plan
    original = copy.deepcopy(model)
    return original, autopar.parallelize(model, plan=plan, example_args=(x,)), x


def planned(
    zero: int, n: int, build: Callable[[], nn.Module] = odd, **degrees: Any
) -> tuple[nn.Module, torch.Tensor, Plan]:
    """A model, a batch, and the plan for `n` ranks."""
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(8, 12, dtype=torch.float64)
    by_hand: dict[str, Any] = {"example_args": (x,), "micro_batch": 4 // n, "data": n, "zero": zero} | degrees
    return model, x, of_rank_0(lambda: Plan.by_hand(copy.deepcopy(model), ["cpu"] * n, **by_hand))


def square(pm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = pm(x)
    loss: torch.Tensor = (output - torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)).square().mean()
    return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "loop": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=1e-2, max_iter=2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps),
}


def stepped_by(optimizer: str, zero: int, steps: int, **degrees: Any) -> dict[str, Any]:
    """Twenty steps or so beside one process, gradients of two calls added up in each; or the message of the error."""
    original, pm, x = ready(zero, **degrees)
    ours, theirs = OPTIMIZERS[optimizer](pm.parameters()), OPTIMIZERS[optimizer](original.parameters())

    def closure(model: nn.Module, one: torch.optim.Optimizer) -> Any:
        one.zero_grad()
        for part in (x, 2 * x):
            loss = square(model, part)
            loss.backward()
        return loss

    for _ in range(steps):
        message = message_of(lambda: ours.step(lambda: closure(pm, ours)))
        if message:
            return {"message": message}
        theirs.step(lambda: closure(original, theirs))
    wanted = dict(original.named_parameters())
    return {
        "message": "",
        "error": max((p.full_tensor() - wanted[name]).abs().max().item() for name, p in pm.named_parameters()),
        "names": [name for name, _ in pm.named_parameters()] == list(wanted),
        "state": list(pm.state_dict()) == list(original.state_dict()),
        "cut": {name: p.to_local().numel() / p.numel() for name, p in pm.named_parameters()},
        "entries": {
            name: {
                t.to_local().numel() / p.numel() for t in ours.state[p].values() if isinstance(t, DTensor) and t.dim()
            }
            for name, p in pm.named_parameters()
        },
    }


def stepped_in_small_buckets(zero: int, degrees: dict[str, Any], width: int) -> float:
    """The parameters' largest error after steps of which some freeze a parameter, where most matrices are larger than a
    bucket.

    `width`: of every layer. Jobs of one pool need different ones, because DTensor's caches outlive process groups.
    """

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(12, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(buckets, "BUCKET_BYTES", 1024)
        original, pm, x = ready(zero, build, **degrees)
        ours, theirs = OPTIMIZERS["adamw"](pm.parameters()), OPTIMIZERS["adamw"](original.parameters())
        for step in range(6):
            for model, optimizer in ((pm, ours), (original, theirs)):
                for name, p in model.named_parameters():
                    p.requires_grad_(step not in (2, 3) or name not in ("0.bias", "2.weight"))
                optimizer.zero_grad()
                square(model, x).backward()
                optimizer.step()
    wanted = dict(original.named_parameters())
    return max((p.full_tensor() - wanted[name]).abs().max().item() for name, p in pm.named_parameters())


def entries_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[DTensor]:
    """States of a parameter's entries; not numbers of steps."""
    return [t for t in optimizer.state[parameter].values() if isinstance(t, DTensor) and t.dim()]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 1000, bias=False), nn.Tanh(), nn.Linear(1000, 12, bias=False))


def live_bytes() -> int:
    """Of all tensors in this process that have values, each memory once."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and type(one) in (torch.Tensor, nn.Parameter) and not one.is_meta:
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(found.values())


def memory_left(zero: int) -> float:
    """What a rank holds between two steps of Adam, in sizes of the model."""

    def beyond_before() -> float:
        before = live_bytes()
        original, pm, x = ready(zero, wide)
        size = sum(p.nbytes for p in original.parameters())
        del original
        optimizer = torch.optim.Adam(pm.parameters(), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            square(pm, x).backward()
            optimizer.step()
        optimizer.zero_grad()
        return (live_bytes() - before) / size

    beyond_before()  # what the process keeps to measure the machine is there from now on
    return beyond_before()


def parameters_held(zero: int) -> int:
    """Bytes of a rank's parameters, measured: what placing leaves of all tensors, without the batch."""
    before = live_bytes()
    original, pm, x = ready(zero, wide)
    del original
    found = live_bytes() - before - x.nbytes
    pm.close()
    return found


def gradients_between(zero: int) -> list[float]:
    """After every backward of a micro-batch, what a rank holds of gradients, in sizes of the model. Two calls."""
    original, pm, x = ready(zero, wide)
    size = sum(p.nbytes for p in original.parameters())
    executable = pm._signatures.bind(CallArguments((x,), {})).signature.executable
    sums, seen = executable.sums, []
    act = sums.after_backward

    def after_backward(stage: int) -> None:
        act(stage)
        leaves = [leaf.tensor for one in executable.replicas for leaf in one.leaves]
        held = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
        seen.append(held / size)

    sums.after_backward = after_backward
    for _ in range(2):
        square(pm, x).backward()
    return seen


def seen_changes() -> dict[str, float | int]:
    """Errors of calls after a parameter was changed in some way, and how many gathers calls take without a change."""
    rank = torch.distributed.get_rank()
    original, pm, x = ready(1)
    found: dict[str, float | int] = {}

    def compare(what: str) -> None:
        with torch.no_grad():
            found[what] = (pm(x) - original(x)).abs().max().item()

    weight, wanted = pm.get_parameter("0.weight"), original.get_parameter("0.weight")
    compare("before")
    with torch.no_grad():
        weight.mul_(2.0)
        wanted.mul_(2.0)
    compare("in place")
    if rank == 1:  # a change that only one rank knows of
        weight.to_local().data.add_(1.0)
    wanted.data[12:].add_(1.0)
    compare("on one rank, through .data")
    with pytest.MonkeyPatch.context() as patch:
        gathers: list[Any] = []
        before = GatheredValues._write

        def write(self: GatheredValues, *args: Any) -> None:
            gathers.append(args)
            before(self, *args)

        patch.setattr(GatheredValues, "_write", write)
        compare("again")
        found["gathers"] = len(gathers)
    return found


def changed_between() -> str:
    """The error of a backward whose parameters were changed, and used again, after its forward."""
    _, pm, x = ready(1)
    loss = square(pm, x)
    with torch.no_grad():
        for p in pm.parameters():
            p.mul_(2.0)
        pm(x)
    with pytest.raises(RuntimeError) as error:
        loss.backward()
    return str(error.value)


def tied_values(zero: int) -> list[torch.Tensor]:
    """All entries of the tied weight, as the ranks of this rank's stage store them, after three steps."""
    torch.manual_seed(0)
    model, x = Tied(64, 16), torch.randint(64, (8, 6))
    plan = of_rank_0(
        lambda: Plan.by_hand(copy.deepcopy(model), ["cpu"] * 4, example_args=(x,), pipeline=2, data=2, zero=zero)
    )
    pm = autopar.parallelize(model, plan=plan, example_args=(x,))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        pm.train_step(x, target=x, loss_fn=lambda loss, _: loss)
        optimizer.step()
    named: dict[str, Any] = dict(pm.named_parameters(remove_duplicate=False))
    return [p.full_tensor().detach() for name, p in named.items() if name in ("embed.weight", "head.weight")]


def refused_states() -> dict[str, str]:
    """Messages by what is wrong with the stored state."""
    torch.manual_seed(0)
    model, x = odd(), torch.randn(8, 12)
    plan = of_rank_0(lambda: Plan.by_hand(copy.deepcopy(model), ["cpu"] * 2, example_args=(x,), data=2))

    def message(**stored: Stored) -> str:
        (stage,) = plan.stages
        assert stage.sharding is not None
        others = {name.replace("_", "."): one for name, one in stored.items()}
        parameters = {**stage.sharding.stored, **{name.strip("p"): one for name, one in others.items()}}
        sharding = replace(stage.sharding, parameters=tuple(parameters.items()))
        changed = replace(plan, stages=(replace(stage, sharding=sharding),))
        return message_of(lambda: autopar.parallelize(copy.deepcopy(model), plan=changed, example_args=(x,)))

    return {
        "uneven": message(p2_weight=Stored((-1,), (0,))),
        "no dimension": message(p2_bias=Stored((-1,), (1,))),
        "elsewhere": message(p0_weight=Stored((0,), (1,))),
        "partial": message(p0_weight=Stored((-1,), (-2,))),
        "coarser": message(p0_weight=Stored((0,), (-1,))),
        "sparse": message_of(lambda: ready(0, lambda: Sparse())),
    }


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(4, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((x > 0).long()))


def tied_with_other_states() -> str:
    """The message where two stages share a weight and cut its state differently."""
    torch.manual_seed(0)
    model, x = Tied(64, 16), torch.randint(64, (8, 6))
    plan = of_rank_0(
        lambda: Plan.by_hand(copy.deepcopy(model), ["cpu"] * 4, example_args=(x,), pipeline=2, data=2, zero=1)
    )
    last = plan.stages[-1]
    assert last.sharding is not None
    parameters = tuple((name, Stored(one.layout, one.layout)) for name, one in last.sharding.parameters)
    changed = replace(last, sharding=replace(last.sharding, parameters=parameters))
    plan = replace(plan, stages=(*plan.stages[:-1], changed))
    return message_of(lambda: autopar.parallelize(model, plan=plan, example_args=(x,)))


def on_two_meshes(optimizer: str) -> str:
    """The message of an optimizer's step over two stages."""
    _, pm, x = ready(0, data=1, pipeline=2)
    one = OPTIMIZERS[optimizer](pm.parameters())
    square(pm, x).backward()
    closure: Callable[[], Any] = lambda: square(pm, x)  # noqa: E731
    return message_of(lambda: one.step(closure))


class TwiceTied(nn.Module):
    """Two tables, each read by the first stage and by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(64, 16), nn.Embedding(64, 16)
        self.mix, self.out = nn.Linear(16, 16), nn.Linear(16, 64, bias=False)
        self.more = nn.Linear(16, 64, bias=False)
        self.out.weight, self.more.weight = self.first.weight, self.second.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.first(ids) + self.second(ids)))
        logits = self.out(hidden) + self.more(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tied_with_other_scattering(stage: int) -> float:
    """The error of gradients where one `stage` of two that share weights scatters the gradient of one of them."""
    torch.manual_seed(0)
    model, x = TwiceTied().double(), torch.randint(64, (8, 6))
    original = copy.deepcopy(model)
    plan = of_rank_0(
        lambda: Plan.by_hand(copy.deepcopy(model), ["cpu"] * 4, example_args=(x,), pipeline=2, data=2, zero=1)
    )
    one = plan.stages[stage]
    assert one.sharding is not None
    names = {"first.weight", "out.weight"}
    assert names & dict(one.sharding.parameters).keys()
    parameters = tuple(
        (name, replace(stored, scattered=True) if name in names else stored) for name, stored in one.sharding.parameters
    )
    stages = list(plan.stages)
    stages[stage] = replace(one, sharding=replace(one.sharding, parameters=parameters))
    pm = autopar.parallelize(model, plan=replace(plan, stages=tuple(stages)))
    errors = []
    for _ in range(2):
        pm.train_step(x, target=x, loss_fn=lambda loss, _: loss)
        original(x).backward()
        wanted = dict(original.named_parameters(remove_duplicate=False))
        for name, p in pm.named_parameters():
            whole = wanted[name].grad
            assert whole is not None
            errors.append((p.grad.full_tensor() - whole).abs().max().item())
    return max(errors)
