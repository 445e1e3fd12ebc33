"""Stages recorded as CUDA graphs compute what they compute unrecorded, step after step; shown with a stand-in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_graphs import Graph, stand_in
from losses import in_worker
from models import assert_same_gradients, gradients
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar import PipelinedModule, Plan
from autopar.errors import InputError
from autopar.runtime.stages.graphed_stage import _WARM_UP, GraphedStage

SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return stand_in(monkeypatch)


def model_with_state() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.Dropout(0.5),
        nn.Linear(16, 4),
    )


def pipelined(model: nn.Module, compile: bool | str = "graphs", schedule: str = "1f1b", m: int = 4) -> PipelinedModule:
    plan = Plan.from_split({"0": 0, "4": 1}, n_microbatches=m, schedule=schedule)
    return autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile=compile, cache=False)


def stages(pm: PipelinedModule) -> list[GraphedStage]:
    found = [replica.graphs for replica in pm._signatures.newest().executable.replicas]  # type: ignore[union-attr]
    assert all(found)
    return found  # type: ignore[return-value]


def batches(n: int, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 8), torch.randn(rows, 4)) for _ in range(n)]


Step = Callable[[PipelinedModule, torch.Tensor, torch.Tensor], torch.Tensor]


def train_step(pm: PipelinedModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return pm.train_step(x, target=y, loss_fn=mse_loss)


def call_and_backward(pm: PipelinedModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mse_loss(pm(x), y)
    loss.backward()
    return loss.detach()


def both(step: Step, schedule: str = "1f1b", **options: Any) -> list[tuple[Any, ...]]:
    """Losses, gradients and states of four steps of training: unrecorded, and recorded."""
    found = []
    for compile in (False, "graphs"):
        model = model_with_state()
        pm = pipelined(model, compile, schedule, **options)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        torch.manual_seed(2)
        losses, of_steps = [], []
        for x, y in batches(4):
            losses.append(step(pm, x, y))
            of_steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        state = {name: t.clone() for name, t in model.state_dict().items()}
        model.eval()
        with torch.no_grad():
            outputs = [pm(x) for x, _ in batches(2)]
        found.append((losses, of_steps, state, outputs))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [train_step, call_and_backward])
def test_training_is_the_same_dropout_running_statistics_and_evaluation_included(step: Step, schedule: str) -> None:
    unrecorded, recorded = both(step, schedule)
    torch.testing.assert_close(recorded, unrecorded)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_under_autocast_replays_see_the_new_weights() -> None:
    def step(pm: PipelinedModule, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return train_step(pm, x, y)

    unrecorded, recorded = both(step)
    torch.testing.assert_close(recorded, unrecorded)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_what_was_recorded_under_another_autocast_is_not_replayed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])
    pm, x = pipelined(copy.deepcopy(model)), torch.randn(12, 8)
    with torch.no_grad():
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                for _ in range(_WARM_UP + 2):  # recorded, and replayed
                    found, wanted = pm(x), model(x)
                    assert found.dtype == wanted.dtype
                    torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("graphs")
def test_gradients_accumulate_over_steps_and_the_users_stay_as_they_are() -> None:
    model, plain = model_with_state(), model_with_state()
    x, y = batches(1)[0]
    kept = []
    for own, compile in ((model, "graphs"), (plain, False)):
        pm = pipelined(own, compile)
        torch.manual_seed(3)
        for _ in range(3):
            train_step(pm, x, y)
        first = own[0].weight.grad
        assert first is not None
        kept.append(first.clone())
        before = first.clone()
        own.zero_grad()
        train_step(pm, x, y)
        torch.testing.assert_close(first, before)  # replays do not write into what the user has
    torch.testing.assert_close(kept[0], kept[1])


def test_a_stage_runs_its_code_only_to_record_it(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    pm = pipelined(model_with_state())
    first = batches(1)[0]
    train_step(pm, *first)
    slots, made = [len(next(iter(stage._free.values()))) for stage in stages(pm)], len(graphs)
    assert made == 2 * sum(slots), "a forward and a backward for every micro-batch in flight"
    calls = []
    for stage in stages(pm):
        monkeypatch.setattr(stage, "function", lambda *inputs, stage=stage: calls.append(stage.name))
    replays = sum(graph.replays for graph in graphs)
    for x, y in batches(3):
        train_step(pm, x, y)
    assert not calls
    assert len(graphs) == made
    assert sum(graph.replays for graph in graphs) - replays == 3 * 2 * 2 * 4, "one launch an action"


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_slots_are_as_many_as_micro_batches_in_flight() -> None:
    for schedule, wanted in (("gpipe", [6, 6]), ("1f1b", [2, 1])):
        pm = pipelined(model_with_state(), schedule=schedule, m=6)
        for x, y in batches(3):
            train_step(pm, x, y)
        assert [len(next(iter(stage._free.values()))) for stage in stages(pm)] == wanted


def test_a_warm_up_precedes_a_recording_and_changes_nothing(graphs: list[Graph]) -> None:
    norm = nn.BatchNorm1d(4)
    calls = []

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(len(graphs[0].operators))
        return (norm(x),)

    stage = GraphedStage(function, list(norm.parameters()), list(norm.buffers()), torch.device("cpu"), "stage 0")
    x = torch.randn(6, 4, requires_grad=True)
    (y,) = stage(x)
    assert calls == [0] * (_WARM_UP + 1)
    same = nn.BatchNorm1d(4)
    torch.testing.assert_close(y, same(x))
    for got, wanted in zip(norm.buffers(), same.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("change", ["in place", "a new address", "frozen"])
def test_it_is_recorded_anew_only_where_a_tensor_has_moved_or_another_is_trained(
    change: str, graphs: list[Graph]
) -> None:
    model, plain = model_with_state(), model_with_state()
    pm, other = pipelined(model), pipelined(plain, False)
    x, y = batches(1)[0]
    for own in (pm, other):
        torch.manual_seed(4)
        train_step(own, x, y)
    made = len(graphs)
    for own in (model, plain):
        gradients(own)
        with torch.no_grad():
            if change == "in place":
                own[4].weight.mul_(3)
            elif change == "a new address":
                own[4].weight.data = own[4].weight.data * 3
            else:
                own[4].weight.requires_grad_(False)
    losses = []
    for own in (pm, other):
        torch.manual_seed(5)
        losses.append(train_step(own, x, y))
    torch.testing.assert_close(*losses)
    assert_same_gradients(gradients(model), gradients(plain))
    assert (len(graphs) == made) == (change == "in place")


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return self.a(hidden), self.b(hidden)


@pytest.mark.usefixtures("graphs")
def test_a_backward_from_other_outputs_after_an_update_is_right_and_leaves_none_for_the_rest() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    plain = copy.deepcopy(model)
    plan = Plan.from_split({"body": 0, "a": 1, "b": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile="graphs", cache=False)
    for x, y in batches(5):
        for which in ([0], [1], [0, 1]):
            found = []
            for own, called in ((model, pm), (plain, plain)):
                outputs = called(x)
                sum(mse_loss(outputs[i], y) for i in which).backward()  # type: ignore[union-attr]
                found.append({name: p.grad for name, p in own.named_parameters()})
                with torch.no_grad():
                    for p in own.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=0.1)
                own.zero_grad()
            assert_same_gradients(*found)


@pytest.mark.usefixtures("graphs")
def test_two_calls_in_flight_keep_their_activations_apart() -> None:
    model, plain = model_with_state().eval(), model_with_state().eval()
    pm = pipelined(model)
    (x, y), (other, _) = batches(2)
    for own, called in ((model, pm), (plain, plain)):
        first, second = called(x), called(other)
        (mse_loss(second, y) + 2 * mse_loss(first, y)).backward()
        torch.testing.assert_close(first, own(x))
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.usefixtures("graphs")
def test_a_batch_of_another_size_is_recorded_besides() -> None:
    model, plain = model_with_state(), model_with_state()
    pm, other = pipelined(model), pipelined(plain, False)
    for rows in (12, 10, 12, 7):
        x, y = batches(1, rows)[0]
        losses = []
        for own in (pm, other):
            torch.manual_seed(rows)
            losses.append(train_step(own, x, y))
        torch.testing.assert_close(*losses)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_a_failed_call_leaves_no_gradients_and_its_slots_free() -> None:
    model, plain = model_with_state(), model_with_state()
    pm, other = pipelined(model), pipelined(plain, False)
    x, y = batches(1)[0]
    count = [0]

    def failing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        count[0] += in_worker()
        if in_worker() and count[0] % 3 == 0:
            raise ArithmeticError("no loss")
        return mse_loss(output, target)

    train_step(pm, x, y)
    gradients(model)
    plain.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                pm.train_step(x, target=y, loss_fn=failing)
            gradients(model)
    plain.load_state_dict(model.state_dict())
    for own in (pm, other):
        torch.manual_seed(6)
        train_step(own, x, y)
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.usefixtures("graphs")
def test_code_that_reads_values_on_the_host_is_refused_with_the_reason() -> None:
    stage = GraphedStage(lambda x: (x * x.sum().item(),), [], [], torch.device("cpu"), "stage 3")
    with pytest.raises(InputError, match=r"stage 3 cannot be recorded as CUDA graphs.*capturing\).*compile=True"):
        stage(torch.ones(3))


def test_cpus_are_refused_and_so_are_open_sizes() -> None:
    model = model_with_state()
    with pytest.raises(InputError, match=r"compile='graphs' records kernels of GPUs, and cpu:0, cpu:1 are none"):
        pipelined(model)
    with pytest.raises(InputError, match=r"compile='graphs' records kernels for fixed sizes.*leave dynamic= out"):
        autopar.parallelize(model, ["cpu", "cpu"], compile="graphs", dynamic=True)


@pytest.mark.usefixtures("graphs")
def test_a_stage_that_cannot_be_recorded_runs_as_it_is_with_the_reason() -> None:
    model, plain = model_with_state(), model_with_state()
    plan = Plan.from_split({"0": 0, "4": 1}, n_microbatches=4, recompute=[0])
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, compile="graphs", cache=False)
    x, y = batches(1)[0]
    torch.manual_seed(7)
    with pytest.warns(autopar.AutoparWarning, match=r"compile='graphs' leaves stage 0 as it is: it is recomputed"):
        train_step(pm, x, y)
    torch.manual_seed(7)
    train_step(pipelined(plain, False), x, y)
    assert_same_gradients(gradients(model), gradients(plain))
    assert "recorded as CUDA graphs" in str(pm.report())
    assert "stage 0: it is recomputed" in str(pm.report())


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("layer", "options", "why"),
    [
        (nn.RReLU(), {}, "it draws random numbers from the global generator"),
        (nn.BatchNorm1d(8), {"batch_norm": "deferred"}, "its batch norms put statistics of micro-batches aside"),
    ],
    ids=["random operator", "deferred batch norm"],
)
def test_a_stage_that_works_with_python_at_every_run_is_not_recorded(
    layer: nn.Module, options: dict[str, Any], why: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), layer, nn.Linear(8, 4))
    plan, (x, y) = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2), batches(1)[0]
    found = []
    for compile in (False, "graphs"):
        own = copy.deepcopy(model)
        pm = autopar.parallelize(own, ["cpu", "cpu"], plan=plan, compile=compile, cache=False, **options)
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append((train_step(pm, x, y), gradients(own), own.state_dict()))
        said = [str(w.message) for w in caught if "leaves stage" in str(w.message)]
        assert len(said) == (compile == "graphs")
        assert all(f"leaves stage 1 as it is: {why}" in text for text in said)
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("graphs")
def test_what_a_slot_has_given_stays_when_it_is_used_again() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    stage = GraphedStage(lambda x: (layer(x).tanh(),), list(layer.parameters()), [], torch.device("cpu"), "stage 0")
    given, wanted = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 4, requires_grad=True)
        (y,) = stage(x)
        given.append((y.detach(), torch.autograd.grad(y.sum(), x)[0]))
        del y  # the slot is free
        same = layer(x).tanh()
        wanted.append((same.detach(), torch.autograd.grad(same.sum(), x)[0]))
    assert [len(free) for free in stage._free.values()] == [1]
    torch.testing.assert_close(given, wanted)
