"""A forward that writes its own parameters is refused by the parameter's name, and planning leaves the model alone."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import autopar
from autopar import CaptureError, Plan
from autopar.capture.parameter_writes import parameters_kept
from autopar.capture.program import capture


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def change(self) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        found: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Clamped(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)


class Normed(Two):
    def change(self) -> None:
        self.up.weight.data = self.up.weight.data / self.up.weight.data.norm()


class Shrunk(Two):
    def change(self) -> None:
        self.up.weight.data.mul_(0.9)


class Copied(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.copy_(self.up.weight * 0.9)


class OfView(Two):
    def change(self) -> None:
        with torch.no_grad():
            self.up.weight.t()[0].zero_()


class Uncaptured(Two):
    def change(self) -> None:
        torch.from_numpy(self.up.weight.detach().numpy()).mul_(0.9)


class Replaced(Two):
    def change(self) -> None:
        self.up.weight = nn.Parameter(self.up.weight.detach() * 0.9)


class Registered(Two):
    def change(self) -> None:
        self.up.register_parameter("weight", nn.Parameter(self.up.weight * 0.9))


class ReplacedUncaptured(Replaced):
    def change(self) -> None:
        if self.up.weight.detach().numpy().sum() < 1e9:
            super().change()


class CastByModule(Two):
    """Casts a layer, as routers of mixtures of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def change(self) -> None:
        self.up = self.up.to(self.dtype)


CASTS = {
    "to a type": lambda layer: layer.to(torch.float32),
    "to a device": lambda layer: layer.to("cpu"),
    "to both": lambda layer: layer.to(device=torch.device("cpu"), dtype=torch.float32),
    "float": lambda layer: layer.float(),
}


class Cast(Two):
    def __init__(self, cast: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.cast = cast

    def change(self) -> None:
        self.up = self.cast(self.up)


class OwnData(Two):
    def change(self) -> None:
        self.up.weight.data = self.up.weight.data


class PartOfItself(Two):
    def change(self) -> None:
        self.up.weight.data = self.up.weight.data.t()


WRITERS = [Clamped, Normed, Shrunk, Copied, OfView, Uncaptured, Replaced, Registered, ReplacedUncaptured, PartOfItself]
SPLIT = Plan.from_split({"up": 0, "down": 1}, n_microbatches=2)


@pytest.mark.parametrize("plan", [None, SPLIT], ids=["searched", "given"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_is_refused_by_the_parameters_name_and_changes_nothing(writer: type[Two], plan: Plan | None) -> None:
    model = writer()
    before = {name: (t, t.data_ptr(), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    call: dict[str, Any] = {"target": torch.randn(8, 4), "loss_fn": nn.functional.mse_loss}
    with pytest.raises(CaptureError, match=r"writes the parameter 'up\.weight'"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan, example_args=(torch.randn(8, 8),), **call)
    for name, tensor in model.state_dict(keep_vars=True).items():
        own, place, values = before[name]
        assert tensor is own
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, values)
    model.up.weight.data = torch.ones(8, 8)  # outside of a capture everybody may
    assert bool((model.up.weight == 1).all())


@pytest.mark.slow
@pytest.mark.parametrize("plan", [None, SPLIT], ids=["searched", "given"])
@pytest.mark.parametrize("make", [lambda: CastByModule(torch.float32), OwnData], ids=["cast", "data"])
def test_a_parameter_that_is_assigned_its_own_data_trains_as_in_the_plain_model(make: Any, plan: Plan | None) -> None:
    plain = make()
    model = copy.deepcopy(plain)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False, tune=0)
    for _ in range(2):
        x = torch.randn(8, 8)
        torch.testing.assert_close(pm(x), plain(x))
        for one in (pm, plain):
            one(x).square().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
    pm.close()


@pytest.mark.parametrize("how", CASTS)
def test_a_cast_to_the_type_that_a_layer_has_is_captured(how: str) -> None:
    model, x = Cast(CASTS[how]), torch.randn(4, 8)
    program = capture(model, (x,), {}, strict=True)
    torch.testing.assert_close(program.graph_module(x)[0], model(x))
    assert model.up.to(torch.float64).weight.dtype is torch.float64  # outside of a capture casts cast


@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.half, nn.Module.bfloat16])
def test_a_cast_to_a_type_of_that_name_is_refused(cast: Any) -> None:
    with pytest.raises(CaptureError, match=r"writes the parameter 'up\.weight'"):
        capture(Cast(cast), (torch.randn(4, 8),), {})


def test_a_cast_to_another_type_is_refused() -> None:
    model = CastByModule(torch.float64)
    with pytest.raises(CaptureError, match=r"writes the parameter 'up\.weight' \(it assigns to its \.data\)"):
        capture(model, (torch.randn(4, 8),), {})
    assert model.up.weight.dtype is torch.float32


class AtLaterCalls(nn.Linear):
    """Changes its weight only in calls that no example shows."""

    uncaptured = False

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        if float(x.detach().sum()) > 1e3 if self.uncaptured else flip:
            self.weight = nn.Parameter(self.weight.detach() * 0.9)
        return super().forward(x)


class Between(Two):
    def __init__(self, uncaptured: bool) -> None:
        super().__init__()
        self.part = AtLaterCalls(8, 8)
        self.part.uncaptured = uncaptured

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        found: torch.Tensor = self.down(self.part(torch.exp(self.up(x)), flip))
        return found


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("uncaptured", [False, True])
def test_a_parameter_replaced_at_a_later_call_is_refused_then_and_the_model_left_alone(uncaptured: bool) -> None:
    model, x = Between(uncaptured), torch.rand(8, 8)
    nn.init.eye_(model.up.weight)
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=SPLIT, example_args=(x,), tune=0)
    torch.testing.assert_close(pm(x), original(x))
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"writes the parameter 'part\.weight'"):
            pm(x + 5) if uncaptured else pm(x, flip=True)
    torch.testing.assert_close(pm(x), original(x))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name])


