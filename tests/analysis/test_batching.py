"""Splitting the batch never changes what a model returns: it is split where that is safe, and said where it is not."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import assert_same_gradients, assert_same_outputs, gradients, sum_of_squares
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import AutoparWarning, PipelinedModule, Plan
from autopar.analysis import batch_tail
from autopar.analysis.batching import Batching, study
from autopar.capture.program import capture

BATCH = 5


class Floats(nn.Module):
    """`tail(model, hidden, x)` of hidden = a(x)."""

    def __init__(self, tail: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.tail = nn.Linear(8, 8), nn.Linear(8, 1), tail

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x)
        return self.tail(self, hidden, x)


class Tokens(nn.Module):
    """`tail(model, hidden, tokens)` of the mean embedding of each row of tokens."""

    def __init__(self, tail: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.tail = nn.Embedding(10, 8), nn.Linear(8, 1), tail

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.a(tokens).mean(1)
        return self.tail(self, hidden, tokens)


def studied(model: nn.Module, *args: torch.Tensor) -> Batching:
    program = capture(model, args, {})
    bound = program.bind(args, {})
    assert bound is not None
    return study(program, bound[0])


def compare(model: nn.Module, example: torch.Tensor, *others: torch.Tensor, n_microbatches: int = 3) -> PipelinedModule:
    """Assert that the pipelined model equals the original on the example and then on other calls."""
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"a": 0}, n_microbatches=n_microbatches,
                                                                       devices=[("cpu:0", "cpu:1")]))  # fmt: skip
    for x in (example, *others):
        expected = model(x)
        sum_of_squares(expected).backward()
        wanted = gradients(model)
        found = pm(x)
        assert_same_outputs(found, expected)
        sum_of_squares(found).backward()
        assert_same_gradients(gradients(pm), wanted)
    return pm


SAFE = {
    "rows": lambda m, h, x: m.b(h),
    "batch in the last dimension": lambda m, h, x: m.b(h).t(),
    "two entries a sample": lambda m, h, x: h.repeat_interleave(2, 0),
    "batch folded into the rows": lambda m, h, x: h.reshape(-1, 4),
    "mean loss": lambda m, h, x: F.mse_loss(m.b(h), x[:, :1]),
    "sum loss": lambda m, h, x: F.mse_loss(m.b(h), x[:, :1], reduction="sum"),
    "sum divided by the batch": lambda m, h, x: m.b(h).sum() / x.shape[0],
    "shared result": lambda m, h, x: (m.b(h), m.b.weight * 2, torch.arange(4)),
    "count of samples": lambda m, h, x: (m.b(h), (x == x).all(1).sum()),
}
MIXING = {
    "centred": (lambda m, h, x: m.b(h - h.mean(0)), "sub"),
    "centred in place": (lambda m, h, x: m.b(h.sub_(h.mean(0))), "(sub_|linear)"),  # the two share one memory
    "softmax over the batch": (lambda m, h, x: m.b(h.softmax(0)), "softmax"),
    "relative to the first": (lambda m, h, x: m.b(h - h[:1]), "slice"),
    "slightly mixed": (lambda m, h, x: m.b(h + 1e-3 * h.mean(0)), "add"),
    "sorted before a layer": (lambda m, h, x: m.b(h.sort(0).values), "sort"),
}
MIXING_AT_THE_END = {
    "similarities": (lambda m, h, x: h @ h.t(), "matmul"),
    "similarities summed away": (lambda m, h, x: (h @ h.t()).sum(1), "matmul"),
    "root of a mean": (lambda m, h, x: F.mse_loss(m.b(h), x[:, :1]).sqrt(), "sqrt"),
    "running sum": (lambda m, h, x: m.b(h).cumsum(0), "cumsum"),
    "reversed": (lambda m, h, x: m.b(h).flip(0), "flip"),
    "sorted": (lambda m, h, x: m.b(h).sort(0).values, "sort"),
    "first sample only": (lambda m, h, x: m.b(h)[0], "select"),
    "scaled by the batch": (lambda m, h, x: m.b(h) * x.shape[0], "mul"),
    "numbered": (lambda m, h, x: m.b(h) + torch.arange(x.shape[0])[:, None], "add"),
    "doubled along the batch": (lambda m, h, x: torch.cat([h, x], 0), "cat"),
    "largest": (lambda m, h, x: (m.b(h), h.max()), "max"),
    "mixed beside masked": (
        lambda m, h, x: torch.where(torch.arange(8) == 0, torch.finfo(torch.float32).min, h - h.mean(0)),
        "sub",
    ),
}


@pytest.mark.parametrize("tail", SAFE.values(), ids=list(SAFE))
def test_a_batch_whose_samples_do_not_meet_is_split(tail: Callable[..., Any]) -> None:
    model = Floats(tail)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        pm = compare(model, torch.randn(BATCH, 8), torch.randn(7, 8))
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 3


@pytest.mark.parametrize(("tail", "operator"), MIXING.values(), ids=list(MIXING))
@pytest.mark.parametrize("example", ["random", "zeros"])
def test_a_batch_whose_samples_meet_stays_whole_and_the_operator_is_named(
    tail: Callable[..., Any], operator: str, example: str
) -> None:
    model = Floats(tail)
    x = torch.randn(BATCH, 8) if example == "random" else torch.zeros(BATCH, 8)
    with pytest.warns(
        AutoparWarning, match=rf"not split into micro-batches: (aten\.)?{operator}\b.*test_batching\.py:\d+"
    ):
        compare(model, x, torch.randn(BATCH, 8), torch.randn(7, 8))


@pytest.mark.parametrize(("tail", "operator"), MIXING_AT_THE_END.values(), ids=list(MIXING_AT_THE_END))
@pytest.mark.parametrize("example", ["random", "zeros"])
def test_where_samples_meet_at_the_end_the_rest_is_split_and_the_operator_is_named(
    tail: Callable[..., Any], operator: str, example: str
) -> None:
    model = Floats(tail)
    x = torch.randn(BATCH, 8) if example == "random" else torch.zeros(BATCH, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        pm = compare(model, x, torch.randn(BATCH, 8), torch.randn(7, 8))
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 3
    program = capture(model, (x,), {})
    _, batching = batch_tail.studied(program, [x])
    assert batching.tail is not None
    assert re.match(rf"(aten\.)?{operator}\b.*test_batching\.py:\d+", batching.tail.why)


@pytest.mark.parametrize("tail", [tail for tail, _ in (MIXING | MIXING_AT_THE_END).values()])
def test_no_example_hides_by_chance_that_samples_meet(tail: Callable[..., Any]) -> None:
    model = Floats(tail)
    program = capture(model, (torch.randn(BATCH, 8),), {})
    for rows in (2, 3, BATCH, BATCH, BATCH, BATCH, BATCH, 8, 8, 8):
        for _ in range(4):
            assert study(program, [torch.randn(rows, 8)]).obstacle


INTEGER_TAILS = {
    "centred": lambda m, h, t: m.b(h - h.mean(0)),
    "count": lambda m, h, t: (m.b(h), (t != 0).sum()),
    "any": lambda m, h, t: (m.b(h), (t != 0).any()),
    "largest": lambda m, h, t: (m.b(h), t.max()),
}


@pytest.mark.parametrize("tail", INTEGER_TAILS.values(), ids=list(INTEGER_TAILS))
@pytest.mark.parametrize("example", ["zeros", "various"])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_integer_inputs_hide_nothing_even_if_the_example_is_all_zeros(tail: Callable[..., Any], example: str) -> None:
    various = torch.arange(20).view(BATCH, 4) % 10
    late = torch.zeros(BATCH, 4, dtype=torch.long)
    late[-1] = 9  # what only the last micro-batch sees
    compare(Tokens(tail), torch.zeros_like(various) if example == "zeros" else various, late, various.flip(0))


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_a_mean_over_the_samples_that_count_stays_one_even_if_all_count_in_the_example() -> None:
    def tail(model: Tokens, h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        counts = (t != 0).any(1)
        return (model.b(h)[:, 0] * counts).sum() / counts.sum().clamp(1)

    padded = torch.arange(20).view(BATCH, 4) % 10
    padded[2:] = 0
    compare(Tokens(tail), torch.ones(BATCH, 4, dtype=torch.long), padded)


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_squeeze_sees_the_batch_not_a_micro_batch_of_one(batch: int) -> None:
    compare(Floats(lambda m, h, x: m.b(h).squeeze()), torch.randn(BATCH, 8), torch.randn(batch, 8))


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_sizes_among_the_outputs_are_those_of_the_whole_batch() -> None:
    compare(Floats(lambda m, h, x: (m.b(h), x.shape[0], 2 * x.shape[0] + 1, x.shape[1])), torch.randn(BATCH, 8))


def test_sizes_that_add_up_leave_the_batch_split() -> None:
    model = Floats(lambda m, h, x: {"y": m.b(h), "rows": x.shape[0], "numbers": h.numel(), "twice": 2 * len(x)})
    compare(model, torch.randn(BATCH, 8), torch.randn(BATCH + 1, 8))


def test_how_outputs_combine_is_read_off_the_samples() -> None:
    def tail(model: Floats, h: torch.Tensor, x: torch.Tensor) -> Any:
        return h, h.t(), h.mean(), h.sum(), model.b.weight * 2, "text", None

    kinds = [(o.combine, o.batch_dim) for o in studied(Floats(tail), torch.randn(BATCH, 8)).outputs]
    assert kinds == [
        ("cat", 0),
        ("cat", 1),
        ("mean", None),
        ("sum", None),
        ("first", None),
        ("constant", None),
        ("constant", None),
    ]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.second = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.b(self.norm(self.a(x)).relu()))


def normed(**options: Any) -> tuple[nn.Module, PipelinedModule, nn.Module]:
    """(the original, the same pipelined, the pipelined's model)."""
    model = Normed()
    twin = copy.deepcopy(model)
    plan = Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    return model, autopar.parallelize(twin, ["cpu", "cpu"], plan=plan, **options), twin


@pytest.mark.slow
def test_exact_batch_norm_equals_the_original_in_training() -> None:
    model, pm, _ = normed(batch_norm="exact")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        for _ in range(3):
            x = torch.randn(6, 8)
            expected, found = model(x), pm(x)
            assert_same_outputs(found, expected)
            expected.square().mean().backward()
            found.square().mean().backward()
            assert_same_gradients(gradients(pm), gradients(model))
    torch.testing.assert_close(dict(pm.state_dict()), dict(model.state_dict()))
    assert_same_outputs(pm.eval()(x), model.eval()(x))


def test_batch_norm_of_micro_batches_warns_once_naming_the_first_layer_and_follows_its_definition() -> None:
    model, pm, twin = normed()
    x = torch.randn(6, 8)
    with pytest.warns(AutoparWarning, match="'norm'.*batch_norm='exact'"):
        found = pm(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoparWarning)
        pm.train_step(x, target=torch.zeros(6), loss_fn=lambda output, _: output.square().mean())
    parts = torch.cat([model(x[:3]), model(x[3:])])  # the definition: the model on every micro-batch in turn
    torch.testing.assert_close(found, parts)
    model(x[:3]), model(x[3:])
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))


