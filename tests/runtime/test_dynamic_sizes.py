"""Calls of other sizes than the captured ones: exact, from one capture, with a plan per bucket where wanted."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_gradients, gpt2, gradients, tokens
from torch import nn

import autopar
from autopar import AutoparWarning, InputError, PipelinedModule
from autopar.runtime.planning.action_overhead import measured_once
from autopar.runtime.signatures import captures

SPLIT = {"max_replicas": 1, "n_microbatches": 2}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is traced by torch.export, in order."""
    measured_once(())  # traces small models of its own, once in a process
    seen: list[str] = []
    for name in ("examine", "capture_symbolic"):
        original = getattr(captures, name)

        def counted(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(captures, name, counted)
    return seen


class Tagger(nn.Module):
    """Positions, a fold of batch and length, strided convolution, and a table of 40 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.randn(40, 8))
        self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.conv, self.head = nn.Conv1d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length = ids.shape
        h = self.embed(ids) + self.positions[:length]
        h = self.mix(h.reshape(batch * length, 8)).view(batch, length, 8)
        if mask is not None:
            h = h * mask.unsqueeze(-1)
        h = self.norm(h).transpose(1, 2)
        return self.head(self.conv(h).transpose(1, 2))  # type: ignore[no-any-return]


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length))


def assert_same_step(pm: PipelinedModule, original: nn.Module, *args: Any, **kwargs: Any) -> None:
    """One call and its backward give the original's output and gradients."""
    pm.zero_grad()
    original.zero_grad()
    mine, theirs = pm(*args, **kwargs), original(*args, **kwargs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    mine.square().mean().backward()
    theirs.square().mean().backward()
    assert_same_gradients(gradients(pm.unwrap()), gradients(original))


def pair(model: nn.Module, **options: Any) -> tuple[PipelinedModule, nn.Module]:
    original = copy.deepcopy(model)
    return autopar.parallelize(model, ["cpu", "cpu"], **(SPLIT | options)), original


@pytest.mark.slow
def test_one_more_capture_serves_every_other_length(traced: list[str]) -> None:
    pm, original = pair(Tagger())
    for batch, length in [(4, 6), (4, 9), (4, 31), (6, 12), (4, 6), (3, 40), (4, 3)]:
        assert_same_step(pm, original, ids(batch, length))
    assert traced == ["examine", "capture_symbolic"]


@pytest.mark.slow
def test_with_dynamic_the_first_capture_serves_all_lengths(traced: list[str]) -> None:
    for dynamic in (True, {"ids": 1}, {"ids": (1,), "mask": 1}, {"ids": True, "mask": True}):
        traced.clear()
        pm, original = pair(Tagger(), dynamic=dynamic)
        for length in (6, 9, 31):
            assert_same_step(pm, original, ids(4, length), torch.rand(4, length))
        assert set(traced) == {"capture_symbolic"}
        assert len(traced) == (2 if dynamic == {"ids": 1} else 1)  # nothing was said of the mask


class Spread(nn.Module):
    """A number of positions that depends on values, as where speech is made from predicted durations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        durations = (3 * h.detach()[..., 0].abs()).ceil().sum(1).long() + 1
        covered = torch.arange(durations.max()) < durations[:, None]
        attention = covered[:, :, None] * h.mean(2)[:, None, :]  # [batch, positions, length]
        return self.b(h * attention.sum(1)[..., None])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_one_more_capture_serves_every_other_length_beside_a_size_that_depends_on_values(traced: list[str]) -> None:
    torch.manual_seed(0)
    original = Spread()
    plan = autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=1)
    pm = autopar.parallelize(copy.deepcopy(original), ["cpu", "cpu"], plan=plan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the batch is not split", AutoparWarning)
        for batch, length in [(4, 6), (4, 9), (5, 31), (2, 5)]:
            assert_same_step(pm, original, torch.randn(batch, length, 8))
    assert traced == ["examine", "capture_symbolic"]


@pytest.mark.slow
def test_without_dynamic_every_length_is_captured_by_itself(traced: list[str]) -> None:
    pm, original = pair(Tagger(), dynamic=False)
    for length in (6, 9, 31, 9):
        assert_same_step(pm, original, ids(4, length))
    assert traced == ["examine"] * 3


@pytest.mark.slow
@settings(max_examples=examples(7, 300), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 40)), min_size=2, max_size=6))
def test_any_sequence_of_batches_and_lengths_is_exact(calls: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    pm, original = pair(Tagger())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        for batch, length in calls:
            assert_same_step(pm, original, ids(batch, length))
    pm.close()


class Optional(nn.Module):
    """An optional argument: a tensor, a number, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | int | None = None) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if isinstance(mask, int):
            h = h * mask
        elif mask is not None:
            h = h * (mask[..., None] if mask.dim() == 2 else mask)
        return self.b(h)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model fixes:autopar.AutoparWarning")
@pytest.mark.parametrize("order", ["mask none", "none mask", "int none mask", "mask int", "mask row"])
def test_an_optional_argument_may_be_a_tensor_a_number_or_none_in_any_order(order: str) -> None:
    torch.manual_seed(0)
    plain = Optional()
    plan = autopar.Plan.from_split({"a": 0, "b": 1}, n_microbatches=2)
    pipe = autopar.parallelize(copy.deepcopy(plain), ["cpu", "cpu"], plan=plan)
    lengths = iter(range(5, 50))
    for batch in (6, 10, 4):
        for name in order.split():
            length = next(lengths)
            masks = {"mask": torch.rand(batch, length), "row": torch.rand(8), "int": length, "none": None}
            x = torch.randn(batch, length, 8)
            torch.testing.assert_close(pipe(x, mask=masks[name]), plain(x, mask=masks[name]))


@pytest.mark.slow
def test_train_steps_of_changing_lengths_are_exact(traced: list[str]) -> None:
    model = gpt2()
    pm, original = pair(model)
    for length in (6, 9, 12):
        x = tokens(4, length)
        labels = x.masked_fill(torch.rand(x.shape) < 0.3, -100)
        pm.zero_grad()
        original.zero_grad()
        loss = pm.train_step(input_ids=x, labels=labels, target=labels, loss_fn=lambda out, _: out.loss)
        theirs = original(input_ids=x, labels=labels).loss
        theirs.backward()
        torch.testing.assert_close(loss, theirs.detach(), rtol=1e-5, atol=1e-6)
        assert_same_gradients(gradients(model), gradients(original))
    assert traced == ["examine", "capture_symbolic"]


@pytest.mark.slow
def test_a_length_beyond_what_the_model_takes_fails_as_the_model_does() -> None:
    pm, original = pair(Tagger(), dynamic=True)
    assert_same_step(pm, original, ids(4, 6))
    with pytest.raises(RuntimeError):
        original(ids(4, 41))
    with pytest.raises((RuntimeError, autopar.AutoparError)):
        pm(ids(4, 41))
    assert_same_step(pm, original, ids(4, 40))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        return self.b(self.a(x).relu()) * steps / (steps + 7)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_python_number_that_changes_is_captured_once(traced: list[str]) -> None:
    pm, original = pair(Scaled())
    for steps in (41, 37, 5, 1000, 0, 1, 41):
        assert_same_step(pm, original, torch.randn(4, 8), steps)
    assert traced == ["examine", "capture_symbolic"]


class Unrolled(nn.Module):
    """Its code runs `depth` times, which no graph leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = self.a(x)
        for _ in range(depth):
            x = self.b(x).relu()
        return x


class FixedWidth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x[..., :8]).relu())
        return h * 2 if x.shape[2] == 12 else h


@pytest.mark.slow
def test_what_the_model_fixes_is_said_once_and_stays_exact(traced: list[str]) -> None:
    pm, original = pair(Unrolled())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for depth in (1, 2, 3, 1, 2, 4, 5):
            assert_same_step(pm, original, torch.randn(4, 8), depth)
    said = [str(w.message) for w in caught if "fixes" in str(w.message)]
    assert [text.split(",")[0] for text in said] == ["the model fixes 'depth' (captured at 2"]
    assert traced.count("capture_symbolic") == 2
    pm, original = pair(FixedWidth(), dynamic={"x": 2})
    with pytest.warns(AutoparWarning, match=r"the model fixes dimension 2 of 'x' \(captured at 12\)"):
        assert_same_step(pm, original, torch.randn(4, 5, 12))
    assert_same_step(pm, original, torch.randn(4, 5, 9))


def test_calls_that_the_model_does_not_take_say_nothing_about_sizes() -> None:
    pm, original = pair(Tagger())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same_step(pm, original, ids(4, 6), torch.ones(4, 6))
        for length in (7, 8, 9):
            with pytest.raises(InputError):
                pm(ids(4, length), torch.ones(4, 12))
        assert_same_step(pm, original, ids(4, 7), torch.ones(4, 7))
    assert not [w for w in caught if "fixes" in str(w.message)]
    assert pm._signatures._captures.known[-1].specialised


class Weighted(nn.Module):
    """Its code depends on a float, as an annealed weight does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
        h = self.b(self.a(x).relu())
        return h * weight if weight > 0.25 else h - weight


@pytest.mark.slow
def test_a_python_float_that_changes_stays_exact_is_said_once_and_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captures, "_MOST_KEPT", 4)
    pm, original = pair(Weighted())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            assert_same_step(pm, original, torch.randn(4, 8), step / 8)
    (said,) = [str(w.message) for w in caught if "fixes" in str(w.message)]
    assert "'weight'" in said
    assert "give it as a tensor" in said
    assert len(pm._signatures._captures.known) == 4


