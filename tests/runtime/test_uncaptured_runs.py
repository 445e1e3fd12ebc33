"""Parts that no tracer captures run as opaque operators of a pipeline, and the plain model is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from uncaptured_models import CASES, WIDTH, Case, rows

import autopar
from autopar import Plan

DEVICES = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        yield


def loss_of(output: Any) -> torch.Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return sum(part.square().mean() for part in parts)  # type: ignore[return-value]


def pipelined(model: nn.Module, case: Case, schedule: str, n_microbatches: int = 3) -> Any:
    plan = Plan.from_split(case.split, n_microbatches=n_microbatches, schedule=schedule)
    return autopar.parallelize(model, DEVICES, plan=plan, cache=False)


def same_training(pm: Any, model: nn.Module, run: Any, plain: Any) -> None:
    """Both models give the same results, gradients and buffers."""
    torch.testing.assert_close(run(), plain())
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert [*wanted] == [name for name, _ in pm.named_parameters()]
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    for name, buffer in pm.named_buffers():
        torch.testing.assert_close(buffer, model.get_buffer(name), msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_the_model(case: Case, schedule: str) -> None:
    model = case.model()
    pm = pipelined(copy.deepcopy(model), case, schedule)
    for n in (6, 9):

        def step(module: Any, n: int = n) -> Any:
            output = module(*case.inputs(n))
            loss_of(output).backward()
            return output

        same_training(pm, model, lambda: step(pm), lambda: step(model))
    assert pm.plan.n_microbatches == 3
    assert len(pm.stages) == 2
    assert case.opaque in str(pm.plan)
    pm.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "branch"], ids=lambda case: case.name)
def test_train_step_is_that_of_the_model(case: Case, schedule: str) -> None:
    model = case.model()
    pm = pipelined(copy.deepcopy(model), case, schedule)
    inputs = case.inputs(6)
    target = torch.randn_like(model(*inputs))

    def plain() -> torch.Tensor:
        loss = nn.functional.mse_loss(model(*inputs), target)
        loss.backward()
        return loss.detach()

    same_training(pm, model, lambda: pm.train_step(*inputs, target=target, loss_fn=nn.MSELoss()), plain)
    pm.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluation_is_that_of_the_model(case: Case) -> None:
    model = case.model().eval()
    pm = pipelined(copy.deepcopy(model), case, "gpipe")
    with torch.no_grad():
        torch.testing.assert_close(pm(*case.inputs(6)), model(*case.inputs(6)))
    pm.close()


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_replicas_and_recomputed_stages_run_it_too(case: Case) -> None:
    model = case.model()
    devices = [["cpu:0"], ["cpu:1", "cpu:2"]]
    plan = Plan.from_split(case.split, n_microbatches=4, devices=devices, recompute={0, 1})
    pm = autopar.parallelize(copy.deepcopy(model), ["cpu"] * 3, plan=plan, cache=False)

    def step(module: Any) -> Any:
        output = module(*case.inputs(8))
        loss_of(output).backward()
        return output

    same_training(pm, model, lambda: step(pm), lambda: step(model))
    pm.close()


class Kept(nn.Module):
    """What a call keeps or draws: for the kinds of state that a module has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.count, self.log = nn.Linear(WIDTH, WIDTH), kind, 0, []  # type: ignore[var-annotated]
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.detach().numpy()
        if self.kind == "written buffer":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        elif self.kind == "assigned buffer":
            self.mean = self.mean * 0.9 + x.detach().mean(0)
        elif self.kind == "attribute":
            self.count += 1
            self.log.append(float(np.sum(values)))
        elif self.kind == "batch norm":
            x = self.norm(x)
        elif self.kind == "numpy":
            x = x * float(np.random.rand())
        return self.linear(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["written buffer", "assigned buffer", "attribute", "batch norm", "numpy"])
def test_a_module_that_keeps_a_state_sees_the_whole_batch_once(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Kept(kind), nn.ReLU(), nn.Linear(WIDTH, 4))
    split = {"0": 0, "1": 1, "3": 1}
    pm = pipelined(copy.deepcopy(model), Case("", lambda: model, rows, split, ""), "1f1b")

    def steps(module: Any) -> Any:
        np.random.seed(0)
        outputs = [module(*rows(6)), module(*rows(7))]
        sum(map(loss_of, outputs)).backward()  # type: ignore[union-attr]
        return tuple(outputs)

    same_training(pm, model, lambda: steps(pm), lambda: steps(model))
    inner: Any = pm.unwrap()[1]
    assert (inner.count, inner.log) == (model[1].count, model[1].log)
    assert pm.plan.n_microbatches == 1
    pm.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["written buffer", "attribute", "numpy"])
def test_a_stage_with_a_state_is_not_recomputed(kind: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Kept(kind), nn.Linear(WIDTH, 4))
    plan = Plan.from_split({"0": 0, "1": 1, "2": 1}, n_microbatches=1, recompute={1})
    with pytest.raises(autopar.PlanError, match=r"cannot be recomputed: uncaptured_Kept in module '1'"):
        autopar.parallelize(model, DEVICES, plan=plan, cache=False)(*rows(6))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()
        return self.linear(self.drop(x))


