"""Every schedule gives the outputs and gradients of the original model, with whole and with split backwards."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, mlp
from torch import nn

import autopar
from autopar import InputError, PipelinedModule, Plan
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.runtime.step.passes import Passes
from autopar.schedule.builders import INTERLEAVED, SCHEDULES, V_SHAPED, ranks_of_stages

pytestmark = pytest.mark.usefixtures("shared_exports")


class Residual(nn.Module):
    """Layers that later stages read past their neighbours, with a tied weight and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x * first)


class Attention(nn.Module):
    """Self-attention and a recurrent layer, whose kernels compute the gradients of inputs and weights together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.0)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.gru(self.rnn(x)[0])[0]).mean(1)


def residual_split(n_stages: int) -> dict[str, int]:
    modules = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "conv", "head"]
    return {name: min(i * n_stages // len(modules), n_stages - 1) for i, name in enumerate(modules)}


def ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 32, (rows, 6), generator=torch.Generator().manual_seed(0))


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


PLANS = {
    "gpipe": Plan.from_split(residual_split(2), n_microbatches=3, schedule="gpipe"),
    "1f1b": Plan.from_split(residual_split(2), n_microbatches=3, schedule="1f1b"),
    "zb-h1": Plan.from_split(residual_split(2), n_microbatches=3, schedule="zb-h1"),
    "interleaved, 2 chunks": Plan.from_split(
        residual_split(4), n_microbatches=3, schedule="interleaved-1f1b", devices=["cpu:0", "cpu:1"] * 2
    ),
    "interleaved, 3 chunks": Plan.from_split(
        residual_split(6), n_microbatches=4, schedule="interleaved-1f1b", devices=["cpu:0", "cpu:1"] * 3
    ),
    "interleaved-zb": Plan.from_split(
        residual_split(4), n_microbatches=3, schedule="interleaved-zb", devices=["cpu:0", "cpu:1"] * 2
    ),
    "zb-v": Plan.from_split(
        residual_split(4), n_microbatches=3, schedule="zb-v", devices=["cpu:0", "cpu:1", "cpu:1", "cpu:0"]
    ),
}


def run(model: nn.Module, plan: Plan, batch: torch.Tensor, target: torch.Tensor, way: str) -> PipelinedModule:
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    if way == "train_step":
        pm.train_step(batch, target=target, loss_fn=square)
    else:
        square(pm(batch), target).backward()
    return pm


@pytest.mark.parametrize("way", ["call and backward", "train_step"])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_schedule_gives_the_models_outputs_and_gradients(plan: Plan, recompute: bool, way: str) -> None:
    torch.manual_seed(0)
    model = Residual()
    original = copy.deepcopy(model)
    stages = tuple(dataclasses.replace(stage, recompute=recompute) for stage in plan.stages)
    batch, target = ids(8), torch.randn(8, 6, 32)  # three micro-batches of 3, 3 and 2 samples
    square(original(batch), target).backward()
    pm = run(model, dataclasses.replace(plan, stages=stages), batch, target, way)
    assert_same_gradients(gradients(model), gradients(original))
    with torch.no_grad():
        assert_same_outputs(pm(batch), original(batch))
    model.eval()
    original.eval()
    assert_same_outputs(pm(batch[:5]), original(batch[:5]))


@pytest.mark.slow
def test_the_choice_of_schedule_does_not_change_a_bit_of_the_gradients() -> None:
    torch.manual_seed(0)
    names = ("gpipe", "1f1b", "zb-h1", "interleaved-zb", "zb-v")
    models = [Residual() for _ in names]
    batch, target = ids(8), torch.randn(8, 6, 32)
    for model, name in zip(models, names, strict=True):
        model.load_state_dict(models[0].state_dict())
        run(model, PLANS[name], batch, target, "train_step")
    first, *others = (gradients(model) for model in models)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in INTERLEAVED])
def test_replicated_stages_run_every_schedule(schedule: str) -> None:
    torch.manual_seed(0)
    model = Residual()
    original = copy.deepcopy(model)
    devices = [["cpu:0", "cpu:1"], ["cpu:2"]]
    plan = Plan.from_split(residual_split(2), n_microbatches=5, schedule=schedule, devices=devices)
    batch, target = ids(9), torch.randn(9, 6, 32)
    square(original(batch), target).backward()
    autopar.parallelize(model, ["cpu"] * 3, plan=plan).train_step(batch, target=target, loss_fn=square)
    assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_replicated_ranks_run_an_interleaved_schedule(schedule: str) -> None:
    torch.manual_seed(0)
    model = Residual()
    original = copy.deepcopy(model)
    groups = ["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]
    devices = [groups[rank] for rank in ranks_of_stages(schedule, 2, 2)]
    plan = Plan.from_split(residual_split(4), n_microbatches=5, schedule=schedule, devices=devices)
    batch, target = ids(9), torch.randn(9, 6, 32)
    square(original(batch), target).backward()
    autopar.parallelize(model, ["cpu"] * 4, plan=plan).train_step(batch, target=target, loss_fn=square)
    assert_same_gradients(gradients(model), gradients(original))


class Normed(nn.Module):
    """Norms, dropout and a function with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Dropout(0.3), nn.PReLU(8))
        self.scale = nn.Parameter(torch.randn(8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)).transpose(1, 2)
        for _ in range(3):
            x = scaled_sigmoid(x, self.scale) + self.bias
        return x