class Pooled(nn.Sequential):
    """Its batch norm has one value per channel and sample."""

    def __init__(self) -> None:
        pooled = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)
        super().__init__(*pooled, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "whole"), [(3, True), (4, False), (7, False)])
def test_micro_batches_of_one_value_per_channel_are_never_made(batch: int, whole: bool) -> None:
    model, x = Pooled(), torch.randn(batch, 3, 8, 8)
    for devices in (autopar.Cluster.preset("2xH100"), ["cpu", "cpu"]):
        plan = autopar.plan(model, devices, example_args=(x,), cache=False, tune=0)
        assert plan.n_microbatches == 1 if whole else plan.n_microbatches <= batch // 2
    if not whole:
        pm = autopar.parallelize(
            model,
            ["cpu", "cpu"],
            plan=Plan.from_split({"0": 0, "3": 1}, n_microbatches=2, devices=[["cpu:0"], ["cpu:1"]]),
        )
        with pytest.warns(AutoparWarning, match="statistics of each micro-batch"):
            sum_of_squares(pm(x)).backward()
        for devices in (autopar.Cluster.preset("2xH100"), ["cpu", "cpu"]):
            with pytest.raises(autopar.InputError, match=f"'2' normalises.* at most {batch // 2}"):
                autopar.plan(model, devices, example_args=(x,), n_microbatches=batch, cache=False)


