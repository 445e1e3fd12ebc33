"""Capture gives one graph that computes what the model does, over its own parameters, or says why it cannot."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import TwoTowers, UNet, assert_same_outputs, bert, gpt2, mlp, ragged_mask, tokens
from tied_models import CountingLinear, SharedModules
from torch import fx, nn

import autopar
from autopar import AutoparWarning, CaptureError, InputError, Plan
from autopar.analysis.operators import (
    compute_nodes,
    is_random,
    on_device,
    operator_keys,
    operator_name,
    replicable_nodes,
    requires_grad_nodes,
    written_arguments,
)
from autopar.capture.call_inputs import find_batch
from autopar.capture.cleanup import call_with_autocast
from autopar.capture.node_names import describe, module_path, source_line
from autopar.capture.program import Program, capture
from autopar.capture.torch_private import tree_unflatten
from cost_models.graphs import get_attribute


def run(program: Program, *args: Any, **kwargs: Any) -> Any:
    bound = program.bind(args, kwargs)
    assert bound is not None
    outputs = program.graph_module(*bound[0])
    return tree_unflatten(list(outputs[: program.n_outputs]), program.out_spec)


def only(program: Program, operator: str) -> Any:
    (node,) = [n for n in compute_nodes(program.graph) if operator_name(n) == operator]
    return node


@pytest.mark.parametrize("training", [True, False])
def test_the_graph_computes_what_the_model_does_at_any_batch_size(training: bool) -> None:
    model = UNet().train(training)
    program = capture(model, (), {"x": torch.randn(4, 3, 8, 8)})
    for rows in (2, 4, 7):
        x = torch.randn(rows, 3, 8, 8)
        assert_same_outputs(run(program, x=x), model(x=x))
    assert program.training is training
    assert program.batch_size == 4


@pytest.mark.slow
def test_parameters_are_the_models_own_under_their_own_names() -> None:
    model = gpt2()
    program = capture(model, (), {"input_ids": tokens(3)})
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    read = {str(n.target) for n in program.graph.nodes if n.op == "get_attr"}
    assert {name for name in read if name in own} >= {"lm_head.weight", "transformer.h.0.ln_1.weight"}
    for name in read & set(own):
        assert get_attribute(program.graph_module, name).data_ptr() == own[name].data_ptr()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_model_is_left_as_it_was() -> None:
    model = bert().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    capture(model, (), {"input_ids": tokens(3), "attention_mask": ragged_mask(3)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_what_is_captured_for_one_sample_serves_no_other_batch() -> None:
    model = mlp()
    program = capture(model, (torch.randn(1, 16),), {})
    assert program.bind((torch.randn(1, 16),), {}) is not None
    assert program.bind((torch.randn(5, 16),), {}) is None
    assert capture(model, (torch.randn(5, 16),), {}).bind((torch.randn(1, 16),), {}) is None


class Branching(nn.Module):
    def __init__(self, threshold: int) -> None:
        super().__init__()
        self.linear, self.threshold = nn.Linear(4, 4), threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return 2 * y if x.shape[0] >= self.threshold else y


@pytest.mark.parametrize(("example", "threshold"), [(5, 4), (3, 4), (1, 2), (2, 2)])
def test_a_branch_on_the_batch_size_holds_only_for_the_sizes_that_take_it(example: int, threshold: int) -> None:
    model = Branching(threshold)
    program = capture(model, (torch.randn(example, 4),), {})
    for rows in (1, 2, 3, 5, 8):
        x = torch.randn(rows, 4)
        if program.bind((x,), {}) is not None:  # else it is captured anew
            assert_same_outputs(run(program, x), model(x))
    assert program.bind((torch.randn(example, 4),), {}) is not None


def test_a_call_with_another_signature_is_not_taken_for_this_one() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, flag: bool = True, n: Any = 1) -> Any:
            return x * (2 if flag else 3) * n

    x = torch.randn(4, 3)
    program = capture(Model(), (x,), {"flag": True, "n": 1})
    same = [((x,), {"n": 1, "flag": True}), ((torch.randn(9, 3),), {"flag": True, "n": 1})]
    other: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {"flag": False, "n": 1}),
        ((x,), {"flag": True, "n": 2}),
        ((x,), {"flag": True, "n": 1.0}),
        ((x,), {"flag": 1, "n": 1}),
        ((x,), {"flag": True, "n": "1"}),
        ((x,), {"flag": True}),
        ((x, None), {"flag": True, "n": 1}),
        ((x.double(),), {"flag": True, "n": 1}),
        ((x[:, :2],), {"flag": True, "n": 1}),
        ((x[0],), {"flag": True, "n": 1}),
        ((), {"x": x, "flag": True, "n": 1}),
    ]
    assert all(program.bind(*call) is not None for call in same)
    assert [program.bind(*call) for call in other] == [None] * len(other)


@pytest.mark.parametrize(
    ("batch_dim", "shapes", "expected"),
    [
        (None, [(4, 3), (4,), (2, 4), ()], ([0, 0, None, None], 4)),
        (1, [(4, 3), (4,), (2, 3)], ([1, None, 1], 3)),
        (-1, [(4, 3), (3,), (2, 4)], ([1, 0, None], 3)),
        ({"b": 0}, [(4, 3), (4,)], ([0, 0], 4)),
        ({"a": None}, [(6, 6), (4, 3), (4,)], ([None, 0, 0], 4)),
        ({"b": 1}, [(6, 6), (4, 6), (6,), (4,)], ([0, 1, 0, None], 6)),
        ({"b": 0}, [(6, 6), (4, 6)], ([None, 0], 4)),
        ({"a": None, "b": None}, [(4, 3), (4,)], ([None, None], 0)),
        ({"a": 1, "b": None}, [(4, 3), (3,)], ([1, None], 3)),
        (None, [(), ()], ([None, None], 0)),
    ],
)
def test_the_batch_is_found_at_the_batch_dimension(batch_dim: Any, shapes: list[Any], expected: Any) -> None:
    class Model(nn.Module):
        def forward(self, a: Any, b: Any, c: Any = None, d: Any = None) -> Any:
            return a

    args = tuple(torch.zeros(shape) for shape in shapes)
    assert find_batch(Model(), args, {}, list(args), batch_dim) == expected


@pytest.mark.parametrize(
    ("batch_dim", "shapes", "message"),
    [
        (None, [(0, 3), (0,)], r"'a' has no samples: shape \(0, 3\)"),
        ({"z": 0}, [(4, 3), (4,)], r"\['z'\], but the inputs are \['a', 'b'\]"),
        ({"a": 0, "b": 1}, [(4, 3), (4,)], "'b' dimension 1, but .* it has dimensions -1 to 0$"),
        ({"b": 0}, [(4, 3), ()], "'b' dimension 0, but .* it has no dimensions$"),
        (5, [(4, 3), ()], "batch_dim=5, but .*: 'a' has dimensions -2 to 1, 'b' has no dimensions$"),
        ({"a": 0, "b": 0}, [(4, 3), (5,)], "'b' has 5 samples at dimension 0, but input 'a' has 4"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(batch_dim: Any, shapes: list[Any], message: str) -> None:
    class Model(nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a

    args = tuple(torch.zeros(shape) for shape in shapes)
    with pytest.raises(InputError, match=message):
        find_batch(Model(), args, {}, list(args), batch_dim)


class Deciding(nn.Module):
    def __init__(self, decide: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.decide = nn.Linear(4, 4), decide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.decide(y):
            return y * 2
        return y


@pytest.mark.parametrize("decide", [lambda y: y.sum() > 0, lambda y: y.max().item() > 0, lambda y: bool((y > 0).any())])
def test_control_flow_on_values_is_refused_naming_module_line_and_remedy(decide: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Deciding(decide), nn.ReLU()))
    line = inspect.getsourcelines(Deciding.forward)[1] + 2
    with pytest.raises(CaptureError, match=rf"'1\.0' at .*test_capture\.py:{line}.*torch\.where") as caught:
        capture(model, (torch.randn(3, 4),), {}, strict=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [((), {"input": torch.zeros(2, 16), "colour": 3}, "colour"), ((), {}, "input"), ((1, 2, 3), {}, "positional")],
)
def test_arguments_that_the_model_does_not_take_are_refused_by_name(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        capture(mlp(), args, kwargs)


def test_an_error_of_the_model_itself_is_the_models() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(5, 4)))
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=2)
    with pytest.raises((CaptureError, RuntimeError), match="shapes cannot be multiplied"):
        autopar.parallelize(model, ["cpu", "cpu"], plan=plan)(torch.randn(3, 4))


def test_inputs_of_a_wrong_shape_leave_no_log_of_the_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says it all."""
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))
    with pytest.raises(CaptureError):
        capture(mlp(), (torch.randn(4, 5),), {})
    assert [record.name for record in logged if record.levelno >= logging.WARNING] == []


