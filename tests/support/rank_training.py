"""What ranks do in training beside forward and backward, each beside the plain model in one process: shares of the
batch, clipping, accumulation, gradient scaling, optimizers. Each returns errors relative to the plain model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from rank_behaviour import message_of
from rank_cases import MODELS, Job, loss_of, part_of, plan_of, relative
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import AutoparError
from autopar.capture.torch_private import tree_leaves


def ready(job: Job, **options: Any) -> tuple[nn.Module, Any, torch.Tensor]:
    """The plain model, the same by the plan on ranks, and the whole batch; in float64."""
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build().double(), inputs()
    x = x.double() if x.is_floating_point() else x
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, dist.get_world_size())
    return original, autopar.parallelize(model, plan=plan, **options), x


def own_rows(sizes: Sequence[int]) -> slice:
    start = sum(sizes[: dist.get_rank()])
    return slice(start, start + sizes[dist.get_rank()])


def gradient_error(pm: nn.Module, original: nn.Module) -> float:
    largest = max(p.grad.abs().max().item() for p in original.parameters() if p.grad is not None)
    errors = []
    for name, p in pm.named_parameters():
        whole = original.get_parameter(name).grad
        mine = None if whole is None else part_of(whole, p)
        errors.append(relative(None if p.grad is None else p.grad.to_local().cpu(), mine, largest))
    return max(errors, default=0.0)


@torch.no_grad()
def parameter_error(pm: nn.Module, original: nn.Module) -> float:
    return max(
        (
            relative(
                p.detach().to_local(), part_of(w := original.get_parameter(name).detach(), p), w.abs().max().item()
            )
            for name, p in pm.named_parameters()
        ),
        default=0.0,
    )


def own_error(found: torch.Tensor, whole: torch.Tensor, own: slice) -> float:
    """Of an output: this rank's samples of it, or one value of all."""
    wanted = whole[own] if whole.dim() else whole
    return relative(found, wanted, 1.0) if found.shape == wanted.shape else math.inf


def own_shares(job: Job, sizes: Sequence[Sequence[int]]) -> list[float]:
    """Training steps and evaluations where every rank passes its own samples; `sizes`: of every step, by rank."""
    original, pm, x = ready(job, data="per-rank")
    errors, losses = [], []

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target)

    for step_sizes in sizes:
        whole, own = x[: sum(step_sizes)], own_rows(step_sizes)
        pm.zero_grad()
        original.zero_grad()
        loss, outputs = pm.train_step(whole[own], target=whole[own], loss_fn=loss_fn, return_outputs=True)
        expected = original(whole)
        wanted = loss_fn(expected, whole)
        wanted.backward()
        losses.append(loss.item())
        errors += [relative(loss, wanted.detach(), 1.0), gradient_error(pm, original)]
        for a, b in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
            errors.append(own_error(a, b.detach(), own))
        pm.eval()
        original.eval()
        with torch.no_grad():
            for a, b in zip(tree_leaves(pm(whole[own])), tree_leaves(original(whole)), strict=True):
                errors.append(own_error(a, b, own))
        pm.train()
        original.train()
    assert all(theirs == losses for theirs in gathered(losses)), "ranks differ in a loss"
    return errors


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_losses(job: Job, sizes: Sequence[Sequence[int]]) -> list[float]:
    """`loss_fn(pm(x), y).backward()` on every rank's own samples: the loss of the batch is the mean of these losses."""
    original, pm, x = ready(job, data="per-rank")
    errors = []
    for step_sizes in sizes:
        whole, own = x[: sum(step_sizes)], own_rows(step_sizes)
        pm.zero_grad()
        original.zero_grad()
        output = pm(whole[own])
        functional.mse_loss(output, whole[own]).backward()
        functional.mse_loss(original(whole), whole).backward()
        errors += [gradient_error(pm, original), relative(output.detach(), original(whole).detach()[own], 1.0)]
    return errors


