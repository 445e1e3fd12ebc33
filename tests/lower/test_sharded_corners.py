"""Sharded stages in all that a user does with a model beside plain steps."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from shardings import Convolutions, Mlp, Tied, assert_same_step, at_random, one_stage, pipelined, staged
from torch import nn
from torch.nn import functional

import autopar
from autopar import PipelinedModule, Plan
from autopar.analysis.operators import operator_keys
from autopar.capture.program import capture
from autopar.plan.stage import Stage

Meshes = tuple[tuple[int, ...] | None, ...]
EVERY: list[Meshes] = [((2,),), ((2, 2),), ((2,), None), (None, (2,)), ((2,), (3,))]
pytestmark = [pytest.mark.filterwarnings("ignore::autopar.AutoparWarning"), pytest.mark.usefixtures("shared_exports")]
each_mesh = pytest.mark.parametrize("meshes", EVERY, ids=str)


class Twice(nn.Module):
    """A tied table, a block that is called twice, several readers of most values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(24, 12), nn.LayerNorm(12), nn.Linear(12, 24, bias=False)
        self.first, self.second = Mlp(), Mlp()
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(self.first(self.embed(x))))))


def words(batch: int = 24, length: int = 12) -> torch.Tensor:
    return torch.randint(24, (batch, length))


def pipeline(
    model: nn.Module,
    x: torch.Tensor,
    meshes: Meshes,
    seed: int = 0,
    split: tuple[str, str] = ("embed", "second"),
    n_microbatches: int = 2,
    **more: Any,
) -> PipelinedModule:
    """One stage, or two, with any strategies."""
    program = capture(model, (x,), {})
    if len(meshes) == 1:
        assert meshes[0] is not None
        return pipelined(model, one_stage(program, at_random(program, meshes[0], seed), n_microbatches, **more))
    plan = staged(program, {path: s for s, path in enumerate(split)}, meshes, [1, 1], **more)
    return pipelined(model, replace(plan, n_microbatches=n_microbatches))


def twice(meshes: Meshes) -> tuple[nn.Module, nn.Module, PipelinedModule, torch.Tensor]:
    """A model, its copy, the model pipelined, and an input."""
    model, x = Twice().double(), words()
    return model, copy.deepcopy(model), pipeline(model, x, meshes), x


def assert_same_tensors(model: nn.Module, original: nn.Module) -> None:
    wanted = dict([*original.named_parameters(), *original.named_buffers()])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_mesh
def test_momentum_accumulation_and_clipping_train_as_the_original_does(meshes: Meshes) -> None:
    model, original, pm, _ = twice(meshes)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) for m in (pm, original)]
    for _ in range(3):
        for x in (words(), words()):
            for module in (pm, original):
                sum_of_squares(module(x)).mul(1e-2).backward()
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.5) for module in (pm, original)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same_tensors(model, original)


