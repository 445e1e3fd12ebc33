"""What a pipelined module cannot do is refused in a sentence, and what only looks impossible works."""

from __future__ import annotations

import gc
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar import AutoparError, InputError, PipelinedModule, Plan

PLAN = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2)
X = torch.linspace(-1, 1, 32).view(4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def pipelined(model: nn.Module | None = None) -> PipelinedModule:
    return autopar.parallelize(net() if model is None else model, ["cpu", "cpu"], plan=PLAN, cache=False)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


# -- other processes ---------------------------------------------------------------------------------------------------


def _message_of(call: Callable[[], object], pipe: Any) -> None:
    try:
        call()
        pipe.send("no error")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("way", ["a call", "train_step", "prepare"])
def test_a_call_in_a_forked_child_raises_at_once(way: str, called_before: bool) -> None:
    pm = pipelined()
    if called_before:
        pm(X)
    call: Callable[[], object] = {
        "a call": lambda: pm(X),
        "train_step": lambda: pm.train_step(X, target=X, loss_fn=nn.functional.mse_loss),
        "prepare": lambda: pm.prepare((X,), {}),
    }[way]
    fork = multiprocessing.get_context("fork")
    mine, childs = fork.Pipe()
    child = fork.Process(target=_message_of, args=(call, childs), daemon=True)
    child.start()
    try:
        assert mine.poll(60), "the call hangs"
        assert "was forked from the one that made the pipelined module" in mine.recv()
    finally:
        child.kill()
        child.join()


def test_data_loaders_may_fork_beside_a_pipelined_module() -> None:
    pm = pipelined()
    pm(X)
    loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert [pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss).isfinite() for (x,) in loader] == [True] * 3


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
def test_torch_compile_leaves_a_pipelined_module_alone() -> None:
    model = net()
    wanted = model(X)
    compiled = torch.compile(pipelined(model), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(X), wanted)
        compiled(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_may_contain_a_pipelined_module() -> None:
    model = Outer(net())
    wanted = model(X)
    model.inner = pipelined(model.inner)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(X), wanted)
    compiled(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_compile_in_place_points_to_the_option() -> None:
    pm = pipelined()
    with pytest.warns(autopar.AutoparWarning, match="compile=True"):
        pm.compile()
    torch.testing.assert_close(pm(X), pm.unwrap()(X))


# -- models that are no plain modules ----------------------------------------------------------------------------------


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        return torch.jit.script(net())  # type: ignore[no-any-return]


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net(), X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", [autopar.parallelize, autopar.plan, autopar.profile, autopar.compare])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scripted, r"the model is TorchScript \(Sequential\)"),
        (traced, r"the model is TorchScript \(Sequential\)"),
        (lambda: Outer(scripted()), "module 'inner' is TorchScript"),
        (lambda: Outer(pipelined()), "module 'inner' is already pipelined"),
        (pipelined, "already pipelined; pass model.unwrap"),
    ],
)
def test_what_cannot_be_captured_is_named(call: Any, make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(make(), ["cpu"], example_args=(X,))


def test_a_module_that_is_pipelined_after_wrapping_is_refused() -> None:
    model = nn.Sequential(net(), nn.Linear(8, 8))
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=1)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    pm(X)
    model[0] = pipelined()
    with pytest.raises(InputError, match="module '0' is already pipelined"):
        pm(X)


@pytest.mark.slow
def test_a_plan_that_runs_the_model_itself_takes_a_pipelined_module_as_the_model_does() -> None:
    model = nn.Sequential(net(), nn.Linear(8, 8))
    pm = autopar.parallelize(model, ["cpu"], cache=False)
    pm(X)
    inner = model[0]
    model[0] = pipelined(inner)
    torch.testing.assert_close(pm(X), model[1](inner(X)))