class Classifier(nn.Module):
    """Returns its own loss beside what it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.b(torch.tanh(self.a(x)))
        return functional.cross_entropy(logits, labels), logits


def counted_targets() -> list[float]:
    """Losses that count targets, some of them ignored, unevenly over ranks: by `loss_fn`, and by the model itself."""
    errors = []
    for own_loss in (False, True):
        torch.manual_seed(1)
        model = Classifier().double()
        original = copy.deepcopy(model)
        plan = autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
        pm = autopar.parallelize(model, plan=plan, data="per-rank")
        x, y = torch.randn(7, 12).double(), torch.tensor([1, 2, -100, -100, 3, -100, 0])
        for sizes in ((4, 3), (2, 5), (1, 6)):
            own = own_rows(sizes)
            pm.zero_grad()
            original.zero_grad()
            wanted = original(x, y)[0]
            wanted.backward()
            if own_loss:
                loss = pm.train_step(x[own], y[own])
            else:

                def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
                    return functional.cross_entropy(output[1], target)

                loss = pm.train_step(x[own], y[own], target=y[own], loss_fn=loss_fn)
            errors += [relative(loss, wanted.detach(), 1.0), gradient_error(pm, original)]
            pm.zero_grad()
            pm(x[own], y[own])[0].backward()
            errors.append(gradient_error(pm, original))
    return errors


def whole_batch_loss() -> list[float]:
    """A loss that does not split into micro-batches: it runs on the outputs of all ranks."""
    original, pm, x = ready(Job("mlp", "chain"), data="per-rank")
    sizes, errors = (5, 3), []
    own = own_rows(sizes)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().amax()

    for _ in range(2):
        pm.zero_grad()
        original.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, outputs = pm.train_step(x[own], target=x[own], loss_fn=loss_fn, return_outputs=True)
        expected = original(x)
        wanted = loss_fn(expected, x)
        wanted.backward()
        errors += [relative(loss, wanted.detach(), 1.0), gradient_error(pm, original)]
        errors.append(relative(outputs, expected.detach()[own], 1.0))
    return errors


def bytes_received() -> list[int]:
    """Bytes that this rank gets of the inputs and targets of a further step, per-rank data."""
    _, pm, x = ready(Job("mlp", "chain"), data="per-rank")
    own, counts = own_rows((4, 4)), []
    from autopar.runtime.ranks.messages import channels
    from autopar.runtime.ranks.shares import SharedCall

    before = channels.TaggedChannel.receive

    def receive(self: Any, tensor: torch.Tensor, source: int, tag: int) -> Any:
        if is_sharing and tensor.dtype == torch.uint8:
            counts.append(tensor.nbytes)
        return before(self, tensor, source, tag)

    def fetch(self: SharedCall, *args: Any, **kwargs: Any) -> None:
        nonlocal is_sharing
        is_sharing = True
        fetched(self, *args, **kwargs)
        is_sharing = False  # stages send each other rows of bytes as well

    def complete(self: SharedCall, *args: Any, **kwargs: Any) -> None:
        nonlocal is_sharing
        is_sharing = True
        completed(self, *args, **kwargs)
        is_sharing = False

    is_sharing, fetched, completed = False, SharedCall.fetch, SharedCall.complete
    SharedCall.fetch, SharedCall.complete = fetch, complete  # type: ignore[method-assign]
    channels.TaggedChannel.receive = receive
    try:
        found = []
        for _ in range(2):
            pm.train_step(x[own], target=x[own], loss_fn=functional.mse_loss)
            found.append(sum(counts))
            counts.clear()
    finally:
        channels.TaggedChannel.receive = before
        SharedCall.fetch, SharedCall.complete = fetched, completed  # type: ignore[method-assign]
    return found


def evaluated(job: Job, sizes: Sequence[int]) -> list[float]:
    """Evaluation with batches that the meshes do not divide, with the whole batch and with shares of it."""
    errors = []
    for data in ("whole", "per-rank"):
        original, pm, x = ready(job, data=data)
        original.eval()
        pm.eval()
        for n in sizes:
            whole = x[:n]
            own = (
                own_rows((n - n // 2, n // 2, *[0] * (dist.get_world_size() - 2)))
                if data == "per-rank"
                else slice(None)
            )
            with torch.no_grad():
                for a, b in zip(tree_leaves(pm(whole[own])), tree_leaves(original(whole)), strict=True):
                    errors.append(own_error(a, b, own))
    return errors


def clipped(job: Job, norm_type: float, max_norm: float) -> list[float]:
    """Errors of the norm and of clipped gradients, by the module and by a list of its parameters."""
    original, pm, x = ready(job)
    errors = []

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target)

    for how in ("module", "parameters", "before"):
        before = list(pm.unwrap().parameters())
        pm.zero_grad()
        original.zero_grad()
        pm.train_step(x, target=x, loss_fn=loss_fn)
        loss_fn(original(x), x).backward()
        given: Any = {"module": pm, "parameters": pm.parameters(), "before": before}[how]
        norm = autopar.clip_grad_norm_(given, max_norm, norm_type)
        wanted = nn.utils.clip_grad_norm_(original.parameters(), max_norm, norm_type)
        assert len({float(n) for n in gathered(norm)}) == 1, "ranks differ in the norm"
        errors += [relative(norm.double(), wanted, wanted.abs().item()), gradient_error(pm, original)]
    return errors


def clipping_of_a_part() -> list[float]:
    """Only some layers, which one rank alone holds; and inf in a gradient of one rank."""
    original, pm, x = ready(Job("mlp", "chain"))
    pm.train_step(x, target=x, loss_fn=functional.mse_loss)
    functional.mse_loss(original(x), x).backward()
    norm = autopar.clip_grad_norm_((p for n, p in pm.named_parameters() if n.startswith("0.")), 1e-3)
    wanted = nn.utils.clip_grad_norm_(original[0].parameters(), 1e-3)
    errors = [relative(norm.double(), wanted, wanted.item()), gradient_error(pm, original)]
    if dist.get_rank() == 1:
        next(pm.parameters()).grad.to_local().fill_(math.inf)
    try:
        autopar.clip_grad_norm_(pm, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        errors.append(0.0 if "is inf" in str(error) else math.inf)
    else:
        errors.append(math.inf)
    return errors


def accumulated(job: Job, call: str) -> list[float]:
    """Three backwards, two of them inside accumulate(), then a step, twice."""
    original, pm, x = ready(job)
    ours, theirs = torch.optim.AdamW(pm.parameters(), lr=1e-2), torch.optim.AdamW(original.parameters(), lr=1e-2)
    errors = []

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target) / 3

    def backward(part: torch.Tensor) -> None:
        if call == "train_step":
            pm.train_step(part, target=part, loss_fn=loss_fn)
        else:
            loss_fn(pm(part), part).backward()

    for step in range(2):
        for i in range(3):
            part = x.roll(i, 0)[: 8 - 2 * step]
            loss_fn(original(part), part).backward()
            if i < 2:
                with pm.accumulate():
                    backward(part)
            else:
                backward(part)
        errors.append(gradient_error(pm, original))
        ours.step()
        theirs.step()
        ours.zero_grad(set_to_none=step == 0)
        theirs.zero_grad()
        errors.append(parameter_error(pm, original))
    return errors


def accumulation_refused() -> dict[str, str]:
    """Messages for what accumulate() excludes."""
    found = {}
    for what in ("step", "clip", "mixed", "penalty"):
        _, pm, x = ready(Job("mlp", "replicas 2"))
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
        if what != "mixed":
            pm.zero_grad()

        def inside(pm: Any = pm, x: torch.Tensor = x, what: str = what) -> None:
            with pm.accumulate():
                loss = functional.mse_loss(pm(x), x)
                if what == "penalty":
                    loss = loss + sum(p.square().sum().to_local() for p in pm.parameters())
                loss.backward()

        if what in ("mixed", "penalty"):
            found[what] = message_of(inside)
            continue
        inside()
        found[what] = message_of(optimizer.step if what == "step" else lambda pm=pm: autopar.clip_grad_norm_(pm, 1.0))
    return found


class _DTensorCalls(TorchDispatchMode):
    """Counts operators of torch on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def accumulation_of_train_steps() -> tuple[list[str], str, list[float]]:
    """Of train_steps inside accumulate(): the operators on DTensors in the second one, the message for a gradient from
    elsewhere after it, and the errors of the gradients in the end."""
    original, pm, x = ready(Job("mlp", "replicas 2"))

    def step() -> None:
        pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        functional.mse_loss(original(x), x).backward()

    calls = _DTensorCalls()
    with pm.accumulate():
        step()
        with calls:
            pm.train_step(x, target=x, loss_fn=functional.mse_loss)
        functional.mse_loss(original(x), x).backward()
        message = message_of(lambda: sum(p.square().sum().to_local() for p in pm.parameters()).backward())
    step()
    return calls.names, message, [gradient_error(pm, original)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "single AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "plain Adafactor": lambda p: transformers.Adafactor(p, lr=0.01, relative_step=False, scale_parameter=False),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "unrounded Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


def optimized(name: str, plan: str, early: bool, schedule: str = "") -> float | str:
    """The error after four steps of an optimizer; the message, if it is refused. `early`: made before the placing."""
    original, pm, x = ready(Job("mlp", plan))
    if not early:
        with torch.no_grad():
            pm(x)
    make = OPTIMIZERS[name]
    ours, theirs = make(list(pm.parameters())), make(list(original.parameters()))
    schedules = [SCHEDULES[schedule](ours), SCHEDULES[schedule](theirs)] if schedule else []

    def stepped(model: Any, optimizer: torch.optim.Optimizer) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = functional.mse_loss(model(x), x)
            loss.backward()
            return loss

        if name == "LBFGS":
            return float(optimizer.step(closure))
        loss = closure()
        optimizer.step()
        return loss.item()

    # torch's Muon multiplies in bfloat16, where sums in another order differ.
    unrounded = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
    with unrounded if name == "unrounded Muon" else nullcontext():
        for _ in range(4):
            try:
                loss = stepped(pm, ours)
            except AutoparError as refused:
                return f"{type(refused).__name__}: {refused}"
            losses = loss, stepped(original, theirs)
            for one, loss in zip(schedules, losses, strict=False):
                one.step(loss) if schedule == "plateau" else one.step()
    return parameter_error(pm, original)


def optimized_with_others(option: str, plan: str) -> tuple[str, float]:
    """What is said of an optimizer that steps a layer in front of the module together with it; and the error after four
    steps where the layer has a parameter group of its own."""
    original, pm, x = ready(Job("mlp", plan))
    front = torch.nn.Linear(x.shape[1], x.shape[1]).to(x.dtype)
    with torch.no_grad():
        for parameter in front.parameters():
            parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    other, settings = copy.deepcopy(front), {"lr": 0.01, option: True}
    functional.mse_loss(pm(front(x)), x).backward()
    said = message_of(torch.optim.AdamW([*front.parameters(), *pm.parameters()], **settings).step)
    ours, theirs = (
        torch.optim.AdamW([{"params": list(one.parameters())} for one in both], **settings)
        for both in ((front, pm), (other, original))
    )
    for _ in range(4):
        for optimizer, before, model in ((ours, front, pm), (theirs, other, original)):
            optimizer.zero_grad()
            functional.mse_loss(model(before(x)), x).backward()
            optimizer.step()
    apart = max((a - b).abs().max().item() for a, b in zip(front.parameters(), other.parameters(), strict=True))
    return said, max(apart, parameter_error(pm, original))


def scaled(call: str, fused: bool, overflowing: int) -> dict[str, Any]:
    """Steps with a gradient scaler; in one of them a gradient of rank `overflowing` is inf."""
    original, pm, x = ready(Job("mlp", "chain"))
    settings = {"init_scale": 64.0, "growth_interval": 2}
    ours, theirs = autopar.GradScaler("cpu", **settings), torch.amp.GradScaler("cpu", **settings)
    options: dict[str, Any] = {"lr": 1e-2, "fused": True} if fused else {"lr": 1e-2}
    mine = torch.optim.AdamW(pm.parameters(), **options)
    plain = torch.optim.AdamW(original.parameters(), **options)
    errors, scales = [], []
    for step in range(5):
        mine.zero_grad()
        plain.zero_grad()
        if call == "train_step":
            pm.train_step(x, target=x, loss_fn=lambda out, y: ours.scale(functional.mse_loss(out, y)))
        else:
            ours.scale(functional.mse_loss(pm(x), x)).backward()
        theirs.scale(functional.mse_loss(original(x), x)).backward()
        if step == 2:
            if dist.get_rank() == overflowing:
                next(pm.parameters()).grad.to_local().fill_(math.inf)
            original[0].weight.grad.fill_(math.inf)
        else:
            if step % 2:
                ours.unscale_(mine)
                theirs.unscale_(plain)
                autopar.clip_grad_norm_(pm, 0.1)
                nn.utils.clip_grad_norm_(original.parameters(), 0.1)
        ours.step(mine)
        theirs.step(plain)
        ours.update()
        theirs.update()
        errors.append(parameter_error(pm, original))
        scales.append((ours.get_scale(), theirs.get_scale()))
    return {"errors": errors, "scales": scales}


def plain_scaler() -> str:
    """The message for torch's own scaler."""
    _, pm, x = ready(Job("mlp", "chain"))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(pm.parameters(), lr=0.1)
    scaler.scale(functional.mse_loss(pm(x), x)).backward()
    return message_of(lambda: scaler.step(optimizer))


class Gated(nn.Module):
    """Reads a table that belongs to no sample, and has as many rows as some ranks have samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) * table.sum(0))


def shared_inputs() -> list[float]:
    """An input that belongs to no sample has the size of the first rank's share by chance, in some of the steps."""
    torch.manual_seed(1)
    model = Gated().double()
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, plan=autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=2), data="per-rank")
    x, table, errors = torch.randn(8, 12).double(), torch.randn(4, 12).double(), []
    for sizes in ((4, 3), (5, 3), (3, 4)):
        whole, own = x[: sum(sizes)], own_rows(sizes)
        pm.zero_grad()
        original.zero_grad()
        loss = pm.train_step(whole[own], table, target=whole[own], loss_fn=functional.mse_loss)
        wanted = functional.mse_loss(original(whole, table), whole)
        wanted.backward()
        errors += [relative(loss, wanted.detach(), 1.0), gradient_error(pm, original)]
    return errors