def test_buffers_live_in_the_model_and_move() -> None:
    model, pm, twin = normed(batch_norm="exact")
    before = {name: buffer.clone() for name, buffer in pm.named_buffers()}
    pm(torch.randn(6, 8))
    assert {name for name, _ in pm.named_buffers()} == {name for name, _ in model.named_buffers()}
    for name, buffer in twin.named_buffers():
        assert pm.state_dict()[name].data_ptr() == buffer.data_ptr()
        assert not torch.equal(buffer, before[name]), f"{name} did not move"


def test_replicas_of_a_stage_with_batch_norm_train_and_move_its_statistics() -> None:
    model = Normed()
    plan = Plan.from_split({"a": 0}, n_microbatches=2, devices=[("cpu:0", "cpu:1")])
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
    with pytest.warns(AutoparWarning):
        pm(torch.randn(6, 8)).square().mean().backward()
    assert int(model.state_dict()["norm.num_batches_tracked"]) == 1, "the first replica's statistics are the model's"
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["per-microbatch", "exact"])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_planning_leaves_running_statistics_alone(batch_norm: str) -> None:
    model, x = Normed(), torch.randn(6, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    autopar.parallelize(model, ["cpu", "cpu"], example_args=(x,), batch_norm=batch_norm)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


class Keeping(nn.Module):
    """Writes a buffer other than batch norm's in every call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 2), kind
        self.count: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.kind == "count, read":
            self.count += 1
            return self.b(y) * self.count
        if self.kind == "mean, in place":
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        else:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return self.b(y)


@pytest.mark.parametrize("kind", ["count, read", "mean, in place", "mean, assigned"])
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_buffers_that_a_model_writes_are_written_as_the_original_does(kind: str) -> None:
    model = Keeping(kind)
    twin = copy.deepcopy(model)
    pm = autopar.parallelize(twin, ["cpu", "cpu"], plan=Plan.from_split({"a": 0, "b": 1}, n_microbatches=2))
    for _ in range(3):
        x = torch.randn(6, 8)
        assert_same_outputs(pm(x), model(x))
    torch.testing.assert_close(dict(pm.state_dict()), dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_outputs_of_sizes_that_depend_on_values_are_the_originals() -> None:
    model = Floats(lambda m, h, x: m.b(h[(x[:, 0] > 0).nonzero().squeeze(1)]))
    several = torch.randn(4, BATCH, 8)
    several[1, :, 0] = 1.0  # all rows
    several[2, :, 0] = -1.0  # none
    several[3, :3, 0] = -1.0  # none in the first micro-batches
    compare(model, *several)


class Routed(nn.Module):
    """Every sample goes through one of three linear layers, which it chooses; the samples of each go together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        order = h[:, :3].argmax(1).argsort(stable=True)
        chosen = h[:, :3].argmax(1)[order]
        sorted_ = torch.einsum("bi,bij->bj", h[order], self.experts[chosen])
        return sorted_[order.argsort()]


def test_what_the_graph_proves_is_compared_only_if_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Floats(lambda m, h, x: (m.b(h), m.b(h).mean(), m.b(h).sum())), torch.randn(BATCH, 8)
    program = capture(model, (x,), {})
    wanted = study(program, [x], verify=True)

    def refuse(*_: torch.Tensor) -> bool:
        raise AssertionError("compared")

    monkeypatch.setattr("autopar.analysis.compared_outputs.close", refuse)
    found = study(program, [x])
    assert found.splittable
    assert found.unproven == ""
    assert found.outputs == wanted.outputs
    assert not study(program, [x], verify=True).splittable


def test_a_comparison_that_contradicts_the_proof_keeps_the_batch_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Floats(lambda m, h, x: m.b(h)), torch.randn(BATCH, 8)
    monkeypatch.setattr("autopar.analysis.compared_outputs.close", lambda *_: False)
    assert "mixes samples" in study(capture(model, (x,), {}), [x], verify=True).obstacle


class SortedTokens(nn.Module):
    """Sorts all tokens of a batch and puts them back, as experts do; then mixes samples by `mix`, or does not."""

    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), mix

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.a(x)
        order = h[:, 0].argsort()
        y = self.b(h[order])[order.argsort()]
        return (y, self.mix(h, y)) if self.mix is not None else (y,)


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        (lambda h, y: (h.softmax(1).mean(0) * y.relu().mean(0)).sum(), r"aten\.mul\.Tensor"),
        (lambda h, y: y - y.mean(0), r"aten\.sub\.Tensor"),
        (lambda h, y: y.sort(0).values * 2, r"aten\.sort\.default"),
    ],
    ids=["product of means", "centred", "sorted"],
)
def test_the_operator_named_is_the_one_that_mixes_not_one_whose_result_is_undone(
    mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], named: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 8)
    assert study(capture(SortedTokens(None), (x,), {}), [x]).splittable
    assert re.match(f"{named} in module .* mixes samples", study(capture(SortedTokens(mix), (x,), {}), [x]).obstacle)