@torch.library.custom_op("autopar_tests::scaled_sigmoid", mutates_args=())
def scaled_sigmoid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) * scale


@scaled_sigmoid.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _scaled_sigmoid_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, scale = ctx.saved_tensors
    share = torch.sigmoid(x)
    return gradient * scale * share * (1 - share), (gradient * share).sum((0, 1))


scaled_sigmoid.register_autograd(
    _scaled_sigmoid_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.mark.filterwarnings("ignore:batch norm uses")
@pytest.mark.parametrize("way", ["call and backward", "train_step"])
def test_norms_dropout_and_own_backwards_get_the_same_bits_under_every_schedule(way: str) -> None:
    torch.manual_seed(0)
    models = [Normed() for _ in SCHEDULES]
    x, y = torch.randn(8, 4, 5), torch.randn(8, 5, 8)
    seen = []
    for model, name in zip(models, SCHEDULES, strict=True):
        model.load_state_dict(models[0].state_dict())
        mine = x.clone().requires_grad_()
        torch.manual_seed(1)
        devices = ["cpu:0", "cpu:0"] if name in V_SHAPED else None
        plan = Plan.from_split({"first": 0, "second": 1}, n_microbatches=3, schedule=name, devices=devices)
        run(model, plan, mine, y, way)
        seen.append({"input": mine.grad, **gradients(model)})
    for name, gradient in seen[0].items():
        assert all(torch.equal(gradient, other[name]) for other in seen[1:]), name  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_attention_and_recurrent_layers_survive_a_split_backward(schedule: str) -> None:
    torch.manual_seed(0)
    model = Attention()
    original = copy.deepcopy(model)
    plan = Plan.from_split({"inner": 0, "attention": 1, "rnn": 1, "last": 2}, n_microbatches=4, schedule=schedule)
    x, y = torch.randn(8, 5, 8, requires_grad=True), torch.randn(8, 3)
    mine = x.detach().clone().requires_grad_()
    square(original(x), y).backward()
    square(autopar.parallelize(model, ["cpu"] * 3, plan=plan)(mine), y).backward()
    assert_same_gradients(gradients(model), gradients(original))
    assert x.grad is not None
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, x.grad)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_graph_that_is_kept_can_be_differentiated_twice(plan: Plan) -> None:
    torch.manual_seed(0)
    model = Residual()
    original = copy.deepcopy(model)
    batch = ids(6)
    for one in (original, autopar.parallelize(model, ["cpu", "cpu"], plan=plan)):
        loss = one(batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(gradients(model), gradients(original))


@pytest.mark.parametrize("phase", ["backward (inputs)", "backward (parameters)"])
def test_an_error_in_a_part_of_the_backward_names_stage_and_micro_batch(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp(8, 3)
    plan = Plan.from_split({"0": 0, "3": 1}, n_microbatches=3, schedule="zb-h1")
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    pm.train_step(x, target=y, loss_fn=square)
    name = "_backward_inputs" if "inputs" in phase else "_backward_weights"
    real = getattr(Passes, name)

    def failing(self: Passes, replica: StageReplica, microbatch: int) -> None:
        if replica.stage.index == 1 and microbatch == 1:
            raise ValueError("out of order")
        real(self, replica, microbatch)

    with monkeypatch.context() as patched:
        patched.setattr(Passes, name, failing)
        with pytest.raises(ValueError, match="out of order") as caught:
            pm.train_step(x, target=y, loss_fn=square)
    assert f"in the {phase} of stage 1 (cpu:1), micro-batch 1" in "\n".join(caught.value.__notes__)
    model.zero_grad()
    original = copy.deepcopy(model)
    square(original(x), y).backward()
    pm.train_step(x, target=y, loss_fn=square)
    assert_same_gradients(gradients(model), gradients(original))


def test_a_loss_of_no_parameter_is_refused_by_a_split_backward_too() -> None:
    pm = autopar.parallelize(
        mlp(8, 3), ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "3": 1}, n_microbatches=2, schedule="zb-h1")
    )
    x = torch.randn(4, 8)
    with pytest.raises(InputError, match="without a gradient"):
        pm.train_step(x, target=x, loss_fn=lambda output, target: target.mean())
    pm.train_step(x, target=x, loss_fn=square)