@pytest.mark.parametrize(
    ("model", "message"), [(nn.ReLU(), r"nothing to divide.*relu#0"), (nn.Identity(), "the model has no operators")]
)
def test_a_model_without_work_is_refused_in_a_sentence(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        autopar.parallelize(model, ["cpu", "cpu"], cache=False)(X)


def test_packed_sequences_are_refused_by_the_name_of_the_input() -> None:
    packed = pack_sequence([torch.randn(5, 8), torch.randn(3, 8)])
    with pytest.raises(InputError, match="input 'input' is a PackedSequence"):
        autopar.parallelize(nn.LSTM(8, 8), ["cpu", "cpu"], cache=False)(packed)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (X.to_sparse, r"'input' has the layout torch.sparse_coo; give it dense \(input.to_dense\(\)\)"),
        (X.to_sparse_csr, "'input' has the layout torch.sparse_csr; give it dense"),
        (lambda: torch.nested.nested_tensor([X, X[:3]]), "'input' is a nested tensor; give the"),
        (lambda: torch.nested.nested_tensor([X], layout=torch.jagged), "'input' is a nested tensor; give the"),
    ],
    ids=["sparse", "compressed", "nested", "jagged"],
)
@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:Sparse CSR:UserWarning")
def test_other_than_dense_inputs_are_refused_at_every_call(made: Callable[[], torch.Tensor], message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    pm = pipelined(model)
    for before in (None, X):
        if before is not None:
            pm(before)
        with pytest.raises(InputError, match=message):
            pm(made())


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(src)[0])


class OwnAttention(nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(tokens, 8).float().transpose(0, 1)
        return (x @ x.transpose(1, 2)).softmax(-1).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x", "hint"),
    [
        (SequenceFirst(), torch.randn(6, 4, 8), r'LSTM takes \[sequence, batch, ...\].*batch_dim={"src": 1}'),
        (OwnAttention(), torch.randint(8, (6, 4)), r'if the inputs are .*, give batch_dim={"tokens": 1}'),
    ],
)
def test_a_sequence_first_model_is_pointed_to_batch_dim_with_its_own_line(
    model: nn.Module, x: torch.Tensor, hint: str
) -> None:
    with pytest.warns(autopar.AutoparWarning, match=hint) as caught:
        autopar.parallelize(model, ["cpu", "cpu"], n_microbatches=2, cache=False)(x)
    (message,) = [str(w.message) for w in caught if "batch_dim" in str(w.message)]
    assert "test_refusals.py:" in message
    assert "/autopar/" not in message
    name = "src" if isinstance(model, SequenceFirst) else "tokens"
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.AutoparWarning)
        split = autopar.parallelize(
            model, ["cpu", "cpu"], n_microbatches=2, max_replicas=1, batch_dim={name: 1}, cache=False
        )
        torch.testing.assert_close(split(x), model(x))


class CountedCalls(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(tokens)


def test_batch_dim_is_not_advised_where_a_written_buffer_keeps_the_batch_whole() -> None:
    with pytest.warns(autopar.AutoparWarning, match="writes buffer 'calls', once for every batch") as caught:
        autopar.parallelize(CountedCalls(), ["cpu", "cpu"], n_microbatches=2, cache=False)(torch.randint(8, (6, 5)))
    assert not any("batch_dim" in str(w.message) for w in caught)


@pytest.mark.slow
@pytest.mark.parametrize("batch_dim", [1, -1, {"input": 1}])
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_dimension_along_which_the_model_has_one_size_is_no_batch(batch_dim: Any, place: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).to(place), torch.randn(6, 8, device=place)
    cluster = autopar.Cluster.preset("2xH100")
    with pytest.raises(InputError, match=r"dimension 1 of 'input' counts samples, but .* in module '0' .* only for 8"):
        autopar.plan(model, cluster, batch_dim=batch_dim, example_args=(x,))
    assert autopar.plan(model, cluster, batch_dim=-2, example_args=(x,)).batch_size == 6


def test_a_model_for_one_batch_size_takes_it_as_a_whole() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(6, 8))

    for place in ("cpu", "meta"):
        model, x = Fixed(8, 4).to(place), torch.randn(6, 8, device=place)
        plan = autopar.plan(model, autopar.Cluster.preset("2xH100"), batch_dim=0, example_args=(x,))
        assert plan.n_microbatches == 1
        assert any("works only for 6 samples" in note or "takes batches of 6" in note for note in plan.notes)


# -- derivatives -------------------------------------------------------------------------------------------------------