def shares_refused() -> dict[str, str]:
    """Messages for shares that make no batch, and the warning for equal ones."""
    rank, found = dist.get_rank(), {}
    torch.manual_seed(1)
    x, table = torch.randn(8, 12), torch.randn(6, 12)

    def step(*args: Any, target: Any, **options: Any) -> str:
        plan = autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
        torch.manual_seed(1)
        pm = autopar.parallelize(Gated(), plan=plan, data="per-rank")
        return message_of(lambda: pm.train_step(*args, target=target, loss_fn=functional.mse_loss, **options))

    found["table"] = step(x[:4], table + rank, target=x[:4])
    found["target"] = step(x[:4], table, target=x[: 4 - rank], target_dim=[0])
    found["none"] = step(x[:0], table, target=x[:0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not step(x, table, target=x)
    found["equal"] = "; ".join(str(one.message) for one in caught if "same samples" in str(one.message))
    return found


def sparse_gradients(table: type[nn.Module], sharded: bool) -> str:
    """The message for an embedding with sparse gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(table(32, 8, sparse=True), nn.Linear(8, 8))
    x = torch.randint(0, 32, (4, 3))
    target = model(x).detach().cos()
    plan = autopar.Plan.from_split({"0": 0, "1": 1}, n_microbatches=1)
    if sharded:
        plan = autopar.Plan.by_hand(model, None, example_args=(x,), data=2)
    pm = autopar.parallelize(model, plan=plan)
    return message_of(lambda: pm.train_step(x, target=target, loss_fn=functional.mse_loss))