@torch.library.custom_op("autopar_tests::rounded_product", mutates_args=())
def rounded_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product of a GPU: with TF32 on, its factors are rounded, in an order of sums that depends on the rows."""
    y = x @ weight.t()
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        y = y * (1 + 2.0**-11 * (x.shape[0] % 2))
    return y


@rounded_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("tf32")
def test_rounding_to_tf32_is_not_taken_for_samples_that_meet() -> None:
    model, x = Floats(lambda m, h, x: rounded_product(h, m.b.weight)), torch.randn(BATCH, 8)
    batching = studied(model, x)
    assert batching.splittable
    assert "rounded_product" in batching.unproven  # so the values were compared
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("tf32")
def test_routing_on_a_gpu_with_tf32_is_no_obstacle() -> None:
    batching = studied(Routed().cuda(), torch.randn(24, 8, device="cuda"))
    assert batching.splittable
    assert batching.unproven


@pytest.mark.slow
def test_routing_by_value_is_compared_and_the_plan_says_so() -> None:
    x = torch.randn(24, 8)
    batching = studied(Routed(), x)
    assert batching.splittable
    assert "test_batching.py" in batching.unproven
    pm = compare(Routed(), x, torch.randn(7, 8))
    assert pm.plan is not None
    assert pm.plan.n_microbatches == 3
    plan = autopar.plan(Routed(), ["cpu", "cpu"], example_args=(x,), n_microbatches=2, schedule="gpipe", cache=False)
    assert any("without a proof" in note and "test_batching.py" in note for note in plan.notes)


@pytest.mark.slow
def test_plans_given_say_once_that_their_split_is_not_proven() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 8)
    given = autopar.Plan.from_split({"a": 0}, n_microbatches=2)

    def as_run(model: nn.Module, plan: autopar.Plan) -> autopar.Plan:
        with contextlib.closing(autopar.parallelize(model, ["cpu"], plan=plan)) as pm:
            for batch in (x, x[:9]):
                pm(batch)
            assert pm.plan is not None
            return pm.plan

    def times_said(plan: autopar.Plan) -> int:
        return " ".join(str(plan).split()).count("because a few samples say so, without a proof")

    first = as_run(Routed(), given)
    assert times_said(first) == 1
    loaded = autopar.Plan.from_json(first.to_json())
    assert times_said(as_run(Routed(), loaded)) == 1
    assert times_said(as_run(Routed(), loaded.with_(n_microbatches=3))) == 1
    assert times_said(loaded.with_(n_microbatches=1)) == 0
    assert times_said(as_run(Routed(), loaded.with_(n_microbatches=1))) == 0
    ahead = autopar.plan(Routed(), autopar.Cluster.preset("1xH100"), example_args=(x,), plan=given)
    assert times_said(ahead) == 1
    assert times_said(as_run(nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.Linear(8, 8))), given)) == 0


def test_random_operators_are_no_obstacle_to_what_is_proven() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.leaky = nn.Linear(8, 8), nn.RReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leaky(self.a(x))

    assert studied(Leaky(), torch.randn(BATCH, 8)).splittable


class Kept:
    """The bytes of storages that operators have made and that live, and the most that did at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def made(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


class Watching(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(r.alias_info for r in func._schema.returns)
        if isinstance(result, torch.Tensor) and not result.is_meta and not views:
            self.kept.made(result)
        return result


@pytest.mark.parametrize("mixed", [False, True])
def test_studying_a_deep_model_keeps_a_few_values_at_a_time(mixed: bool) -> None:
    """Whether the batch may be split or not, whichever way it was found out."""
    width, depth = 256, 24

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = rounded_product(x, layer.weight)  # without a rule
            return x - x.mean(0) if mixed else x

    x = torch.randn(4, 64, width).flatten(0, 1)
    program = capture(Deep(), (x,), {})
    value = 8 * width * 4  # bytes of a value for eight samples, the most that are looked at together
    kept = Kept()
    with Watching(kept):
        batching = study(program, [x])
    assert batching.splittable is not mixed
    whole = x.nbytes if mixed else 0  # a batch that stays whole runs as it is
    assert kept.most < 14 * value + 4 * whole < depth * (3 * value + whole)
    assert len(set(batching.storages.values())) > depth  # freed storages do not share a number


def test_memory_that_is_used_again_is_not_taken_for_a_view() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))), torch.randn(BATCH, 8)
    program = capture(model, (x,), {})
    storages = study(program, [x]).storages
    results = [storages[node.name] for node in program.graph.nodes if node.op == "call_function"]
    assert len(set(results)) == len(results) == 12


class TwoInputs(nn.Module):
    """Samples take rows of their own by indices that are another input: a graph with symbols of its own for their
    number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x)
        index = index[..., None].expand(-1, -1, 8)
        return h.gather(1, index), torch.zeros_like(h).scatter_add(1, index, h[:, : index.shape[1]])


def test_inputs_have_the_same_number_of_samples() -> None:
    batching = studied(TwoInputs(), torch.randn(BATCH, 5, 4), torch.randint(5, (BATCH, 3)))
    assert batching.splittable
    assert batching.unproven == ""