class PutsBack(Two):
    """Changes what it holds for a moment, or to what it is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.up.weight
        if self.how == "tied again":
            self.down.weight = own
            hidden = self.up(x)
        elif self.how == "functional_call":
            hidden = torch.func.functional_call(self.up, {"weight": own * 2}, x)
        else:
            self.up.weight = nn.Parameter(own.detach() * 2)
            hidden = self.up(x)
            self.up.weight = own
        found: torch.Tensor = self.down(hidden)
        return found


class PutsBackUncaptured(PutsBack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + float(x.detach().numpy().sum() > 1e9)


@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
@pytest.mark.parametrize("uncaptured", [False, True])
@pytest.mark.parametrize("how", ["tied again", "functional_call", "put back"])
def test_parameters_that_a_forward_puts_back_are_no_writes(how: str, uncaptured: bool) -> None:
    inner = (PutsBackUncaptured if uncaptured else PutsBack)(how)
    model, x = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 4)), torch.randn(8, 8)
    original = copy.deepcopy(model)
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, example_args=(x,), tune=0)
    for one in (pm, original):
        one(x).square().sum().backward()
    for mine, other in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


class Words(nn.Module):
    """Embeddings that are scaled down to a norm in the forward: torch writes the rows that it looks up."""

    def __init__(self, how: str, scale: float) -> None:
        super().__init__()
        bag, whole = nn.EmbeddingBag(20, 8, max_norm=1.0), nn.Embedding(20, 8, max_norm=1.0)
        self.how, self.embed, self.head = how, bag if how == "bag" else whole, nn.Linear(8, 20, bias=False)
        with torch.no_grad():
            self.embed.weight.mul_(scale)
        if how == "frozen":
            self.embed.weight.requires_grad_(False)
        if how == "tied":
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.how == "function":
            found = nn.functional.embedding(ids, self.embed.weight, max_norm=1.0).mean(1)
        else:
            found = self.embed(ids) if self.how == "bag" else self.embed(ids).mean(1)
        if self.how == "uncaptured":
            found = found + float(found.detach().numpy().sum() > 1e9)
        scores: torch.Tensor = self.head(found)
        return scores


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", [3.0, 0.01])
@pytest.mark.parametrize("how", ["module", "bag", "function", "frozen", "tied"])
def test_embeddings_with_a_greatest_norm_are_refused_whether_the_example_exceeds_it(
    how: str, scale: float, training: bool
) -> None:
    model, ids = Words(how, scale).train(training), torch.randint(0, 20, (8, 5))
    before = model.embed.weight.detach().clone()
    with pytest.raises(CaptureError, match=r"writes the parameter '(embed|head)\.weight' \(aten\.embedding_renorm_"):
        capture(model, (ids,), {})
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("way", ["searched", "pipeline", "shards"])
def test_neither_pipelines_nor_shards_train_embeddings_with_a_greatest_norm(way: str) -> None:
    model, ids = Words("module", 3.0), torch.randint(0, 20, (8, 5))
    before = model.embed.weight.detach().clone()
    if way == "shards":
        autopar.shard(model.head, in_strategy=((1, 1),), out_strategy=((1, 2),))
    plan = Plan.from_split({"embed": 0, "head": 1}, n_microbatches=2) if way == "pipeline" else None
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    target = torch.randint(0, 20, (8,))
    with pytest.raises(CaptureError, match=r"writes the parameter 'embed\.weight'"):
        pm.train_step(ids, target=target, loss_fn=nn.functional.cross_entropy)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autopar.AutoparWarning")
def test_uncaptured_embeddings_with_a_greatest_norm_train_as_one_micro_batch() -> None:
    """Nothing exceeds it in the example; later steps do."""
    model, ids, target = Words("uncaptured", 0.01), torch.randint(0, 20, (8, 5)), torch.randint(0, 20, (8,))
    original = copy.deepcopy(model)
    pm = autopar.parallelize(model, ["cpu", "cpu"], cache=False)
    for scale in (1.0, 500.0):
        for one in (model, original):
            with torch.no_grad():
                one.embed.weight.mul_(scale)
            one.zero_grad()
        loss = pm.train_step(ids, target=target, loss_fn=nn.functional.cross_entropy)
        expected = nn.functional.cross_entropy(original(ids), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for mine, other in zip(model.parameters(), original.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
            torch.testing.assert_close(mine.grad, other.grad)
    pm.close()
    with pytest.raises(CaptureError, match=r"writes the parameter 'embed\.weight'"):
        autopar.parallelize(Words("uncaptured", 3.0), ["cpu", "cpu"], cache=False)(ids)


class Averages(nn.Module):
    """Keeps a running mean, as code with statistics of its own does."""

    mean: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "whole":
                self.mean.mul_(0.9).add_(0.1 * hidden.mean(0))
            elif self.how == "view":
                self.mean[:4].mul_(0.9).add_(0.1 * hidden.mean(0)[:4])
            else:
                self.mean[0] = hidden.mean()
        return hidden + self.mean[0]


@pytest.mark.parametrize("how", ["whole", "view", "item"])
def test_statistics_written_in_place_under_no_grad_are_kept(how: str) -> None:
    """Export holds such a write in a block whose result nothing reads: it runs as the user's own code."""
    model = nn.Sequential(nn.Linear(8, 8), Averages(how), nn.Linear(8, 4))
    original, x, y = copy.deepcopy(model), torch.randn(8, 8), torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that runs uncaptured, and so sees the batch whole
        plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
        pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan)
        for _ in range(2):
            loss = pm.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
            expected = nn.functional.mse_loss(original(x), y)
            torch.testing.assert_close(torch.as_tensor(loss), expected.detach())
        pm.close()
    torch.testing.assert_close(model[1].mean, original[1].mean)


