"""Strategies chosen for whole graphs: the splits that the field knows, and that costs are what they are said to be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import GroupedLlama, gpt2, llama, mixtral
from tied_models import Tied
from torch import fx, nn
from torch.nn import functional

from autopar import InfeasibleError
from autopar.analysis.operators import on_device
from autopar.capture.program import capture
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.gradient_reduction import BUCKET
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem, choose
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.mesh import Mesh, make_mesh
from autopar.sharding.stage_sharding import Stored, strategy_text
from cost_models import Cluster

META = torch.device("meta")


def task_of(model: nn.Module, rows: int, *args: torch.Tensor, cluster: Cluster, **options: Any) -> ShardingTask:
    """A training step of `model`, which returns its loss, on inputs of the given number of samples."""
    program = capture(model, args, {}, trace_equal_layers_once=True)
    module = on_device(program.graph_module, program.device, META)
    return ShardingTask(module, [x[:rows].to(META) for x in args], rows, cluster, **options)


def stored(found: Sharding, name: str) -> tuple[Any, Any]:
    """The placements of a parameter and of its optimizer's state."""
    return found.stored[name].layout, found.stored[name].state


def over(cluster: Cluster, *shape: int) -> Mesh:
    return make_mesh(shape, [device.name for device in cluster.devices[: math.prod(shape)]])


def named(task: ShardingTask, found: Sharding) -> dict[str, Any]:
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


@pytest.mark.slow
def test_a_llama_of_grouped_heads_is_split_by_heads_columns_and_vocabulary() -> None:
    cluster = Cluster.preset("8xH100")
    ids = torch.empty(2, 512, dtype=torch.long, device=META)
    found = choose(
        task := task_of(on_meta(lambda: GroupedLlama(1, 8192, 28672)), 2, ids, cluster=cluster), over(cluster, 8)
    )
    strategies = named(task, found)
    assert strategies["scaled_dot_product_attention0"].outputs == ((1,),)  # a head of keys a device
    # Queries, keys, values, what heads found; gate and up, down; the head: columns, then rows.
    assert "".join(strategies[f"linear{i}"].axes[0] for i in range(8)) == "nnnknnkn"
    assert strategies["cross_entropy_loss0"].axes == ("c",)


def test_what_several_read_in_one_layout_is_moved_once() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4096, 4096), nn.Linear(4096, 4096)
            self.middle = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).sin()
            return self.last(torch.stack([layer(h).cos() for layer in self.middle]).sum(0)).square().mean()

    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(Branches), 2, torch.empty(2, 64, 4096, device=META), cluster=cluster)
    found = choose(task, over(cluster, 4))
    strategies = named(task, found)
    assert [strategies[f"linear{i}"].axes for i in (1, 2, 3)] == [("n",)] * 3
    moved = [(c.backward, c.times, len(c.steps)) for c in found.collectives if c.tensor == "sin"]
    assert sorted(moved) == [(False, 1, 1), (True, 1, 1)]


def test_heads_of_keys_are_cut_with_the_queries_that_they_serve() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4096, heads * 128, bias=False) for heads in (32, 8, 8))
            self.out = nn.Linear(4096, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).unflatten(-1, (-1, 128)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.out(y.transpose(1, 2).flatten(2)).square().mean()

    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(Heads), 2, torch.empty(2, 64, 4096, device=META), cluster=cluster)
    strategies = named(task, choose(task, over(cluster, 4)))
    assert strategies["scaled_dot_product_attention0"].axes == ("g",)
    assert [strategies[f"linear{i}"].axes for i in range(4)] == [("n",)] * 3 + [("k",)]


def test_a_large_vocabulary_is_split_in_the_embedding_the_head_and_the_loss() -> None:
    """Shoeybi et al., 2019, section 3: logits are never put together."""
    cluster = Cluster.preset("4xH100")
    ids = torch.empty(2, 512, dtype=torch.long, device=META)
    task = task_of(on_meta(lambda: Tied(131072, 1024)), 2, ids, cluster=cluster)
    found = choose(task, over(cluster, 4))
    strategies = named(task, found)
    assert (strategies["embedding0"].axes, strategies["embedding0"].outputs) == (("v",), ((PARTIAL,),))
    assert (strategies["linear1"].axes, strategies["linear1"].outputs) == (("n",), ((2,),))
    assert (strategies["cross_entropy_loss0"].axes, strategies["cross_entropy_loss0"].inputs[0]) == (("c",), (1,))
    assert found.stored["head.weight"].layout == (0,)