@each_mesh
@pytest.mark.parametrize("frozen", ["embed", "first.up.weight", "second"])
def test_frozen_parts_get_no_gradient(meshes: Meshes, frozen: str) -> None:
    model, _, pm, x = twice(meshes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    assert_same_step(model, pm, x, tolerance=1e-9)


@each_mesh
def test_several_backwards_of_several_calls_add_up(meshes: Meshes) -> None:
    model, original, pm, x = twice(meshes)
    for module in (pm, original):
        y = module(x)
        sum_of_squares(y).backward(retain_graph=True)
        (y.sum() + 2 * sum_of_squares(module(x.flip(0)))).backward()
    assert_same_gradients(gradients(model), gradients(original), 1e-9)


@each_mesh
def test_hooks_of_parameters_see_whole_gradients_once(meshes: Meshes) -> None:
    model, original, pm, x = twice(meshes)
    seen: dict[str, list[Any]] = {"mine": [], "original": []}
    for name, module in (("mine", model), ("original", original)):
        module.first.up.weight.register_hook(lambda g, log=seen[name]: log.append(g.shape) or g * 2)
        module.embed.weight.register_post_accumulate_grad_hook(lambda p, log=seen[name]: log.append("added"))
    for module in (pm, original):
        sum_of_squares(module(x)).backward()
    assert sorted(map(str, seen["mine"])) == sorted(map(str, seen["original"]))
    assert_same_gradients(gradients(model), gradients(original), 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
@pytest.mark.parametrize("meshes", [((2,), None), (None, (3,)), ((2, 2), (2,))], ids=str)
def test_a_weight_that_two_stages_share_has_one_gradient(meshes: Meshes, schedule: str) -> None:
    for seed in range(2):
        model, x = Tied().double(), words()
        pm = pipeline(model, x, meshes, seed, ("embed", "head"), schedule=schedule)
        assert_same_step(model, pm, x, tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_hooks_that_change_values_and_gradients_do_so(mesh: tuple[int, ...]) -> None:
    model, x = Twice().double(), words()
    model.first.register_forward_hook(lambda module, args, y: y * 2)
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.second.up.register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    assert_same_step(model, pipeline(model, x, (mesh,)), x, tolerance=1e-9)


# -- the module -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_mesh
def test_other_types_other_values_copies_and_new_threads(meshes: Meshes) -> None:
    model, _, pm, x = twice(meshes)
    assert_same_step(model, pm.float(), x)
    assert_same_step(model, pm.double(), x, tolerance=1e-9)
    other = Twice().double()
    pm.load_state_dict(other.state_dict())
    torch.testing.assert_close(pm(x), other(x))
    model.load_state_dict(Twice().double().state_dict(), assign=True)
    assert_same_step(model, pm, x, tolerance=1e-9)
    again = copy.deepcopy(pm)
    assert again.unwrap() is not model
    assert_same_step(again.unwrap(), again, x, tolerance=1e-9)
    pm.close()
    assert_same_step(model, pm, x, tolerance=1e-9)


@pytest.mark.slow
@each_mesh
def test_evaluation_between_steps(meshes: Meshes) -> None:
    model, _, pm, x = twice(meshes)
    assert_same_step(model, pm, x, tolerance=1e-9)
    pm.eval()
    with torch.no_grad():
        assert_same_outputs(pm(x), model(x), 1e-9)
    assert_same_step(model, pm.train(), x, tolerance=1e-9)


@pytest.mark.slow
def test_running_statistics_stay_the_models_between_training_and_evaluation() -> None:
    model, x = Convolutions().double(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    original, pm = copy.deepcopy(model), pipeline(model, x, ((2, 2),), n_microbatches=1)
    for training in (True, False, True, False):
        for module in (pm, original):
            module.train(training)
        assert_same_outputs(pm(x), original(x), 1e-9)
        assert_same_tensors(model, original)


@each_mesh
def test_after_an_error_the_next_call_is_as_if_nothing_had_been(meshes: Meshes) -> None:
    def stop(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle of the backward")

    model, _, pm, x = twice(meshes)
    with pytest.raises(IndexError):
        pm(x.index_fill(0, torch.tensor(3), 99))
    assert_same_step(model, pm, x, tolerance=1e-9)
    y = pm(x)
    y.register_hook(stop)
    with pytest.raises(ValueError, match="in the middle"):
        y.sum().backward()
    assert_same_step(model, pm, x, tolerance=1e-9)


@pytest.mark.slow
@each_mesh
def test_nothing_is_kept_of_a_module_that_nobody_has_any_more(meshes: Meshes) -> None:
    model, original, pm, x = twice(meshes)
    for _ in range(2):
        sum_of_squares(pm(x)).backward()
    kept = [weakref.ref(thing) for thing in (model, pm, model.first.up.weight)]
    del model, original, pm
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


# -- sizes ------------------------------------------------------------------------------------------------------------


@each_mesh
@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_batches_that_do_not_come_apart_run_without_shards(meshes: Meshes, n_microbatches: int) -> None:
    """An epoch whose last batch is smaller."""
    model, x = Twice().double(), words()
    original, pm = copy.deepcopy(model), pipeline(model, x, meshes, n_microbatches=n_microbatches)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9) for m in (pm, original)]
    for n, _ in itertools.product((24, 7, 1), range(2)):
        for module in (pm, original):
            sum_of_squares(module(x[:n])).mul(1e-2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_tensors(model, original)


def test_a_batch_without_shards_is_reported_once() -> None:
    model, x = Mlp(), torch.randn(8, 12)
    pm = pipeline(model, x, ((2,),), seed=1)
    with pytest.warns(autopar.AutoparWarning, match="a batch of 7 samples runs without shards"):
        assert_same_step(model, pm, x[:7])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(model, pm, x[:8])
        assert_same_step(model, pm, x[:7])


def test_microbatches_of_different_sizes_all_come_apart() -> None:
    model, x = Mlp(), torch.randn(20, 12)
    program = capture(model, (x,), {})
    pm = pipelined(model, one_stage(program, at_random(program, (2,), 1), 4))
    sizes = []
    model.up.register_forward_hook(lambda module, args, y: sizes.append(len(y)))
    assert_same_step(model, pm, x)
    assert sorted(sizes) == [4, 4, 6, 6, 20]


@pytest.mark.slow
@each_mesh
def test_the_mean_loss_of_a_step_weighs_samples_alike(meshes: Meshes) -> None:
    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(y.flatten(0, 1), target.flatten())

    model, original, pm, x = twice(meshes)
    for n in (24, 22, 5):
        loss = loss_fn(original(x[:n]), x[:n].flip(1))
        loss.backward()
        torch.testing.assert_close(pm.train_step(x[:n], target=x[:n].flip(1), loss_fn=loss_fn), loss.detach())
    assert_same_gradients(gradients(model), gradients(original), 1e-9)


@pytest.mark.slow
@each_mesh
def test_other_lengths_run_by_the_same_plan(meshes: Meshes) -> None:
    """Every device does all of what cannot be cut any more."""
    model, _, pm, x = twice(meshes)
    with pytest.warns(autopar.AutoparWarning, match="in this call the number of devices does not divide their sizes"):
        assert_same_step(model, pm, x[:, :7], tolerance=1e-9)
    for length in (8, 12):
        assert_same_step(model, pm, x[:, :length], tolerance=1e-9)


# -- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_gradients_of_a_table_stay_sparse(mesh: tuple[int, ...]) -> None:
    for seed in range(3):
        model, x = nn.Sequential(nn.Embedding(24, 12, sparse=True), nn.Linear(12, 12)).double(), words()
        original, pm = copy.deepcopy(model), pipeline(model, x, (mesh,), seed)
        for module in (pm, original):
            sum_of_squares(module(x)).backward()
        found, wanted = model[0].weight.grad, original[0].weight.grad
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_gradients_scaled_by_how_often_a_row_is_read_are_those_of_the_whole_batch(mesh: tuple[int, ...]) -> None:
    for seed in range(3):
        model, x = nn.Sequential(nn.Embedding(24, 12, scale_grad_by_freq=True), nn.Linear(12, 12)).double(), words()
        assert_same_step(model, pipeline(model, x, (mesh,), seed, n_microbatches=1), x, tolerance=1e-9)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(12, 12, dtype=torch.complex128)), nn.Linear(12, 12).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(self.a(x), dim=-1) @ self.w).abs()


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_complex_parameters_are_trained(mesh: tuple[int, ...]) -> None:
    for seed in range(3):
        model, x = Spectrum(), torch.randn(24, 12, dtype=torch.float64)
        assert_same_step(model, pipeline(model, x, (mesh,), seed), x, tolerance=1e-9)


@each_mesh
def test_mixed_precision_is_the_originals(meshes: Meshes) -> None:
    model, x = Twice(), words()
    original, pm = copy.deepcopy(model), pipeline(model, x, meshes)
    outputs = []
    for module in (pm, original):
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(module(x))
        sum_of_squares(outputs[-1]).backward()
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)
    assert_same_gradients(gradients(model), gradients(original), 0.05)


class Counting(nn.Module):
    """Buffers that the model adds to, and reads again in the same call."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(12))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.seen += y.detach().sum(0)
        self.calls += 1
        return y * self.seen / self.calls


@pytest.mark.parametrize("mesh", [None, (2,), (2, 2)], ids=str)
def test_buffers_that_a_call_writes_and_reads_are_the_models(mesh: tuple[int, ...] | None) -> None:
    for seed in range(3):
        model, x = Counting().double(), torch.randn(8, 12, dtype=torch.float64)
        original = copy.deepcopy(model)
        if mesh is None:
            stage = Stage(("cpu:0",), tuple(operator_keys(capture(model, (x,), {})).values()))
            pm = pipelined(model, Plan((stage,), 1), watch_nan=True)
        else:
            pm = pipeline(model, x, (mesh,), seed, n_microbatches=1)
        for module in (pm, original, pm, original):
            sum_of_squares(module(x)).backward()
        assert_same_tensors(model, original)
        assert_same_gradients(gradients(model), gradients(original), 1e-9)


class Masked(nn.Module):
    """Attention whose mask a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.end = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        found, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.end(x + found)


@pytest.mark.parametrize(
    ("planned_with", "degrees"),
    [(0, {"tensor": 2}), (1, {"tensor": 2}), (2, {"tensor": 2}), (0, {"data": 2}), (1, {"data": 2})],
)
def test_a_call_may_have_another_mask_than_the_plans(planned_with: int, degrees: dict[str, int]) -> None:
    """None, one for all samples, and one for each sample and head, which nothing cuts by samples."""
    model, x = Masked().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    causal = torch.triu(torch.ones(6, 6), 1).bool()
    masks = [None, causal, causal | (torch.rand(8, 6, 6) > 0.7) & ~torch.eye(6).bool()]
    example = {"mask": masks[planned_with]}
    whole: dict[str, Any] = {"batch_dim": {"x": 0, "mask": None}}
    plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), example_kwargs=example, **whole, **degrees)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan, **whole)
    for mask in (masks[planned_with], *masks):
        out, wanted = pm(x, mask=mask), original(x, mask=mask)
        assert_same_outputs(out, wanted)
        sum_of_squares(out).backward()
        sum_of_squares(wanted).backward()
        assert_same_gradients(gradients(pm), gradients(original))