@pytest.mark.slow
def test_buckets_have_plans_of_their_own() -> None:
    pm, original = pair(Tagger(), dynamic={"ids": {1: (8, 20)}}, cache=False)
    used = {}
    for length in (6, 8, 9, 20, 33, 7, 14):
        assert_same_step(pm, original, ids(4, length))
        used[length] = pm.plan
    assert used[6] is used[8] is used[7]
    assert used[9] is used[20] is used[14]
    assert len({id(used[length]) for length in (6, 9, 33)}) == 3
    assert pm.plans == (used[6], used[9], used[33])


@pytest.mark.slow
def test_one_plan_serves_all_lengths_without_buckets() -> None:
    pm, original = pair(Tagger())
    plans = []
    for length in (6, 9, 33):
        assert_same_step(pm, original, ids(4, length))
        plans.append(pm.plan)
    assert plans[0] is plans[1] is plans[2]
    assert pm.plans == (plans[0],)


@pytest.mark.slow
def test_a_plan_made_for_another_length_than_the_first_is_measured_at_that_length() -> None:
    """The second length reuses the first one's study, and then needs a plan with room for the loss."""
    pm, original = pair(Tagger(), dynamic=True)
    assert_same_step(pm, original, ids(4, 6))
    assert_same_step(pm, original, ids(4, 12))
    x, y = ids(4, 16), torch.randn(4, 8, 3)
    loss = pm.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, nn.functional.mse_loss(original(x), y).detach())


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"tokens": 1}, "dynamic names input 'tokens', but this call has ids"),
        ({"ids": 5}, "dimension 5 of input 'ids', which has 2 dimensions"),
        ({"ids": "1"}, r"dynamic\['ids'\] must be True"),
        ({"ids": {1: (0, 8)}}, "sizes of at least 1"),
        ({"ids": {1: 8}}, "sizes of at least 1"),
        (7, "dynamic must be True, False or a dict"),
    ],
)
def test_a_dynamic_that_does_not_fit_is_refused(dynamic: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        autopar.parallelize(Tagger(), ["cpu", "cpu"], dynamic=dynamic)(ids(4, 6))


@pytest.mark.slow
def test_a_module_in_another_mode_is_captured_anew(traced: list[str]) -> None:
    pm, original = pair(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), dynamic=True)
    pm(torch.randn(4, 5, 8))
    pm.eval()
    original.eval()
    for length in (5, 7):
        x = torch.randn(4, length, 8)
        torch.testing.assert_close(pm(x), original(x))
    assert traced == ["capture_symbolic"] * 2


def test_nan_as_a_number_is_the_number_of_the_call_before() -> None:
    class Filled(nn.Linear):
        def forward(self, x: torch.Tensor, fill: float) -> torch.Tensor:
            return super().forward(torch.nan_to_num(x * fill, nan=1.0))

    model, x = Filled(4, 4), torch.randn(4, 4)
    pm = autopar.parallelize(model, ["cpu", "cpu"], tune=0)
    for _ in range(2):
        torch.testing.assert_close(pm(x, float("nan")), model(x, float("nan")))
    assert len(pm._signatures._captures.known) == 1  # type: ignore[attr-defined]