@pytest.mark.slow
def test_random_numbers_inside_follow_the_seed_of_the_step_and_recompute_to_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dropping(), nn.Tanh(), nn.Linear(WIDTH, 4))
    gradients, outputs = [], []
    for recompute in (set(), set(), {0, 1}):
        plan = Plan.from_split({"0": 0, "1": 1, "3": 1}, n_microbatches=3, recompute=recompute)
        pm = autopar.parallelize(copy.deepcopy(model), DEVICES, plan=plan, cache=False)
        torch.manual_seed(5)
        outputs.append(pm(*rows(6)))
        loss_of(outputs[-1]).backward()
        gradients.append([p.grad for p in pm.parameters()])
        assert pm.plan.n_microbatches == 3
        pm.close()
    torch.testing.assert_close(outputs[1:], outputs[:1] * 2, rtol=0, atol=0)
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)
    assert not torch.allclose(outputs[0], model.eval()(*rows(6)))


class Decides(nn.Module):
    """Its code follows from a value of the whole batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_code_that_follows_from_the_whole_batch_keeps_the_batch_whole_whatever_the_example_shows() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Decides(), nn.Linear(WIDTH, 4))
    x = 10 + torch.rand(6, WIDTH)  # every part of it decides alike
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(WIDTH))
    plan = Plan.from_split({"0": 0, "1": 1, "2": 1}, n_microbatches=3)
    pm = autopar.parallelize(copy.deepcopy(model), DEVICES, plan=plan, cache=False)
    for scale in (1.0, torch.tensor([1.0, 1, 1, 1, -9, -9])[:, None], -1.0):
        torch.testing.assert_close(pm(x * scale), model(x * scale))
    assert pm.plan.n_microbatches == 1
    pm.close()


@pytest.mark.slow
def test_hooks_around_and_inside_run_once_per_microbatch() -> None:
    model = CASES[3].model()
    seen: list[str] = []
    model.branch.register_forward_hook(lambda *_: seen.append("around"))  # type: ignore[union-attr, operator]
    model.branch.low.register_forward_hook(lambda *_: seen.append("inside"))  # type: ignore[union-attr, operator]
    model.branch.high.register_forward_hook(lambda *_: seen.append("inside"))  # type: ignore[union-attr, operator]
    pm = pipelined(copy.deepcopy(model), CASES[3], "gpipe")
    pm(*rows(6))
    assert (seen.count("around"), seen.count("inside")) == (3, 6)
    pm.close()


@pytest.mark.slow
def test_the_model_that_is_one_operator_runs_on_one_device_and_the_plan_says_why() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"logits": self.linear(x), "size": torch.from_numpy(x.detach().numpy().sum(-1)), "none": None}

    model = Root()
    plan = autopar.plan(model, DEVICES, example_args=rows(6), cache=False)
    assert len(plan.stages) == 1
    assert "module '(root)' (Root) runs uncaptured" in " ".join(str(plan).split())
    pm = autopar.parallelize(copy.deepcopy(model), DEVICES, n_microbatches=2, max_replicas=2, cache=False)
    torch.testing.assert_close(pm(*rows(6)), model(*rows(6)))
    assert "runs uncaptured" in str(pm.report())
    with pytest.raises(autopar.PlanError, match=r"'linear' cannot be a stage of its own.*'\(root\)'"):
        pipelined(model, Case("", Root, rows, {"linear": 0}, ""), "gpipe")(*rows(6))
    pm.close()


@pytest.mark.slow
def test_it_is_said_once_and_refused_with_strict() -> None:
    case = CASES[3]
    plan = Plan.from_split(case.split, n_microbatches=3)
    pm = autopar.parallelize(case.model(), DEVICES, plan=plan, cache=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (6, 6, 7):
            pm(*rows(n))
        pm.eval()(*rows(6))
    assert sum("runs uncaptured" in str(w.message) for w in caught) == 1
    pm.close()
    call: dict[str, Any] = {"example_args": rows(6), "cache": False, "strict": True}
    for refused in (autopar.plan, autopar.parallelize, autopar.profile, autopar.compare):
        with pytest.raises(autopar.CaptureError, match="'branch'"):
            refused(case.model(), DEVICES, **call)


@pytest.mark.slow
def test_a_cluster_that_is_not_at_hand_prices_code_that_runs_without_values_and_refuses_other_code() -> None:
    cluster = autopar.Cluster.preset("2xA100-80")
    plan = autopar.plan(CASES[0].model(), cluster, example_args=rows(6))
    assert "DoubledSwish" in str(plan)
    with pytest.raises(autopar.InputError, match=r"cost of uncaptured_NumpyGate.*cannot be estimated"):
        autopar.plan(CASES[2].model(), cluster, example_args=rows(6))


@pytest.mark.slow
def test_a_plan_by_hand_of_code_that_needs_values_names_the_plans_that_work() -> None:
    case = CASES[2]
    with pytest.raises(
        autopar.InputError, match=r"parallelize without a plan\).*, split the model with Plan.from_split"
    ):
        Plan.by_hand(case.model(), DEVICES, example_args=rows(6), pipeline=2)
    for plan in (None, Plan.from_split(case.split, n_microbatches=2)):
        model = case.model()
        original = copy.deepcopy(model)
        pm = autopar.parallelize(model, DEVICES, plan=plan, cache=False)
        torch.testing.assert_close(pm(*rows(6)), original(*rows(6)))
        pm.close()


def test_a_compiled_pipeline_leaves_it_uncompiled() -> None:
    case = CASES[0]
    model = case.model()
    plan = Plan.from_split(case.split, n_microbatches=2)
    pm = autopar.parallelize(copy.deepcopy(model), DEVICES, plan=plan, cache=False, compile="eager")
    torch.testing.assert_close(pm(*rows(6)), model(*rows(6)))
    pm.close()


class Unpadded(nn.Module):
    """Sequences cut to the longest one: a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class OverUnpadded(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(16, WIDTH), Unpadded()
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.encoder(x, lengths)).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["backward", "train_step"])
def test_a_batch_with_a_shape_that_the_example_did_not_show_runs_by_the_model_itself(step: str) -> None:
    model = OverUnpadded()
    pm = autopar.parallelize(
        copy.deepcopy(model), DEVICES, plan=Plan.from_split({"embed": 0, "head": 1}, n_microbatches=2), cache=False
    )
    ids, target = torch.randint(16, (4, 5)), torch.randn(4, 4)
    for lengths, said in (
        (torch.full((4,), 5), False),
        (torch.tensor([5, 4, 3, 2]), True),
        (torch.full((4,), 3), True),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autopar.AutoparWarning)
            pm._signatures.warnings.given.clear()
            if step == "train_step":
                got = pm.train_step(ids, lengths, target=target, loss_fn=nn.functional.mse_loss)
            else:
                got = nn.functional.mse_loss(pm(ids, lengths), target)
                got.backward()
        assert any("shape depends on values" in str(w.message) for w in caught) == said
        expected = nn.functional.mse_loss(model(ids, lengths), target)
        expected.backward()
        torch.testing.assert_close(got, expected)
    for (name, mine), plain in zip(pm.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, msg=name)