class Scaled(nn.Module):
    """A call with a mask has another first product than one without, under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        return torch.tanh(self.b(torch.tanh(self.a(x)) * 0.5)) * 2


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"data": 2}, {"data": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_call_may_have_other_operators_than_the_plans(first: bool, planned: bool, degrees: dict[str, int]) -> None:
    """`planned`, `first`: whether the call that the plan is made for, and the first one, have a mask."""
    model, x = Scaled().double(), torch.randn(4, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    mask = (x > 0).double()
    plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x, mask) if planned else (x,), **degrees)
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan)
    for masked in (first, not first, first):
        args = (x, mask) if masked else (x,)
        out, wanted = pm(*args), original(*args)
        assert_same_outputs(out, wanted)
        sum_of_squares(out).backward()
        sum_of_squares(wanted).backward()
        assert_same_gradients(gradients(pm), gradients(original))


@pytest.mark.parametrize("degrees", [{"data": 2}, {"pipeline": 2, "micro_batch": 2}], ids=str)
def test_a_plan_by_hand_cuts_the_dimension_of_samples_that_is_given(degrees: dict[str, int]) -> None:
    """Of a model whose inputs are [sequence, batch, features]."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2)]
    model, x = nn.Sequential(*layers).double(), torch.randn(5, 4, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    plan = Plan.by_hand(model, ["cpu"] * 2, example_args=(x,), batch_dim=1, **degrees)
    assert plan.batch_size == 4
    pm = autopar.parallelize(model, ["cpu"] * 2, plan=plan, batch_dim=1)
    out, wanted = pm(x), original(x)
    assert_same_outputs(out, wanted)
    sum_of_squares(out).backward()
    sum_of_squares(wanted).backward()
    assert_same_gradients(gradients(pm), gradients(original))