def _penalty(pm: PipelinedModule, weigh: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(weigh(pm(x)), x, create_graph=True)
    gradient.norm().backward()


@pytest.mark.parametrize("weigh", [torch.sum, lambda y: y.square().sum()])
def test_second_derivatives_are_refused_not_dropped(weigh: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(AutoparError, match=r"no second derivatives.*pm.unwrap\(\)"):
        _penalty(pipelined(), weigh)


def _hessian(pm: PipelinedModule) -> Any:
    return torch.autograd.functional.hessian(lambda x: pm(x).sum(), X)


def _jacobian_product(pm: PipelinedModule) -> Any:
    return torch.autograd.functional.jvp(pm, X, torch.ones_like(X))


def _of_parameters(pm: PipelinedModule) -> Any:
    parameters = list(pm.parameters())
    first = torch.autograd.grad(pm(X).mean(), parameters, create_graph=True)
    total = torch.stack([one.sum() for one in first]).sum()
    return torch.autograd.grad(total, parameters, allow_unused=True)


def _of_an_encoder(pm: PipelinedModule) -> Any:
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(pm(x.tanh()).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("twice", [_hessian, _jacobian_product, _of_parameters, _of_an_encoder])
def test_second_derivatives_are_refused_where_autograd_would_take_them_for_zero(
    twice: Callable[[PipelinedModule], Any],
) -> None:
    """The gradient that enters the module is a constant."""
    with pytest.raises(AutoparError, match="no second derivatives"):
        twice(pipelined())


def test_create_graph_alone_gives_the_first_derivatives() -> None:
    pm = pipelined()
    pm(X).square().sum().backward(create_graph=True)
    found = [p.grad.detach().clone() for p in pm.parameters() if p.grad is not None]
    pm.zero_grad()
    pm.unwrap()(X).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in pm.parameters()])


@pytest.mark.slow
def test_a_module_is_freed_after_a_backward_with_create_graph() -> None:
    pm = pipelined()
    x = X.clone().requires_grad_()
    torch.autograd.grad(pm(x).square().mean(), x, create_graph=True)
    model = weakref.ref(pm.unwrap())
    pm.close()
    del pm
    gc.collect()
    assert model() is None


def _functional(pm: PipelinedModule) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    return lambda parameters: torch.func.functional_call(pm, parameters, (X,)).sum()


def _forward_mode(pm: PipelinedModule) -> object:
    with torch.autograd.forward_ad.dual_level():
        return pm(torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda pm: torch.func.vmap(pm)(torch.randn(3, 4, 8)),
        lambda pm: torch.func.jvp(pm, (X,), (X,)),
        lambda pm: torch.func.jacrev(pm)(X),
        lambda pm: torch.func.grad(_functional(pm))({k: v.detach() for k, v in pm.named_parameters()}),
        _forward_mode,
    ],
    ids=["vmap", "jvp", "jacrev", "grad", "forward mode"],
)
def test_derivatives_that_workers_cannot_see_are_refused(
    call: Callable[[PipelinedModule], object], called_before: bool
) -> None:
    pm = pipelined()
    if called_before:
        pm(X)
    with pytest.raises(AutoparError, match=r"a pipelined module (cannot|has no).*pm.unwrap\(\)"):
        call(pm)
    torch.testing.assert_close(pm(X), pm.unwrap()(X))


def test_a_functional_call_computes_the_same_or_says_that_gradients_would_be_lost() -> None:
    pm = pipelined()
    replaced = {name: (p.detach() * 2).requires_grad_() for name, p in pm.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(pm, replaced, (X,))
    torch.testing.assert_close(found, torch.func.functional_call(pm.unwrap(), replaced, (X,)))
    with pytest.raises(InputError, match=r"'0.weight' is replaced by a tensor that needs a gradient"):
        torch.func.functional_call(pm, {"0.weight": replaced["0.weight"]}, (X,))


# -- before the first call ---------------------------------------------------------------------------------------------


def test_a_module_without_a_plan_says_when_there_will_be_one() -> None:
    pm = autopar.parallelize(net(), ["cpu", "cpu"], cache=False)
    assert pm.plan is None
    for text in (repr(pm), str(pm.report())):
        assert "the first call makes it" in " ".join(text.split())
    pm(X)
    assert pm.plan is not None
    assert pm.plan.places in repr(pm)
    assert "Linear(in_features=8" in repr(pm)


def test_a_call_from_inside_of_a_call_of_the_same_module_is_refused() -> None:
    model = net()
    pm = pipelined(model)

    def calls_it(module: nn.Module, before: Any, after: Any) -> None:
        with torch.no_grad():
            pm(X)

    hook = model[2].register_full_backward_hook(calls_it)
    every_worker = pm.device_context(lambda _: nullcontext())  # stages this small might run on the caller's thread
    with every_worker, pytest.raises(AutoparError, match="inside one of its own calls"):
        pm(X).sum().backward()
    hook.remove()
    pm(X).sum().backward()  # it is as it was