@pytest.mark.slow
def test_a_changed_shape_is_an_error_where_running_statistics_would_count_a_batch_twice() -> None:
    pm = autopar.parallelize(
        OverUnpadded(norm=True), DEVICES, plan=Plan.from_split({"embed": 0, "head": 1}, n_microbatches=2), cache=False
    )
    ids = torch.randint(16, (4, 5))
    pm(ids, torch.full((4,), 5))
    with pytest.raises(autopar.CaptureError, match=r"'encoder' \(Unpadded\).*shape depends on values"):
        pm(ids, torch.full((4,), 3))


@pytest.mark.parametrize(
    "hint",
    [
        lambda m: autopar.pipeline_stage(m.branch.linear, 1),
        lambda m: autopar.recompute(m.branch.linear),
        lambda m: autopar.keep_together(m.branch.linear, m.last),
        lambda m: autopar.shard(m.branch.linear, ((1, 2),)),
    ],
    ids=["stage", "recompute", "together", "shard"],
)
def test_a_hint_on_a_part_of_an_opaque_operator_is_refused_with_the_module_to_hint(hint: Any) -> None:
    model = HintedInside()
    hint(model)
    with pytest.raises(autopar.PlanError, match=r"'branch\.linear' .*inside module 'branch'"):
        autopar.plan(model, DEVICES, example_args=rows(6), cache=False)


@pytest.mark.slow
def test_a_hint_on_an_opaque_operator_is_followed() -> None:
    model = HintedInside()
    original = copy.deepcopy(model)
    autopar.pipeline_stage(model.branch, 1)
    pm = autopar.parallelize(model, DEVICES, cache=False)
    torch.testing.assert_close(pm(*rows(6)), original(*rows(6)))
    assert pm.plan is not None
    assert [any("branch" in key for key in stage.operators) for stage in pm.plan.stages] == [False, True]


class BranchOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.relu(y) if float(y.detach().sum()) > 1e9 else torch.tanh(y)


class HintedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(WIDTH, WIDTH), BranchOnValues(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.branch(self.first(x)))


@pytest.mark.slow
def test_every_capture_of_a_recurrent_part_splits_the_batch_and_calls_leave_its_list_of_weights() -> None:
    case = next(case for case in CASES if case.name == "packed")
    model = case.model()
    plain = copy.deepcopy(model)
    pm = pipelined(model, case, "1f1b")
    rnn = model.get_submodule("encoder.rnn")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the batch is not split", autopar.AutoparWarning)
        for training in (True, False):  # the second is captured after the first has run
            pm.train(training)
            torch.testing.assert_close(pm(*case.inputs(6)), plain.train(training)(*case.inputs(6)))
            own = [getattr(rnn, name) for name in rnn._flat_weights_names]
            assert all(listed is one for listed, one in zip(rnn._flat_weights, own, strict=True))
