"""Strategies chosen for whole graphs: the splits that the field knows, and that costs are what they are said to be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import gpt2, llama
from torch import fx, nn
from torch.nn import functional

from autopar import InfeasibleError
from autopar.capture import capture
from autopar.operators import captured_device, on_device
from autopar.search.sharding import Sharding, Stored, Task, choose
from autopar.sharding import PARTIAL, REPLICATE, Mesh
from autopar.sharding.mesh import make_mesh
from cost_models import Cluster

META = torch.device("meta")


def task_of(model: nn.Module, rows: int, *args: torch.Tensor, cluster: Cluster, **options: Any) -> Task:
    """A training step of `model`, which returns its loss, on inputs of so many samples."""
    program = capture(model, args, {}, look_into_one=True)
    module = on_device(program.graph_module, captured_device(program), META)
    return Task(module, [x[:rows].to(META) for x in args], rows, cluster, **options)


def over(cluster: Cluster, *shape: int) -> Mesh:
    return make_mesh(shape, [device.name for device in cluster.devices[: math.prod(shape)]])


def named(task: Task, found: Sharding) -> dict[str, Any]:
    """Strategies by the operator's name and order: linear0, linear1, .."""
    counts: dict[str, int] = {}
    result = {}
    for node in task.module.graph.nodes:
        if node.name in found.strategies and isinstance(node.target, torch._ops.OpOverload):
            name = node.target.overloadpacket.__name__
            result[f"{name}{counts.get(name, 0)}"] = found.strategies[node.name]
            counts[name] = counts.get(name, 0) + 1
    return result


def on_meta(build: Any) -> Any:
    with META:
        return build().train()


class Mlp(nn.Module):
    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, factor * width), nn.Linear(factor * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))).square().mean()


def test_an_mlp_of_large_weights_is_split_by_columns_and_then_by_rows() -> None:
    """Shoeybi et al., Megatron-LM, 2019, section 3: nothing is exchanged between the two products."""
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(lambda: Mlp(8192)), 2, torch.empty(2, 64, 8192, device=META), cluster=cluster)
    found = choose(task, over(cluster, 4))
    strategies = named(task, found)
    assert strategies["linear0"].axes == ("n",)
    assert strategies["gelu0"].outputs == ((2,),)
    assert strategies["linear1"].axes == ("k",)
    assert strategies["linear1"].outputs == ((PARTIAL,),)
    assert found.proven


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in self.qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width)).square().mean()


def test_attention_of_large_weights_is_split_by_heads() -> None:
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(lambda: Attention(8192, 64)), 2, torch.empty(2, 64, 8192, device=META), cluster=cluster)
    strategies = named(task, choose(task, over(cluster, 4)))
    assert [strategies[f"linear{i}"].axes for i in range(3)] == [("n",)] * 3
    assert strategies["scaled_dot_product_attention0"].outputs == ((1,),)  # [batch, heads, length, depth]
    assert strategies["linear3"].axes == ("k",)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(c, 64, 3, padding=1), nn.ReLU()) for c in (3, 64, 64)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_convolutions_over_large_images_are_data_parallel() -> None:
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(Convolutions), 32, torch.empty(32, 3, 128, 128, device=META), cluster=cluster)
    found = choose(task, over(cluster, 4))
    for name, strategy in named(task, found).items():
        if name.startswith(("conv2d", "relu")):
            assert strategy.outputs == ((0,),), name
    assert all(stored.layout == (REPLICATE,) for name, stored in found.stored.items() if "weight" in name)
    assert {c.once for c in found.collectives if c.backward and "weight" in c.tensor} == {True}


def test_short_memory_shards_states_and_then_parameters() -> None:
    """Rajbhandari et al., ZeRO, 2020: the same work, less memory, more to exchange."""
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(lambda: Mlp(1024)), 1 << 14, torch.empty(1 << 14, 1024, device=META), cluster=cluster)
    mesh = over(cluster, 4)
    found = [choose(task, mesh)]
    found += [choose(task, mesh, memory=share * found[0].nbytes) for share in (0.9, 0.7)]
    stored = [{layouts for name, layouts in one.stored.items() if name.endswith("weight")} for one in found]
    whole, cut = {Stored((REPLICATE,), (REPLICATE,))}, {(0,), (1,)}
    assert stored[0] == whole  # data parallel
    assert {one.layout for one in stored[1]} == {(REPLICATE,)}  # ZeRO 1: states alone
    assert {one.state for one in stored[1]} <= cut
    assert {one.layout for one in stored[2]} <= cut  # ZeRO 3
    assert found[0].seconds < found[1].seconds < found[2].seconds
    for one, share in zip(found, (1.0, 0.9, 0.7), strict=True):
        assert one.nbytes <= share * found[0].nbytes
        assert one.bound == pytest.approx(one.seconds)
    with pytest.raises(InfeasibleError, match=r"bytes|MB|GB"):
        choose(task, mesh, memory=1e6)


def test_every_collective_is_paid_for() -> None:
    """The seconds are those of the kernels and of the collectives that are listed, counted anew."""
    cluster = Cluster.preset("8xH100")
    mesh = over(cluster, 2, 4)
    task = task_of(
        on_meta(lambda: Mlp(1024)), 16, torch.empty(16, 32, 1024, device=META), cluster=cluster, n_microbatches=4
    )
    found = choose(task, mesh)
    moving = sum(c.seconds / (task.n_microbatches if c.once else 1) for c in found.collectives)
    kernels = sum(_kernels(task, mesh, name, strategy) for name, strategy in found.strategies.items())
    assert found.seconds == pytest.approx(moving + kernels)
    assert found.bound == pytest.approx(found.seconds)


def _kernels(task: Task, mesh: Mesh, name: str, strategy: Any) -> float:
    from autopar.search.sharding import _Problem

    _, options = _Problem(task, mesh).options[name]
    return float(options.seconds[options.strategies.index(strategy)])


@pytest.mark.parametrize("build", [gpt2, llama])
def test_what_has_no_rule_is_repeated_and_told(build: Any) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = self.model(input_ids=ids, use_cache=False).logits
            return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    cluster = Cluster.preset("4xH100")
    ids = torch.empty(8, 12, dtype=torch.long, device=META)
    task = task_of(on_meta(WithLoss), 8, ids, cluster=cluster)
    found = choose(task, over(cluster, 2, 2))
    whole = ((REPLICATE, REPLICATE),)
    assert all(set(found.strategies[name].outputs) <= set(whole) for name in found.unruled)
    nodes: dict[str, fx.Node] = {node.name: node for node in task.module.graph.nodes}
    assert not [nodes[n] for n in found.unruled if isinstance(nodes[n].target, torch._ops.OpOverload)]