class Remembering(nn.Module):
    """Keeps something of every call in a plain attribute, which a graph cannot."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.calls, self.last = 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "number":
            self.calls += 1
            return y * self.calls
        self.last = y
        return y


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_model_that_remembers_calls_in_plain_attributes_is_refused_or_warned_of(kind: str) -> None:
    model = Remembering(kind)
    name = "calls" if kind == "number" else "last"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            capture(model, (torch.randn(3, 4),), {})
            said = " ".join(str(w.message) for w in caught if issubclass(w.category, AutoparWarning))
        except CaptureError as error:
            said = str(error)
    assert name in said
    assert (model.calls, model.last) == (0, None)


class HookedOnFirstCall(nn.Module):
    """Registers a hook in its first call, as libraries do that record hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hooked = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.linear.register_forward_hook(lambda module, args, output: output * 2)
            self.hooked = True
        return self.linear(x)


def test_hooks_that_the_code_registers_are_not_registered_twice() -> None:
    model, x = HookedOnFirstCall(), torch.randn(3, 4)
    expected = 2 * model.linear(x)
    with pytest.warns(AutoparWarning, match="forward assigns hooked"):
        capture(model, (x,), {})
    assert not model.linear._forward_hooks
    for _ in range(2):
        assert_same_outputs(model(x), expected)


