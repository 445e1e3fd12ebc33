"""Random operators: reproducible by torch's seed whatever the threads do, and as random as the original's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import assert_same_outputs, bert, gradients, loss_of, mlp, ragged_mask, tokens
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import PipelinedModule, Plan
from autopar.lower.random_operators import mix_seed, scaled_dot_product_attention


class Dropping(nn.Module):
    """nn.Dropout in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.b(self.drop(self.a(x).relu())))


class DroppingLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)[0])


class OtherKinds(nn.Module):
    """Every way of drawing numbers that is not nn.Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 4, 1)
        self.channels, self.alpha = nn.Dropout1d(0.3), nn.AlphaDropout(0.2)
        self.inplace, self.leaky = nn.Dropout(0.2, inplace=True), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inplace(self.channels(self.a(x)))
        y = self.alpha(self.leaky(y)) + 0.1 * torch.randn_like(y) * torch.rand(y.shape)
        return self.b(y) * torch.bernoulli(torch.full_like(x, 0.9))


def _bert_inputs() -> dict[str, Any]:
    return {"input_ids": tokens(6), "attention_mask": ragged_mask(6)}


AB = {"a": 0, "b": 1}
CASES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "dropout": (Dropping, lambda: {"x": torch.randn(6, 8)}, AB),
    "attention": (lambda: bert(dropout=0.2), _bert_inputs, {"bert.embeddings": 0, "bert.encoder.layer.1": 1}),
    "lstm": (DroppingLSTM, lambda: {"x": torch.randn(6, 5, 8)}, AB),
    "other kinds": (OtherKinds, lambda: {"x": torch.randn(6, 4, 5)}, AB),
}


def make(name: str, replicated: bool = False) -> tuple[PipelinedModule, dict[str, Any]]:
    build, inputs, split = CASES[name]
    devices: list[Any] | None = [("cpu:0", "cpu:1")] if replicated else None
    plan = Plan.from_split(dict.fromkeys(split, 0) if replicated else split, n_microbatches=3, devices=devices)
    return autopar.parallelize(build(), ["cpu", "cpu"], plan=plan), inputs()


def steps(pm: PipelinedModule, inputs: dict[str, Any], seed: int, how: str) -> list[torch.Tensor]:
    """Losses and gradients of two steps after a seed."""
    torch.manual_seed(seed)
    found: list[torch.Tensor] = []
    for _ in range(2):
        if how == "train_step":
            found.append(pm.train_step(**inputs, target=torch.zeros(6), loss_fn=loss_of))
        else:
            loss = loss_of(pm(**inputs), torch.zeros(6))
            loss.backward()
            found.append(loss.detach())
        found += [g.clone() for g in gradients(pm).values() if g is not None]
    return found


def assert_reproducible(pm: PipelinedModule, inputs: dict[str, Any]) -> None:
    """One seed gives the same bits at every run; the next step and another seed give others."""
    for how in ("loss.backward", "train_step"):
        first = steps(pm, inputs, 1, how)
        for _ in range(4):
            again = steps(pm, inputs, 1, how)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        half = len(first) // 2
        assert not torch.equal(first[0], first[half]), "the second step draws other numbers"
        assert not torch.equal(first[0], steps(pm, inputs, 2, how)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("replicated", [False, True], ids=["stages", "replicas"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(name: str, replicated: bool) -> None:
    assert_reproducible(*make(name, replicated))


@pytest.mark.parametrize("name", CASES)
def test_planning_and_evaluation_draw_nothing(name: str) -> None:
    pm, inputs = make(name)
    before = torch.get_rng_state()
    pm.prepare((), inputs)
    assert torch.equal(torch.get_rng_state(), before), "preparing draws nothing"
    if name != "other kinds":
        pm.eval()
        assert_same_outputs(pm(**inputs), pm.unwrap()(**inputs))
        assert torch.equal(torch.get_rng_state(), before), "evaluation draws nothing"


def test_a_model_without_dropout_leaves_the_global_generator_alone() -> None:
    pm = autopar.parallelize(mlp(), ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "4": 1}, n_microbatches=2))
    before = torch.get_rng_state()
    pm(torch.zeros(4, 16)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


class OnlyDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dropout(0.25), nn.Identity()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x * self.scale)


def test_dropout_keeps_the_right_share_and_mean_and_no_two_micro_batches_share_a_mask() -> None:
    plan = Plan.from_split({"a": 0}, n_microbatches=4, devices=[("cpu:0", "cpu:1")])
    pm, n = autopar.parallelize(OnlyDropout(), ["cpu", "cpu"], plan=plan), 10_000
    output = pm(torch.ones(4, n))
    kept = output != 0
    torch.testing.assert_close(output[kept], torch.full_like(output[kept], 1 / 0.75))
    sigma = (0.25 * 0.75 / (4 * n)) ** 0.5
    assert abs(kept.float().mean().item() - 0.75) < 5 * sigma
    for i in range(4):
        for j in range(i):
            both = (kept[i] & kept[j]).float().mean().item()  # independent: 0.75^2
            assert abs(both - 0.75**2) < 5 * (0.25 / n) ** 0.5
    output.sum().backward()
    torch.testing.assert_close(pm.unwrap().scale.grad, output.sum().detach())  # the same mask, backwards


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_of_dropouts_range_are_exact(p: float) -> None:
    model = OnlyDropout()
    model.a.p = p
    plan = Plan.from_split({"a": 0}, n_microbatches=2, devices=[("cpu:0", "cpu:1")])
    pm, x = autopar.parallelize(model, ["cpu", "cpu"], plan=plan), torch.randn(4, 6)
    torch.testing.assert_close(pm(x), x * (1 - p))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_our_attention_is_torchs_where_nothing_is_dropped(mask: str, grouped: bool) -> None:
    q = torch.randn(2, 4, 5, 8)
    k, v = torch.randn(2, 2, 2 if grouped else 4, 5, 8)
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    allowed[..., 0] = True
    options: dict[str, Any] = {"is_causal": mask == "causal", "enable_gqa": grouped, "scale": 0.2}
    if mask == "bool":
        options["attn_mask"] = allowed
    if mask == "float":
        options["attn_mask"] = torch.randn(2, 1, 5, 5)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **options), expected)


def test_mixed_seeds_of_neighbouring_steps_micro_batches_and_stages_differ() -> None:
    seeds = {mix_seed(step, m, stage) for step in range(20) for m in range(20) for stage in range(20)}
    assert len(seeds) == 20**3
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_stage_seeds_no_generator_of_a_device_that_its_operators_do_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed all GPUs of the process."""
    seeded_gpus: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded_gpus.append)
    model = nn.Sequential(nn.Linear(4, 4), nn.RReLU())
    pm = autopar.parallelize(model, ["cpu"], plan=Plan.from_split({"0": 0}, n_microbatches=2), cache=False)
    before = torch.get_rng_state()
    first = pm(torch.ones(4, 4))
    assert not seeded_gpus
    torch.set_rng_state(before)
    assert torch.equal(pm(torch.ones(4, 4)), first), "the caller's generator decides"
