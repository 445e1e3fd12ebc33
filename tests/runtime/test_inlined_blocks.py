"""Blocks of a model under no_grad or autocast are taken apart: stages and shards divide them, and results stay the
plain model's, bit for bit where the kernels are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar import Cluster, Plan, PlanError

WIDTH, HEADS, WORDS, LENGTH, SAMPLES = 16, 2, 12, 6, 8
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.out(y)
        mixed: torch.Tensor = x + self.mlp(x)
        return mixed


class Gpt(nn.Module):
    """Wholly under autocast, with tied weights and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            h = self.embedding(x)
            for block in self.blocks:
                h = block(h)
            logits = self.head(h)
            return functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), x[:, 1:].reshape(-1))


class Frozen(nn.Module):
    """A backbone with batch norm under no_grad, a head in float32 inside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(WORDS, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.neck, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = self.backbone(functional.one_hot(x, WORDS).mT.float()).mean(2)
        with torch.autocast("cpu", BF16):
            h = self.neck(h).relu()
            with torch.autocast("cpu", enabled=False):
                h = self.head(h.float())
        return h


class Recurrent(nn.Module):
    """An LSTM, whose casts no others replace."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            h, (last, _) = self.rnn(self.embedding(x))
            y: torch.Tensor = self.head(h + last.mT.mT[0].unsqueeze(1))
        return y


class Mixed(nn.Module):
    """no_grad inside of autocast and the other way round, einsum, a weight used twice. It asks for the dtype of what an
    LSTM returns, which torch.export says wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.first, self.twice, self.teacher = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embedding(x)
        with torch.no_grad(), torch.autocast("cpu", BF16):
            target = self.teacher(h).softmax(-1)
        with torch.autocast("cpu", BF16):
            h, _ = self.rnn(h)
            with torch.no_grad():
                gate = self.teacher(h).sigmoid().to(h.dtype)
            h = torch.einsum("btw,wv->btv", self.first(h), self.scale) * gate
            h = self.twice(self.twice(h).tanh()) + h.sum(-1, keepdim=True)
        return h.float(), (h * target).mean((1, 2))


def words() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(WORDS, (SAMPLES, LENGTH))


def tensors(output: Any) -> tuple[torch.Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def total(output: Any) -> torch.Tensor:
    summed: torch.Tensor = sum((one.float().mean() for one in tensors(output)), torch.zeros(()))
    return summed


class Detached(nn.Module):
    """Reads a weight with its gradient and without, in both orders; changes sizes in place; asks for float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1)
        self.first, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            h = self.embedding(x)
            h = functional.linear(functional.linear(h, self.first), self.first.detach())
            h = functional.linear(functional.linear(h, self.last.detach()).float(), self.last)
            y: torch.Tensor = self.head(h).to(torch.float32).squeeze_(-1)
        return y


MODELS: list[tuple[Callable[[], nn.Module], dict[str, int]]] = [
    (Gpt, {"embedding": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "head": 1}),
    (Frozen, {"backbone": 0, "neck": 0, "head": 1}),
    (Detached, {"embedding": 0, "head": 1}),
    (Recurrent, {"embedding": 0, "rnn": 0, "head": 1}),
    (Mixed, {"embedding": 0, "rnn": 0, "first": 0, "twice": 1}),
]