@pytest.mark.slow
def test_modules_with_several_names_are_captured_by_export_and_watched_under_each() -> None:
    model, x = SharedModules(CountingLinear), torch.randn(3, 12)
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.warns(AutoparWarning, match="forward assigns entry.calls, but"):
        program = capture(model, (x,), {})
    assert {node.op for node in program.graph.nodes} == {"placeholder", "get_attr", "call_function", "output"}
    read = [get_attribute(program.graph_module, str(n.target)) for n in program.graph.find_nodes(op="get_attr")]
    assert sorted(names[id(p)] for p in read) == sorted(names.values())
    assert model.entry.calls == 0
    assert_same_outputs(program.graph_module(x)[0], model(x))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_models_with_any_signature_are_captured(rows: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

    class Places(Model):
        def forward(self, *xs: torch.Tensor) -> torch.Tensor:
            return self.linear(sum(xs))

    class Names(Model):
        def forward(self, **xs: torch.Tensor) -> torch.Tensor:
            return self.linear(sum(xs.values()))

    class Mixed(Model):
        def forward(self, first: torch.Tensor, /, *xs: torch.Tensor, last: int = 1, **more: Any) -> torch.Tensor:
            return self.linear(first + sum(xs) * last) + sum(more.values())

    x, y = torch.randn(2, rows, 4)
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = [
        (Places(), (x,), {}),
        (Places(), (x, y), {}),
        (Names(), (), {"a": x}),
        (Names(), (), {"b": x, "a": y}),
        (Mixed(), (x,), {}),
        (Mixed(), (x, y), {"last": 2}),
        (Mixed(), (x, y, x), {"other": y, "last": 3, "number": 2.0}),
    ]
    for model, args, kwargs in calls:
        assert_same_outputs(run(capture(model, args, kwargs), *args, **kwargs), model(*args, **kwargs))


def test_operators_are_named_by_module_and_keep_their_names_in_another_capture() -> None:
    model = TwoTowers()
    inputs = {"a": torch.randn(4, 6), "b": torch.randn(4, 10)}
    first, second = (capture(model.train(mode), (), inputs) for mode in (True, False))
    keys = list(operator_keys(first).values())
    assert keys == list(operator_keys(second).values())
    assert len(set(keys)) == len(keys)
    assert {"left.0/linear#0", "left.2/linear#0", "right.1/tanh#0", "/mul#0"} <= set(keys)


def test_an_operators_module_and_line_are_the_users() -> None:
    model = UNet()
    program = capture(model, (torch.randn(2, 3, 8, 8),), {})
    node = only(program, "conv_transpose2d")
    line = inspect.getsourcelines(UNet.forward)[1] + 3
    assert module_path(node) == "up2"
    assert source_line(node).endswith(f"models.py:{line}")
    assert describe(node).startswith("aten.conv_transpose2d") and "'up2'" in describe(node)  # noqa: PT018


def test_facts_about_operators() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop, self.frozen = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(4).cos()
            return self.drop(self.norm(self.frozen(x) + positions)).relu_()

    model = Model()
    program = capture(model, (torch.randn(3, 4),), {})
    free, grad = replicable_nodes(program), requires_grad_nodes(program.graph_module)
    module = program.graph_module
    assert {only(program, name) in free for name in ("arange", "cos")} == {True}
    assert not {only(program, name) for name in ("linear", "batch_norm", "dropout", "relu_")} & free
    assert {only(program, name) in grad for name in ("batch_norm", "dropout", "relu_")} == {True}
    assert {only(program, name) in grad for name in ("arange", "cos", "linear")} == {False}
    assert written_arguments(only(program, "relu_")) == [only(program, "dropout")]
    written = {str(n.target) for n in written_arguments(only(program, "batch_norm"))}
    assert written == {"norm.running_mean", "norm.running_var"}
    assert is_random(only(program, "dropout"), module)
    assert not any(is_random(n, module) for n in compute_nodes(program.graph) if operator_name(n) != "dropout")
    program = capture(model.eval(), (torch.randn(3, 4),), {})
    assert not any(is_random(n, program.graph_module) for n in compute_nodes(program.graph))


def test_hooks_of_all_modules_do_not_run_while_a_model_is_captured() -> None:
    called: list[nn.Module] = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)),
        nn.modules.module.register_module_forward_pre_hook(lambda module, *_: called.append(module)),
    ]
    model, x = mlp(4, 2), torch.randn(3, 4)
    try:
        program = capture(model, (x,), {})
        assert called == []
        model(x)
        assert len(called) == 2 * len(list(model.modules()))
    finally:
        for handle in handles:
            handle.remove()
    assert_same_outputs(program.graph_module(x)[0], model(x))