class Experts(nn.Module):
    """Experts choose their tokens (Zhou et al., 2022), dispatched and combined by products with one-hot matrices."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores, places = self.gate(tokens).softmax(-1).t().topk(self.capacity)
        picked = functional.one_hot(places, tokens.shape[0]).to(x.dtype)
        inside = torch.einsum("ecs,sd->ecd", picked, tokens)
        done = torch.bmm(functional.gelu(torch.bmm(inside, self.up)), self.down)
        return torch.einsum("ecs,ec,ecd->sd", picked, scores, done).square().mean()


def test_experts_of_large_weights_are_expert_parallel() -> None:
    """Lepikhin et al., GShard, 2020: every device has experts of its own. A token has four on average."""
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(lambda: Experts(1024, 8, 128)), 4, torch.empty(4, 64, 1024, device=META), cluster=cluster)
    found = choose(task, over(cluster, 4))
    strategies = named(task, found)
    assert [strategies[name].outputs for name in ("einsum0", "bmm0", "gelu0", "bmm1")] == [((0,),)] * 4
    assert (strategies["einsum1"].axes, strategies["einsum1"].outputs) == (("e",), ((PARTIAL,),))
    assert (found.stored["up"].layout, found.stored["down"].layout) == ((0,), (0,))


class Convolutions(nn.Module):
    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(c, 64, 3, padding=1), *([nn.BatchNorm2d(64)] if normalised else []), nn.ReLU())
            for c in (3, 64, 64)
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "batch-norm"])
def test_convolutions_over_large_images_are_data_parallel(normalised: bool) -> None:
    cluster = Cluster.preset("4xH100")
    task = task_of(
        on_meta(lambda: Convolutions(normalised)), 32, torch.empty(32, 3, 128, 128, device=META), cluster=cluster
    )
    found = choose(task, over(cluster, 4))
    for name, strategy in named(task, found).items():
        if name.startswith(("conv2d", "batch_norm", "relu")):
            assert strategy.outputs == ((0,),), name
    assert all(stored.layout == (REPLICATE,) for name, stored in found.stored.items() if "weight" in name)
    assert {c.once for c in found.collectives if c.backward and "weight" in c.tensor} == {True}


def test_short_memory_shards_states_and_then_parameters() -> None:
    """Rajbhandari et al., ZeRO, 2020: the same work, less memory, more to exchange."""
    cluster = Cluster.preset("4xH100")
    task = task_of(on_meta(lambda: Mlp(1024)), 1 << 14, torch.empty(1 << 14, 1024, device=META), cluster=cluster)
    mesh = over(cluster, 4)
    found = [choose(task, mesh)]
    found += [choose(task, mesh, memory=share * found[0].nbytes) for share in (0.9, 0.8)]
    stored = [{layouts for name, layouts in one.stored.items() if name.endswith("weight")} for one in found]
    whole, cut = {Stored((REPLICATE,), (REPLICATE,))}, {(0,), (1,)}
    assert stored[0] == whole  # data parallel
    assert {one.layout for one in stored[1]} == {(REPLICATE,)}  # ZeRO 1: states alone
    assert {one.state for one in stored[1]} <= cut
    assert {one.layout for one in stored[2]} <= cut  # ZeRO 3
    assert found[0].seconds < found[1].seconds < found[2].seconds
    for one, share in zip(found, (1.0, 0.9, 0.8), strict=True):
        assert one.nbytes + one.most_gathered <= share * found[0].nbytes
    assert [one.most_gathered > 0 for one in found] == [False, False, True]
    assert [one.bound == pytest.approx(one.seconds) for one in found[:2]] == [True, True]
    with pytest.raises(InfeasibleError, match=r"bytes|MB|GB"):
        choose(task, mesh, memory=1e6)


@pytest.mark.slow
def test_short_memory_shards_the_state_of_a_table_of_words_first() -> None:
    cluster = Cluster.preset("4xH100")
    ids = torch.empty(256, 512, dtype=torch.long, device=META)
    task, mesh = task_of(on_meta(lambda: Tied(32768, 512)), 256, ids, cluster=cluster), over(cluster, 4)
    fast = choose(task, mesh)
    found = choose(task, mesh, memory=0.98 * fast.nbytes)
    assert stored(fast, "head.weight") == ((REPLICATE,), (REPLICATE,))
    assert stored(found, "head.weight") in (((REPLICATE,), (0,)), ((REPLICATE,), (1,)))
    assert named(task, found)["embedding0"].outputs == ((0,),)  # still by samples
    assert fast.seconds < found.seconds


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("room", [1.0, 0.98])
def test_the_gradient_of_a_tied_weight_is_reduced_once_and_not_for_every_reader(m: int, room: float) -> None:
    cluster, vocabulary, width = Cluster.preset("4xH100"), 32768, 512
    ids = torch.empty(256, 512, dtype=torch.long, device=META)
    model = on_meta(lambda: Tied(vocabulary, width))
    task = task_of(model, 256, ids, cluster=cluster, n_microbatches=m)
    mesh = over(cluster, 4)
    found = choose(task, mesh)
    if room < 1:
        found = choose(task, mesh, memory=room * found.nbytes)
    assert named(task, found)["embedding0"].outputs == named(task, found)["linear1"].outputs == ((0,),)  # by samples
    nbytes = vocabulary * width * 4
    assert nbytes > BUCKET  # a bucket of its own
    names = ["all_reduce"] if room == 1 else ["reduce_scatter", "all_gather"]  # ZeRO 1
    seconds = [mesh.seconds(name, nbytes, 0, cluster) for name in names]  # type: ignore[arg-type]
    tied = [c for c in found.collectives if c.tensor in ("embed.weight", "head.weight")]
    assert [c.once for c in tied] == [True] * len(names)
    assert [c.seconds for c in tied] == pytest.approx(seconds)
    moving = sum(c.seconds / (m if c.once else 1) for c in found.collectives)
    kernels = sum(work.forward + work.backward for work in found.work.values())
    assert found.seconds == pytest.approx(kernels + moving)


@pytest.mark.parametrize("m", [1, 4])
def test_the_bias_of_rows_is_reduced_over_replicas_once_a_step(m: int) -> None:
    """Only the first device of a row counts it, and each has its whole gradient: none moves for a micro-batch."""
    cluster, width = Cluster.preset("4xH100"), 256
    x = torch.empty(4, 64, width, device=META)
    task = task_of(on_meta(lambda: Mlp(width)), 4, x, cluster=cluster, n_microbatches=m)
    mesh = over(cluster, 2, 2)
    problem = ShardingProblem(task, mesh)
    wanted = {"linear": "S0R RS0 RS0 -> S0S2", "linear_1": "S0S2 RS1 RP -> S0P"}
    fixed = {
        name: next(s for s in problem.options[name].costs.strategies if strategy_text(s) == text)
        for name, text in wanted.items()
    }
    found = problem.solve(math.inf, fixed)
    assert all(one.once for one in found.collectives if one.moves != "activation")
    (reduced,) = (one for one in found.collectives if one.tensor == "down.bias")
    assert [(step.collective, step.axis, step.nbytes) for step in reduced.steps] == [("all_reduce", 0, width * 4)]
    assert reduced.seconds == pytest.approx(width * 4 / BUCKET * mesh.seconds("all_reduce", BUCKET, 0, cluster))


def test_small_parameters_share_the_latency_of_a_bucket() -> None:
    """Data parallelism: as many bytes cost as much, whether they are one parameter or sixteen."""
    cluster, width, n = Cluster.preset("4xH100"), 512, 16
    model = on_meta(lambda: Stack(width, n))
    x = torch.empty(1 << 16, width, device=META)
    task, mesh = task_of(model, len(x), x, cluster=cluster), over(cluster, 4)
    once = [c for c in choose(task, mesh).collectives if c.once]
    assert len(once) == n
    bucket = mesh.seconds("all_reduce", BUCKET, 0, cluster)
    assert sum(c.seconds for c in once) == pytest.approx(n * width * width * 4 / BUCKET * bucket)
    assert bucket > 0.9 * sum(c.seconds for c in once)  # less than a bucket in all


class Stack(nn.Sequential):
    def __init__(self, width: int, n: int) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(n)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = (nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.silu(self.a(x)) * self.b(x)) * scale


class Blocks(nn.Module):
    """Residual layers that all read one more tensor."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scale = nn.Linear(1024, 1024)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale(x)
        for layer in self.layers:
            x = layer(x, scale)
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_layer_that_stands_for_equal_ones_costs_what_they_cost(mesh: tuple[int, ...]) -> None:
    cluster = Cluster.preset("4xH100")
    x = torch.empty(8, 128, 1024, device=META)
    task = task_of(on_meta(lambda: Blocks(6)), 8, x, cluster=cluster)
    folded = fold(task.module)
    assert max(folded.copies.values()) > 2
    short = replace(task, module=folded.module, copies=folded.copies, again=folded.again)
    every, one = (choose(t, over(cluster, *mesh)) for t in (task, short))
    assert one.seconds == pytest.approx(every.seconds)
    assert one.nbytes == pytest.approx(every.nbytes)


@pytest.mark.slow
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


def _kernels(task: ShardingTask, mesh: Mesh, name: str, strategy: Any) -> float:
    from autopar.planner.intra_op.strategy_search import ShardingProblem

    _, options = ShardingProblem(task, mesh).options[name]
    return float(options.seconds[options.strategies.index(strategy)])


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama, mixtral])
def test_what_has_no_rule_is_repeated_and_reported(build: Any) -> None:
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