@pytest.mark.parametrize("around", [False, True], ids=["alone", "around"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("make", "split"), MODELS, ids=[make.__name__ for make, _ in MODELS])
def test_a_model_with_blocks_trains_in_stages_as_alone(
    make: Callable[[], nn.Module], split: dict[str, int], micro: int, around: bool
) -> None:
    """`around`: the call runs under the same autocast."""
    torch.manual_seed(0)
    model, x = make(), words()
    alone = copy.deepcopy(model)
    plan = Plan.from_split(split, n_microbatches=micro, schedule="1f1b")
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    own = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        with torch.autocast("cpu", BF16, enabled=around):
            loss = total(pm(x))
        loss.backward()
        for part in x.chunk(micro):
            with torch.autocast("cpu", BF16, enabled=around):
                loss = total(alone(part)) / micro
            loss.backward()
        for one, two in zip(model.parameters(), alone.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None and two.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-6)
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    alone.eval()
    with torch.no_grad():
        for one, two in zip(tensors(pm(x)), tensors(alone(x)), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_shards_divide_the_operators_of_a_block() -> None:
    torch.manual_seed(0)
    model, x = Gpt(), words()
    alone = copy.deepcopy(model)
    plan = Plan.by_hand(model, ["cpu", "cpu"], example_args=(x,), tensor=2, micro_batch=SAMPLES)
    assert {len(stage.devices) for stage in plan.stages} == {2}
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    total(pm(x)).backward()
    total(alone(x)).backward()
    for one, two in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=5e-2, atol=2e-3)


def test_a_plan_ahead_divides_a_block_of_equal_layers() -> None:
    with torch.device("meta"):
        model = Gpt()
    cluster = Cluster.preset("2xH100")
    plan = Plan.by_hand(model, cluster, example_args=(words(),), pipeline=2, micro_batch=2)
    for stage, layers in zip(plan.stages, ((0, 1), (2, 3)), strict=True):
        assert all(any(f"blocks.{layer}.mlp.0/linear" in key for key in stage.operators) for layer in layers)


def test_hooks_of_modules_in_a_block_run() -> None:
    model, x = Gpt(), words()
    seen: list[torch.dtype] = []
    inner = model.get_submodule("blocks.2.mlp.0")
    inner.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split(MODELS[0][1], n_microbatches=2))
    total(pm(x)).backward()
    assert seen == [BF16, BF16]


def test_the_autocast_of_the_call_decides_whether_a_block_is_divided() -> None:
    """The block's own autocast around the call changes nothing; another one keeps the block whole."""
    torch.manual_seed(0)
    model, x = Frozen(), words()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"backbone": 0, "neck": 1}, n_microbatches=1))
    for around in (BF16, None, BF16):
        with torch.autocast("cpu", around, enabled=around is not None):
            torch.testing.assert_close(pm(x), alone(x), rtol=0, atol=0)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"backbone": 0, "neck": 1}, n_microbatches=1))
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(PlanError, match=r"'neck' cannot be a stage of its own: .* the call runs under another autocast"),
    ):
        pm(x)
    pm = autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=2, tune=0)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(pm(x), torch.cat([alone(part) for part in x.chunk(2)]), rtol=1e-3, atol=1e-3)


class Kept(nn.Module):
    """Under no_grad, operators return what they take; what follows goes on with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.teacher, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            g = self.teacher(functional.dropout(h.float().flatten(1).to("cpu"), 0.0)).sigmoid()
        y: torch.Tensor = self.last(h * g)
        return y


@pytest.mark.parametrize("micro", [1, 2])
def test_what_no_grad_returns_unchanged_keeps_its_gradient(micro: int) -> None:
    torch.manual_seed(0)
    model, x = Kept(), torch.randn(SAMPLES, WIDTH, requires_grad=True)
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"first": 0, "last": 1}, n_microbatches=micro))
    found = torch.autograd.grad(pm(x).square().sum(), [x, model.first.weight, model.last.weight])
    expected = torch.autograd.grad(alone(x).square().sum(), [x, alone.first.weight, alone.last.weight])
    torch.testing.assert_close(found, expected)


class Shared(nn.Module):
    """The first of two blocks that share a weight stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            with torch.autocast("cpu", BF16):
                h = _Twice.apply(self.first(x))
            with torch.autocast("cpu", BF16):
                y: torch.Tensor = self.first(h).float()
        return self.last(y)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.filterwarnings("ignore:.*runs uncaptured")
def test_a_block_that_stays_whole_leaves_nothing_to_the_next() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(SAMPLES, WIDTH)
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"first": 0, "last": 1}, n_microbatches=1))
    found = torch.autograd.grad(pm(x).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(alone(x).square().sum(), list(alone.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)  # the plain model sums in bfloat16