@pytest.mark.parametrize("way", ["call", "train_step"])
def test_an_in_place_module_at_a_stages_head_works_where_symbolic_trace_stands_in(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", refuse)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    nn.functional.mse_loss(model(x), y).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=Plan.from_split({"0": 0, "1": 1}, n_microbatches=2))
    if way == "call":
        nn.functional.mse_loss(pm(x), y).backward()
    else:
        pm.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + torch.arange(4, device=x.device)
        return found


def test_a_program_knows_the_device_of_its_constants_after_its_parameters_have_moved() -> None:
    model = _Positions()
    program = capture(model, (torch.randn(2, 4),), {})
    program.graph_module.to("meta")
    moved = on_device(program.graph_module, program.device, torch.device("meta"))
    assert moved(torch.randn(2, 4, device="meta"))[0].device.type == "meta"
    (constant,) = [node for node in moved.graph.nodes if operator_name(node) == "arange"]
    assert constant.kwargs["device"] == torch.device("meta")


class _Angles(nn.Module):
    """Positions in float32 whatever the caller's autocast, as rotary embeddings compute them."""

    def __init__(self, grad: bool = True) -> None:
        super().__init__()
        self.inner, self.grad = nn.Linear(4, 4), grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.set_grad_enabled(self.grad), torch.autocast(device_type=x.device.type, enabled=False):
            at = torch.arange(x.shape[1], device=x.device).float()
            angles = at[:, None] @ torch.ones(1, 4, device=x.device)
        found: torch.Tensor = y.float() + angles
        return found


@pytest.mark.parametrize("grad", [True, False])
def test_blocks_under_autocast_follow_the_device_of_their_stage(grad: bool) -> None:
    """Also inside a block under no_grad."""
    model, x = _Angles(grad), torch.randn(2, 600, 4)
    program = capture(model, (x,), {})
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    moved = on_device(program.graph_module, cpu, gpu)
    graphs = [part.graph for part in moved.modules() if isinstance(part, fx.GraphModule)]
    (block,) = [node for graph in graphs for node in graph.nodes if node.target is call_with_autocast]
    assert block.args[0] == "cuda"
    back = on_device(moved, gpu, cpu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(back(x)[0], model(x), rtol=0, atol=0)  # bfloat16 would round positions from 256 on


class _Placed(nn.Module):
    """Two layers, constants with and without a device, a buffer, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * self.scale + torch.arange(4, device=x.device) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        found: torch.Tensor = self.b(y + self.table + torch.ones(4))
        return found


META = torch.device("meta")


@pytest.mark.parametrize("placed", ["the model", "its first layer", "its inputs"])
def test_capture_takes_a_model_and_inputs_on_several_devices_to_be_on_one(placed: str) -> None:
    model, x = _Placed(), torch.randn(3, 4)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    call = x.to(META) if placed == "its inputs" else x
    if placed != "its inputs":
        (model if placed == "the model" else model.a).to(META)
    before = {name: t.device for name, t in [*model.named_parameters(), *model.named_buffers()]}
    program = capture(model, (call,), {}, device=torch.device("cpu"))
    assert program.device == torch.device("cpu")
    made = {node.meta["val"].device for node in compute_nodes(program.graph)}
    assert made == {torch.device("cpu")}
    assert {name: t.device for name, t in [*model.named_parameters(), *model.named_buffers()]} == before
    with_values = torch.func.functional_call(program.graph_module, state, (x,))
    torch.testing.assert_close(with_values[0], expected)


def test_a_model_on_several_devices_is_captured_as_if_on_the_cpu() -> None:
    model = _Placed()
    model.a.to(META)
    assert capture(model, (torch.randn(3, 4, device=META),), {}).device == torch.device("cpu")


def test_a_model_without_tensors_is_captured_where_its_inputs_are() -> None:
    program = capture(nn.Softmax(1), (torch.randn(3, 4, device=META),), {})
    assert program.device == META


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"pair": [y, (y + 1, None)], "ordered": OrderedDict(b=y * 2, a=3), "plain": {"y": y}}


@pytest.mark.slow
def test_what_a_model_returns_has_its_own_types_and_lines_are_the_users_where_symbolic_trace_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", refuse)
    model, x = _Nested(), torch.randn(6, 4)
    program = capture(model, (x,), {})
    assert {source_line(n).rpartition(":")[0] for n in program.graph.nodes if n.op == "call_function"} == {__file__}
    pm = autopar.parallelize(model, ["cpu"], example_args=(x,), tune=0)
    found, expected = pm(x), model(x)

    def types(value: Any) -> Any:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        )
        return type(value), [(key, types(item)) for key, item in items]

    assert types(found) == types(expected)
    found["extra"] = 1
    torch.testing.assert_close(found["pair"][1][0], expected["pair"][1][0])


class _Difference(nn.Module):
    """Its inputs are not in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, second: torch.Tensor, first: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return self.inner(second) - factor * first


@pytest.mark.parametrize("n_positional", [0, 1, 2])
def test_keywords_reach_their_inputs_where_symbolic_trace_stands_in(
    n_positional: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", refuse)
    given = {"second": torch.randn(3, 4), "first": torch.randn(3, 4)}
    args, kwargs = tuple(given.values())[:n_positional], dict(list(given.items())[n_positional:])
    model = _Difference()
    program = capture(model, args, kwargs | {"factor": 3.0})
    bound = program.bind(args, kwargs | {"factor": 3.0})
    assert bound is not None
    assert torch.equal(program.graph_module(*bound[0])[0], model(**given, factor=3.0))


class NotedByLibraries(nn.Module):
    """Its forward runs code of libraries and its own, which note something on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by_transformers, self.by_torch, self.kept = False, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exec("model.by_transformers = True", {"__name__": "transformers.utils.output_capturing", "model": self})
        exec("model.by_torch = True", {"__name__": "torch.nn.utils.notes", "model": self})
        exec("model.kept = True", {"__name__": "transformers.models.bert.modeling_bert", "model": self})
        return self.linear(x)


def test_what_libraries_note_on_a_model_is_not_warned_of_and_no_change_by_the_caller() -> None:
    model = NotedByLibraries()
    with pytest.warns(AutoparWarning) as caught:
        program = capture(model, (torch.randn(3, 4),), {})
    said = [str(w.message) for w in caught]
    assert len(said) == 1
    assert said[0].startswith("forward assigns kept, but")
    assert program.live == {"by_transformers", "by_torch", "kept"}
    assert (model.by_transformers, model.by_torch, model.kept) == (False, False, False)


class NotesTheDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input_dtype, self.place = x.dtype, x.device
        return self.linear(x.double().to(self.input_dtype).to(self.place))


@pytest.mark.filterwarnings("error")
def test_an_assigned_dtype_or_device_is_not_warned_of() -> None:
    assert capture(NotesTheDtype(), (torch.randn(3, 4),), {}).live == {"input_dtype", "place"}


class ReturnsMore(nn.Module):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(4, 4), more

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"result": self.linear(x), "about": [x.shape[-1], self.more]}


class Unknown:
    """Neither a tensor nor a constant."""


def test_an_output_that_no_graph_returns_is_refused_by_its_entry() -> None:
    with pytest.raises(CaptureError) as refused:
        capture(ReturnsMore(Unknown()), (torch.randn(3, 4),), {})
    said = str(refused.value)
    assert re.search(r"its output\['about'\]\[1\] is a \S*Unknown, .* drop it .* or return it beside the model", said)
    assert "because it returns a Unknown in output['about'][1]" in said
    assert "github" not in said


def test_an_output_may_hold_a_device() -> None:
    model, x = ReturnsMore(torch.device("cpu")), torch.randn(3, 4)
    pm = autopar.parallelize(model, ["cpu"], example_args=(x,), tune=0)
    assert pm(x)["about"] == model(x)["about"] == [4, torch.device("cpu")]
