"""The private corners of torch that autopar uses are where they were and do what they did."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
import transformers
from models import bert, gpt2, t5, tokens
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from autopar.analysis.operators import compute_nodes
from autopar.capture import torch_private, torch_private_ranks
from autopar.capture.node_names import module_path
from autopar.capture.program import capture


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize("module", [torch_private, torch_private_ranks])
def test_this_file_tests_every_function_of_the_private_modules(module: types.ModuleType) -> None:
    here, short = inspect.getsource(sys.modules[__name__]), module.__name__.rpartition(".")[2]
    public = [name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]
    own = [
        n for n in public if n.startswith("tree_") or getattr(getattr(module, n), "__module__", "") == module.__name__
    ]
    assert own
    assert [name for name in own if f"{short}.{name}" not in here] == []


def test_trees_are_flattened_and_built_again() -> None:
    tree = {"x": [1, (2, None)], "y": Pair("text", {"z": torch.ones(2)}), "e": ()}
    leaves, spec = torch_private.tree_flatten(tree)
    assert leaves[:4] == [1, 2, None, "text"]
    assert torch_private.tree_leaves(tree)[:4] == leaves[:4]
    back = torch_private.tree_unflatten(leaves, spec)
    assert back == tree
    assert isinstance(back["y"], Pair)
    assert isinstance(spec, torch_private.TreeSpec)
    assert spec.num_leaves == len(leaves) == 5
    assert torch_private.tree_map(str, {"a": (1, [2])}) == {"a": ("1", ["2"])}


def test_tree_specs_compare_by_structure() -> None:
    def spec(tree: Any) -> torch_private.TreeSpec:
        return torch_private.tree_flatten(tree)[1]

    assert spec(((1,), {"a": 2})) == spec(((3,), {"a": "b"}))
    assert spec(((1,), {"a": 2})) != spec(((1, 2), {}))
    assert spec([1]) != spec((1,))
    assert spec({"a": 1}) != spec({"b": 1})


def test_tree_paths_are_readable_and_in_the_order_of_leaves() -> None:
    tree = ((torch.ones(1), {"mask": 1}), {"labels": [2, 3]})
    paths = torch_private.tree_paths(tree)
    assert paths == ["[0][0]", "[0][1]['mask']", "[1]['labels'][0]", "[1]['labels'][1]"]
    assert len(paths) == len(torch_private.tree_leaves(tree))


def test_fake_tensors_are_distinguished_from_real_and_meta_ones() -> None:
    with FakeTensorMode():
        fake = nn.Linear(2, 2).weight
    assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(torch.ones(2))
    assert not torch_private.is_fake(torch.empty(2, device="meta"))


def test_an_export_is_that_of_its_own_thread() -> None:
    def here() -> tuple[bool, bool]:
        return torch.compiler.is_exporting(), torch_private.has_dispatch_mode()

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as other:
                found.append((here(), other.submit(here).result()))
            return x + 1

    found: list[tuple[tuple[bool, bool], tuple[bool, bool]]] = []
    torch.export.export(Asks(), (torch.ones(2),), strict=False)
    assert found == [((True, True), (True, False))]
    assert here() == (False, False)


@pytest.mark.parametrize("retain", [False, True])
def test_a_running_backward_tells_whether_it_keeps_the_graph(retain: bool) -> None:
    seen = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private.backward_keeps_graph())
            return gradient

    x = torch.ones(2, requires_grad=True)
    Asking.apply(x).sum().backward(retain_graph=retain)
    torch.autograd.grad(Asking.apply(x).sum(), x, retain_graph=retain)
    assert seen == [retain, retain]


def test_a_backward_is_known_to_run_while_it_runs() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(torch_private.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not torch_private.in_backward()


def test_a_users_autograd_function_goes_through_the_call_only_inside_and_in_this_thread() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    before = torch.autograd.Function.apply
    seen: list[torch.Tensor] = []

    def call(cls: type, apply: Any, args: Any, kwargs: Any) -> Any:
        seen.append(*args)
        assert cls is Double
        return apply(*args) + 1

    with torch_private.custom_functions_through(call):
        assert torch.equal(Double.apply(torch.ones(2)), torch.full((2,), 3.0))
        thread = threading.Thread(target=lambda: Double.apply(torch.zeros(2)))
        thread.start()
        thread.join()
    assert [x.sum() for x in seen] == [2]
    assert torch.autograd.Function.apply == before
    assert torch.equal(Double.apply(torch.ones(2)), torch.full((2,), 2.0))


@dataclasses.dataclass
class Unregistered:
    value: torch.Tensor
    more: torch.Tensor


class Opaque:
    pass


class Returning(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return Unregistered(y, y + 1) if self.kind is Unregistered else Opaque()


def export_error(model: nn.Module, kwargs: dict[str, Any]) -> Exception:
    with pytest.raises((RuntimeError, TypeError)) as caught:  # TypeError: torch 2.11
        torch.export.export(model, (), kwargs, strict=False)
    return caught.value


def test_a_dataclass_that_export_does_not_know_is_registered_and_then_exported() -> None:
    model, inputs = Returning(Unregistered), {"x": torch.randn(2, 3)}
    assert torch_private.register_output_type(export_error(model, inputs), model)
    output = torch.export.export(model, (), inputs, strict=False).module()(**inputs)
    assert isinstance(output, Unregistered)
    torch.testing.assert_close(output.more, model(**inputs).more)


@pytest.mark.slow
def test_a_compiled_function_is_called_while_another_thread_compiles() -> None:
    seen: list[torch.Tensor | BaseException] = []

    def work(seed: int) -> None:
        layer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8 + seed)))
        try:
            compiled = torch_private.compile_for_threads(layer.forward, "aot_eager")
            for rows in (2, 3, 4):
                x = torch.ones(rows, 4)
                seen.append(compiled(x) - layer(x))
        except BaseException as error:
            seen.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 12
    assert all(isinstance(one, torch.Tensor) and not one.any() for one in seen), seen


@pytest.mark.slow
def test_the_seconds_of_compiling_count_backwards_and_outlive_a_reset() -> None:
    def compiled_backward() -> tuple[float, float, float]:
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        function = torch_private.compile_for_threads(layer.forward, "aot_eager")
        start = torch_private.compile_seconds()
        loss = function(torch.ones(2, 4)).sum()
        forward = torch_private.compile_seconds()
        loss.backward()
        return start, forward, torch_private.compile_seconds()

    for _ in range(2):
        torch.compiler.reset()
        start, forward, backward = compiled_backward()
        assert start < forward < backward
    assert torch_private.compile_seconds() == backward, "no compiling since"


def test_other_classes_and_other_errors_are_not_registered() -> None:
    model, inputs = Returning(Opaque), {"x": torch.randn(2, 3)}
    assert not torch_private.register_output_type(export_error(model, inputs), model)
    assert not torch_private.register_output_type(RuntimeError("something else"), model)
    assert not torch_private.register_output_type(RuntimeError("<class 'no.such.Thing'> in output"), model)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, t5])
def test_caches_of_transformers_can_be_exported(build: Any) -> None:
    model, inputs = build().eval(), {"input_ids": tokens(2)}
    if build is t5:
        inputs["decoder_input_ids"] = tokens(2, 5)
    original = model(**inputs)
    assert isinstance(original.past_key_values, transformers.Cache)
    for _ in range(3):  # one class a time
        try:
            exported = torch.export.export(model, (), inputs, strict=False)
            break
        except RuntimeError as error:
            assert torch_private.register_output_type(error, model)  # noqa: PT017
    output = exported.module()(**inputs)
    assert type(output.past_key_values) is type(original.past_key_values)
    found, expected = torch_private.tree_leaves(output), torch_private.tree_leaves(original)
    assert len(found) == len(expected) > 1
    torch.testing.assert_close(found, expected)


def test_model_outputs_without_a_cache_need_no_registration() -> None:
    model = bert().eval()
    inputs = {"input_ids": tokens(2)}
    output = torch.export.export(model, (), inputs, strict=False).module()(**inputs)
    assert type(output) is type(model(**inputs))


def test_operators_that_exports_passes_add_belong_to_no_module_of_that_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    program = capture(Model(), (torch.randn(3, 2, 4),), {})
    paths = {module_path(node) for node in compute_nodes(program.graph)}
    assert paths <= {"", "rnn"}
    assert torch_private.NO_MODULE not in paths


def test_a_profiler_is_seen_from_every_thread() -> None:
    seen = []
    assert not torch_private.profiler_is_on()
    with torch.profiler.profile():
        thread = threading.Thread(target=lambda: seen.append(torch_private.profiler_is_on()))
        thread.start()
        thread.join()
    assert seen == [True]
    assert not torch_private.profiler_is_on()


def test_operators_without_a_public_binding_have_one() -> None:
    silu = torch_private.functional_binding("silu")
    assert isinstance(silu, types.BuiltinFunctionType)  # F.silu is Python
    assert torch.equal(silu(torch.ones(2)), torch.nn.functional.silu(torch.ones(2)))
    assert torch_private.functional_binding("no such operator") is None


def test_hooks_of_saved_tensors_are_listed_innermost_first() -> None:
    assert torch_private.saved_tensors_hooks() is None
    outer, inner = (lambda t: t, lambda t: t), (lambda t: t + 0, lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        assert torch_private.saved_tensors_hooks() == outer
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert torch_private.saved_tensors_hooks() == inner
    assert torch_private.saved_tensors_hooks() is None


def test_hooks_of_saved_tensors_that_a_checkpoint_sets_are_told_apart() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        hooks = torch_private.saved_tensors_hooks()
        assert hooks is not None
        seen.append(torch_private.of_checkpoint(hooks))
        return x * x

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False).sum().backward()  # with other hooks the second time
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        look(x)
    assert seen == [True, True, False]


def test_hooks_of_all_modules_are_put_aside_and_back_in_their_order() -> None:
    called: list[str] = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda *_, name=name: called.append(name)) for name in "ab"
    ]
    handles.append(nn.modules.module.register_module_full_backward_hook(lambda *_: called.append("backward")))
    model, x = nn.Linear(2, 2), torch.randn(1, 2, requires_grad=True)
    try:
        with torch_private.no_global_hooks():
            model(x).sum().backward()
        assert called == []
        model(x).sum().backward()
        assert called == ["a", "b", "backward"]
    finally:
        for handle in handles:
            handle.remove()


class Sizes(nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x.reshape(x.shape[0] * x.shape[1], 2) * n, x.new_zeros(x.shape[1] + n)


def test_traced_values_are_specialised_symbol_by_symbol() -> None:
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(Sizes(), (torch.randn(3, 4, 2), 5), dynamic_shapes=({0: auto, 1: auto}, auto))
    values = {node.name: node.meta["val"] for node in exported.graph.nodes if "val" in node.meta}
    x, n = values["x"], values["n"]
    rows, columns, number = map(torch_private.symbol_of, (x.shape[0], x.shape[1], n))
    assert None not in (rows, columns, number)
    assert torch_private.symbol_of(x.shape[2]) is None
    assert torch_private.symbols_in(x) == {rows, columns}
    assert torch_private.symbols_in([x, n]) == {rows, columns, number}
    folded = next(v for v in values.values() if isinstance(v, torch.Tensor) and v.dim() == 2)
    assert torch_private.symbol_of(folded.shape[0]) is None
    assert (torch_private.hint_of(folded.shape[0]), torch_private.hint_of(2)) == (12, 2)
    assert torch_private.symbols_in(torch_private.at_sizes(folded, {columns: rows})) == {rows}
    at_seven = torch_private.at_sizes(folded, {columns: 7})
    assert torch_private.symbols_in(at_seven) == {rows}
    assert at_seven.shape[0].node.hint == 3 * 7
    assert tuple(torch_private.at_sizes(at_seven, {rows: 2}).shape) == (14, 2)
    assert torch_private.at_sizes([x, n], {rows: 2, columns: 7, number: 9})[1] == 9
    assert torch_private.at_sizes(x, {number: 9}) is x


class Repeated(nn.Module):
    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(times, 1)


def test_sizes_that_depend_on_values_stay_symbols_where_others_are_specialised() -> None:
    args = (torch.randn(2, 3, 4), torch.tensor([1, 0, 2]))
    exported = torch.export.export(Repeated(), args, dynamic_shapes=({2: torch.export.Dim.AUTO}, None))
    x, repeated = (v for n in exported.graph.nodes if getattr(v := n.meta.get("val"), "ndim", 0) == 3)
    columns, rows = torch_private.symbol_of(x.shape[2]), torch_private.symbol_of(repeated.shape[1])
    assert columns is not None
    assert torch_private.symbols_in(repeated.stride(0)) == {rows, columns}
    at_seven = torch_private.at_sizes(repeated, {columns: 7})
    assert torch_private.symbols_in(at_seven.stride(0)) == {rows}
    assert torch_private.symbol_of(at_seven.shape[1]) == rows
    assert at_seven.shape[2] == 7


def test_a_recurrent_module_computes_with_the_parameters_put_into_its_tables() -> None:
    rnn, other = nn.GRU(3, 3), nn.GRU(3, 3)
    x = torch.randn(2, 1, 3)
    for name, parameter in other.named_parameters():
        rnn._parameters[name] = parameter
    torch_private.refresh_flat_weights([rnn, nn.Linear(1, 1)])
    assert torch.equal(rnn(x)[0], other(x)[0])


def test_transforms_of_functions_and_forward_mode_are_seen() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.inside_function_transform(), torch_private.inside_forward_mode()))
        return x.sum()

    x = torch.ones(2)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        look(x)
    look(x)
    assert seen == [(False, False), (True, False), (True, False), (False, True), (False, False)]


def test_fakes_on_one_device_are_made_of_tensors_that_stay_on_another() -> None:
    meta, cpu, scalar = torch.empty(2, 3, device="meta"), torch.randn(3), nn.Parameter(torch.tensor(2.0))
    with torch_private.fakes_on(torch.device("cpu")):
        fakes = [FakeTensorMode().from_tensor(x) for x in (meta, cpu, scalar)]
    assert [x.device.type for x in fakes] == ["cpu"] * 3
    assert [x.shape for x in fakes] == [meta.shape, cpu.shape, scalar.shape]
    assert meta.is_meta
    assert FakeTensorMode().from_tensor(meta).device.type == "meta"


def test_a_forward_of_distributed_data_parallel_is_seen(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_private_ranks.inside_ddp())
            return super().forward(x)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Looks(2, 2)
        model(torch.ones(1, 2))
        nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2))
        model(torch.ones(1, 2))
    finally:
        torch.distributed.destroy_process_group()
    assert seen == [False, True, False]


def test_only_torchs_own_hooks_of_buffers_are_dropped() -> None:
    def of_export(_: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        seen.append(f"export {name}")

    def of_user(_: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        seen.append(f"user {name}")

    of_export.__module__ = "torch.export.anywhere"
    seen: list[str] = []
    register = nn.modules.module.register_module_buffer_registration_hook
    handles = [register(hook) for hook in (of_export, of_user)]
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1))
    torch_private.drop_buffer_hooks_of_export()
    module.register_buffer("b", torch.zeros(1))
    for handle in handles:
        handle.remove()
    module.register_buffer("c", torch.zeros(1))
    assert seen == ["export a", "user a", "user b"]


def test_hooks_of_gradients_are_seen_until_they_are_removed() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        assert not torch_private.have_gradient_hooks([other, weight])
        handle = register(lambda _: None)
        assert torch_private.have_gradient_hooks([other, weight])
        handle.remove()
    many = torch.autograd.graph.register_multi_grad_hook([weight], lambda _: None)
    assert torch_private.have_gradient_hooks([other, weight])
    many.remove()
    assert not torch_private.have_gradient_hooks([other, weight])


def test_a_tensor_in_the_place_of_another_runs_its_hooks_until_they_are_removed() -> None:
    old, ran = nn.Parameter(torch.ones(2)), list[str]()
    handles = [
        old.register_hook(lambda g: ran.append("gradient") or 2 * g),  # type: ignore[func-returns-value]
        old.register_post_accumulate_grad_hook(lambda p: ran.append("accumulated")),
    ]
    old.tag, old.kept = "old", "old"  # type: ignore[attr-defined]
    new = nn.Parameter(torch.zeros(2))
    new.kept = "new"  # type: ignore[attr-defined]
    torch_private.keep_hooks_and_attributes(old, new)
    new.sum().backward()
    assert ran == ["gradient", "accumulated"]
    assert new.grad is not None
    assert new.grad.tolist() == [2.0, 2.0]
    assert (new.tag, new.kept) == ("old", "new")  # type: ignore[attr-defined]
    for handle in handles:
        handle.remove()
    new.sum().backward()
    assert ran == ["gradient", "accumulated"]


def test_default_store_is_the_one_of_the_process_group() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_private_ranks.default_store().clone().set("a", "1")
        assert torch_private_ranks.default_store().get("a") == b"1"
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_scaler_has_found_can_be_changed_before_it_steps() -> None:
    class Skips(torch_private_ranks.AgreeingGradScaler):
        def agreed(self, found: dict[torch.device, torch.Tensor]) -> dict[torch.device, torch.Tensor]:
            assert [(place.type, one.item()) for place, one in found.items()] == [("cpu", 0.0)]
            return {place: torch.ones_like(one) for place, one in found.items()}

    for fused in (False, True):
        weight = nn.Parameter(torch.ones(2))
        scaler, optimizer = Skips("cpu", init_scale=8.0), torch.optim.Adam([weight], lr=1.0, fused=fused)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, torch.ones(2))
        assert scaler.get_scale() == 4.0


def test_mesh_of_host_has_the_same_ranks_and_makes_no_process_groups() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("a", "b"))
        assert torch_private_ranks.mesh_of_host(mesh) is mesh
        elsewhere = DeviceMesh("meta", torch.tensor([[0]]), mesh_dim_names=("a", "b"), _init_backend=False)
        found = torch_private_ranks.mesh_of_host(elsewhere)
        assert (found.device_type, found.mesh_dim_names, found.mesh.tolist()) == ("cpu", ("a", "b"), [[0]])
        assert list(found.get_coordinate() or ()) == [0, 0]
    finally:
        dist.destroy_process_group()


def test_memory_of_dtensors_shows_values_that_torch_loses() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Module()
        mesh = DeviceMesh("cpu", torch.tensor([0]))
        model.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        shown, part = torch_private_ranks.memory_of(model.weight)
        model.weight.data.mul_(2.0)
        model.float().to("cpu")
        assert torch_private_ranks.memory_of(model.weight) == (shown, part)
        before = model.weight.data
        model.weight.data = model.weight.data * 3.0
        assert bool((model.weight.to_local() == 2.0).all())  # otherwise torch has learnt it, and nobody needs this
        found = torch_private_ranks.memory_of(model.weight)
        assert found[0] != shown
        assert found[1] == part
        model.weight.data = before
        assert torch_private_ranks.memory_of(model.weight) == (shown, part)
        model.double()
        found = torch_private_ranks.memory_of(model.weight)
        assert found[0] != shown
        assert found[1] != part
    finally:
        dist.destroy_process_group()


def test_parts_of_dtensors_are_those_of_the_public_calls() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", torch.tensor([[0]]), mesh_dim_names=("a", "b"))
        like = nn.Parameter(DTensor.from_local(torch.randn(4, 6).t(), mesh, [Shard(1), Replicate()]))
        assert torch_private_ranks.part_of(like).data_ptr() == like.to_local().data_ptr()
        assert not torch_private_ranks.part_of(like).requires_grad
        gradient = torch.randn(6, 4)
        found = torch_private_ranks.part_like(gradient, like)
        public = DTensor.from_local(gradient, mesh, like.placements, shape=like.shape, stride=like.stride())
        assert (found.device_mesh, found.placements) == (public.device_mesh, public.placements)
        assert (found.shape, found.stride(), found.dtype) == (public.shape, public.stride(), public.dtype)
        assert found.to_local().data_ptr() == gradient.data_ptr()
        assert not found.requires_grad
        like.grad = found
        torch.optim.AdamW([like]).step()
    finally:
        dist.destroy_process_group()


def test_the_class_of_an_output_that_export_does_not_know_is_found() -> None:
    class ReturnsDevice(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, x.device

    with pytest.raises(RuntimeError) as refused:
        torch.export.export(ReturnsDevice(), (torch.ones(2),), strict=False)
    assert torch_private.unknown_output(refused.value) is torch.device
    assert torch_private.unknown_output(RuntimeError("of another kind")) is None


def test_it_is_known_where_operators_take_plain_tensors_beside_dtensors() -> None:
    assert not torch_private_ranks.replicates_plain_tensors()
    with implicit_replication():
        assert torch_private_ranks.replicates_plain_tensors()
    assert not torch_private_ranks.replicates_plain_tensors()


def test_export_keeps_a_grad_mode_inside_of_an_autocast() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.first(x)
                with torch.no_grad():
                    gate = self.frozen(h)
                y: torch.Tensor = self.last(h) * gate
            return y

    model, x = Model(), torch.randn(2, 4)
    original = torch_private.replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod
    with torch_private.grad_modes_kept():
        exported = torch.export.export(model, (x,)).module()
    assert torch_private.replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod is original
    exported(x).float().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == ["frozen.weight", "frozen.bias"]


def test_shapes_of_objects_are_lists_and_those_of_pythons_own_containers_stay() -> None:
    @dataclasses.dataclass
    class Pair:
        a: torch.Tensor
        b: list[torch.Tensor]

    assert torch_private.register_type(Pair)
    leaves, spec = torch_private.tree_flatten(({"x": torch.zeros(1)}, Pair(torch.zeros(1), [torch.zeros(1)])))
    assert torch_private.shapes_tree(spec, range(len(leaves))) == ({"x": 0}, [1, [2]])