@pytest.mark.parametrize(
    "how", [parametrizations.weight_norm, parametrizations.spectral_norm], ids=lambda f: f.__name__
)
def test_weights_that_are_computed_anew_are_captured(how: Any) -> None:
    layer = how(nn.Linear(8, 8))
    model = nn.Sequential(layer, nn.BatchNorm1d(8), nn.Linear(8, 4)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    capture(model, (torch.randn(8, 8),), {})
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_captures_in_several_threads_refuse_only_their_own_assignments() -> None:
    """They end in another order than they began: none takes the watch away from the other."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    watched = [parameters_kept(model) for model in (first, second)]
    found: list[str] = []

    def assign(weight: nn.Parameter) -> None:
        try:
            weight.data = torch.zeros(2, 2)
        except CaptureError as error:
            found.append(str(error))

    watched[0].__enter__()
    other = threading.Thread(target=watched[1].__enter__)
    other.start()
    other.join()
    assign(second.weight)
    assert found == [], "the capture of this model is in another thread"
    watched[0].__exit__(None, None, None)
    watched[1].__exit__(None, None, None)
    assert "data" not in vars(nn.Parameter)
    with parameters_kept(first), parameters_kept(second):
        assign(first.weight)
        assign(second.weight)
    assert len(found) == 2
    assign(first.weight)
    assert len(found) == 2
