"""The collectives that run inside of a sharded stage are those that the search priced and the plan prints."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import sum_of_squares
from shardings import Attention, Mlp, Pieces, Tied, assert_same_step, one_stage, pipelined
from test_sharded_models import case_of
from torch import fx, nn

from autopar import Cluster, InfeasibleError, PipelinedModule, Plan
from autopar.analysis.operators import on_device, operator_keys
from autopar.capture.program import Program, capture
from autopar.lower import collectives, regather
from autopar.lower.collectives import LOCAL, MOVES, move_between
from autopar.lower.device_values import DeviceValue, DeviceValues
from autopar.lower.regather import keeping_shards, kept_as_shards
from autopar.planner.intra_op.regathering import regathered
from autopar.planner.intra_op.sharding_task import ShardingTask
from autopar.planner.intra_op.solution import exchanges_within, whole_graph_sharding
from autopar.planner.intra_op.strategy_search import Sharding, ShardingProblem
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.mesh import make_mesh
from autopar.sharding.stage_sharding import (
    Exchange,
    Passage,
    StageSharding,
    Stored,
    TensorRedistribution,
    parse_passage,
    passage_text,
    strategy_text,
)
from autopar.sharding.strategies import Strategy

META = torch.device("meta")
Ran = tuple[str, str, int]  # collective, axis, bytes
NAMES = ("data", "model")


class Steps(dict):  # type: ignore[type-arg]
    """`collectives.MOVES` that records what runs in a backward, by the node of the gradient."""

    def __init__(self, ran: dict[str, list[Ran]], axes: Sequence[str]) -> None:
        super().__init__(MOVES)
        self.ran, self.axes = ran, axes

    def __getitem__(self, label: Any) -> Callable[..., list[torch.Tensor]]:
        node, name = label
        return recording(MOVES[name], self.axes, self.ran[node])


def recording(move: Callable[..., Any], axes: Sequence[str], into: list[Ran]) -> Callable[..., Any]:
    def run(parts: Sequence[torch.Tensor], *, axis: int, dim: Any, mesh: Sequence[int]) -> Any:
        if move.__name__ not in LOCAL:
            nbytes = parts[0].numel() * parts[0].element_size() * (mesh[axis] if move.__name__ == "all_gather" else 1)
            into.append((move.__name__, axes[axis], nbytes))
        return move(parts, axis=axis, dim=dim, mesh=mesh)

    return run


class Recorder(fx.Interpreter):
    """Runs a stage and records every collective by its tensor: forward in order, backward by node of the gradient."""

    def __init__(self, module: fx.GraphModule, axes: Sequence[str]) -> None:
        super().__init__(module)
        self.axes = axes
        self.forward: dict[str, list[Ran]] = defaultdict(list)
        self.backward: dict[str, list[Ran]] = defaultdict(list)
        self.again: dict[str, list[Ran]] = defaultdict(list)  # gathers of the backward, by node of `kept_as_shards`
        self.tensor_of = {node.name: node.meta["tensor"] for node in module.graph.nodes if "tensor" in node.meta}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target in MOVES.values():
            return recording(n.target, self.axes, self.forward[n.meta["tensor"]])(*args, **kwargs)  # type: ignore[arg-type]
        if n.target is collectives.gradient:
            moves = [((n.name, name), axis, dim) for name, axis, dim in kwargs["moves"]]
            return collectives.gradient(*args, moves=moves, mesh=kwargs["mesh"])  # type: ignore[arg-type]
        if n.target is kept_as_shards:
            moves = [((n.name, name), axis, dim) for name, axis, dim in kwargs["moves"]]
            return kept_as_shards(*args, moves=moves, mesh=kwargs["mesh"])  # type: ignore[arg-type]
        return super().run_node(n)


def ran_by(
    stage: fx.GraphModule, axes: Sequence[str], inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, list[Ran]], dict[str, list[list[Ran]]], dict[str, list[Ran]]]:
    """By tensor (its node): collectives of the forward in order, of the backward by passage, and gathers again."""
    recorder = Recorder(stage, axes)
    monkeypatch.setattr(collectives, "MOVES", Steps(recorder.backward, axes))
    monkeypatch.setattr(regather, "MOVES", Steps(recorder.again, axes))
    with keeping_shards():
        outputs = recorder.run(*inputs)
    sum_of_squares([y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]).backward()
    monkeypatch.undo()
    passages: dict[str, list[list[Ran]]] = defaultdict(list)
    for node, several in recorder.backward.items():
        passages[recorder.tensor_of[node]] += [several] if several else []
    again = {recorder.tensor_of[node]: several for node, several in recorder.again.items() if several}
    return {name: several for name, several in recorder.forward.items() if several}, passages, again


def priced_by(sharding: StageSharding, within: Counter[Any], parameters: set[str]) -> tuple[Any, Any]:
    """By tensor: the printed collectives of a micro-batch, forward in the order in which they run, and backward.

    A parameter that is gathered to be read is priced twice, for the forward and for the backward, where that comes
    before its gradient. It is gathered again where autograd keeps it.
    """
    forward: dict[str, list[Exchange]] = defaultdict(list)
    backward: dict[str, list[Ran]] = defaultdict(list)
    left = Counter(within)
    again: Counter[Any] = Counter()
    for exchange in sharding.exchanges:
        facts = (exchange.collective, exchange.axis, exchange.operator, exchange.nbytes, exchange.backward)
        if exchange.operator == exchange.tensor and left[facts] > 0:
            left[facts] -= 1
        elif exchange.backward and not exchange.once and again[facts[:4]] > 0:
            again[facts[:4]] -= 1
        elif exchange.backward and not exchange.once:
            backward[exchange.tensor].append((exchange.collective, exchange.axis, exchange.nbytes))
        elif not exchange.once:
            forward[exchange.tensor].append(exchange)
            again[facts[:4]] += exchange.tensor in parameters
    assert not +again, "a parameter that is gathered for the forward is gathered again"
    found = {}
    for tensor, several in forward.items():
        last = sorted(several, key=lambda e: e.operator == tensor)  # the caller reads last
        found[tensor] = [(e.collective, e.axis, e.nbytes) for e in last]
    return found, backward


def planned_backward(sharding: StageSharding) -> dict[str, Counter[tuple[tuple[str, str], ...]]]:
    """By tensor: (collective, axis) of every passage of its gradient."""
    found: dict[str, Counter[Any]] = defaultdict(Counter)
    shared: set[tuple[str, Passage]] = set()
    for one in sharding.redistributions:
        passages = [one.own] + ([one.shared] if (one.tensor, one.shared) not in shared else [])
        shared.add((one.tensor, one.shared))
        for passage in passages:
            moves = [move_between(a, b) for a, b in itertools.pairwise(passage.backward)]
            steps = tuple((name, sharding.axes[axis]) for name, axis, _ in moves if name not in LOCAL)
            if steps:
                found[one.tensor][steps] += 1
    return found


def assert_runs_as_priced(
    sharding: StageSharding,
    within: Counter[Any],
    names: dict[str, str],
    stage: fx.GraphModule,
    inputs: Sequence[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """`names`: tensors as plans name them, by node. Returns how many collectives ran."""
    ran_forward, ran_backward, _ = ran_by(stage, sharding.axes, inputs, monkeypatch)
    parameters = {name for name in names.values() if "#" not in name}
    forward, backward = priced_by(sharding, within, parameters)
    assert {names[node]: several for node, several in ran_forward.items()} == forward
    run = {names[node]: Counter(itertools.chain(*passages)) for node, passages in ran_backward.items() if passages}
    assert run == {tensor: Counter(several) for tensor, several in backward.items()}
    order = {
        names[node]: Counter(tuple((name, axis) for name, axis, _ in passage) for passage in passages)
        for node, passages in ran_backward.items()
        if passages
    }
    assert order == planned_backward(sharding)
    return sum(map(len, forward.values())) + sum(map(len, backward.values()))


def chosen(
    program: Program, leaves: Sequence[Any], rows: int, mesh: tuple[int, ...], room: float, cluster: Cluster
) -> tuple[ShardingProblem, Sharding]:
    """The best strategies for micro-batches of `rows` samples; `room`: part of the bytes of the fastest
    ones, or a larger one that holds any."""
    module = on_device(copy.deepcopy(program.graph_module), program.device, META).to(META)
    meta = [x[:rows].to(META) if isinstance(x, torch.Tensor) else x for x in leaves]
    grid = make_mesh(mesh, [d.name for d in cluster.devices[: math.prod(mesh)]], NAMES[: len(mesh)])
    problem = ShardingProblem(ShardingTask(module, meta, rows, cluster), grid)
    found = problem.solve(math.inf, {})
    for part in [room, *(part for part in (0.8, 0.9) if part > room)] if room < 1 else []:
        with contextlib.suppress(InfeasibleError):
            return problem, problem.solve(part * found.nbytes, {})
    return problem, found


FAST, SLOW = Cluster.preset("8xH100"), Cluster.preset("2xT4", nodes=4)
SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: Mlp(96), lambda: torch.randn(8, 96)),
    "attention": (Attention, lambda: torch.randn(8, 12, 24)),
    "pieces": (Pieces, lambda: torch.randn(8, 4, 12)),
    "tied": (Tied, lambda: torch.randint(24, (8, 12))),
}


# Every family on one mesh; small modules on several.
CASES = [(name, mesh) for name in SMALL for mesh in [(2,), (4, 2)]]
CASES += [("attention", (4,)), ("tied", (2, 2)), ("gpt2", (2, 2)), ("bert", (2,)), ("llama", (4,))]
MORE = [(name, mesh) for name in ("gpt2", "bert", "llama", "t5", "resnet") for mesh in [(2,), (2, 2), (4, 2)]]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive if case[0] == "gpt2" else ()) for case in MORE)],
    ids=str,
)
@pytest.mark.slow
def test_collectives_run_as_they_were_priced(name: str, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if name in SMALL:
        build, inputs = SMALL[name]
        model, call = build(), {"x": inputs()}
        program = capture(model, (), call)
    else:
        _, model, call, program = case_of(name)
        call = {key: x[:8] if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    keys = {node.name: key for node, key in operator_keys(program).items()}
    names = {node.name: keys.get(node.name, str(node.target)) for node in program.graph.nodes}
    count = 0
    for cluster, room in ((FAST, 0.7), (SLOW, 1.0), (FAST, 0.5)):
        if count and room == 0.5:
            break  # short of memory only where nothing was sent so far
        leaves = program.bind((), call)[0]
        problem, found = chosen(program, leaves, 8, mesh, room, cluster)
        sharding = whole_graph_sharding(problem, found, keys)
        inner = exchanges_within(problem.task, problem.facts, found)
        within = Counter((e.collective, e.axis, keys[e.operator], e.nbytes, e.backward) for e in inner)
        plan = Plan.from_json(one_stage(program, sharding, 1).to_json())
        assert plan.stages[0].sharding == sharding
        pm = pipelined(model, plan)
        pm(**call)
        (stage,) = pm.stages
        count += assert_runs_as_priced(sharding, within, names, stage, leaves_of(pm, leaves), monkeypatch)
        pm.close()
    assert count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", (4,)), ("llama", (2, 2)), ("bert", (4,)), ("gpt2", (2, 2))], ids=str
)
def test_activations_are_gathered_again_as_often_as_priced(
    name: str, mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, call, program = case_of(name)
    call = {key: x[:8] if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    keys = {node.name: key for node, key in operator_keys(program).items()}
    leaves = program.bind((), call)[0]
    problem, found = chosen(program, leaves, 8, mesh, 1.0, SLOW)
    sequences = {
        v: 1e3 * np.array([not _cuts(s, 1) for s in costs.strategies]) for v, costs in problem.options.values()
    }
    seconds = [own + sequences.get(v, 0.0) for v, own in enumerate(problem.seconds)]
    found = problem.with_penalties(seconds, problem.edges)  # parts of sequences wherever that can be
    other = regathered(problem, found)
    before, after = (whole_graph_sharding(problem, one, keys) for one in (found, other))
    assert after.regather
    more = Counter(map(_priced_gather, after.exchanges)) - Counter(map(_priced_gather, before.exchanges))
    pm = pipelined(model, one_stage(program, after, 1))
    pm(**call)
    _, _, again = ran_by(pm.stages[0], after.axes, leaves_of(pm, leaves), monkeypatch)
    names = {node.name: keys.get(node.name, str(node.target)) for node in program.graph.nodes}
    ran = Counter((names[node], *one) for node, several in again.items() if "#" in names[node] for one in several)
    assert ran == more
    pm.close()


def _cuts(one: Strategy, dim: int) -> bool:
    return any(dim in layout for layout in (*one.inputs, *one.outputs))


def _priced_gather(exchange: Exchange) -> tuple[str, str, str, int]:
    return exchange.tensor, exchange.collective, exchange.axis, exchange.nbytes


def leaves_of(pm: PipelinedModule, leaves: Sequence[Any]) -> list[Any]:
    (stage,) = pm.stages
    return list(leaves)[: sum(node.op == "placeholder" for node in stage.graph.nodes)]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("S0 > S1", "S1 > S0"),
        ("S0 > R > S1", "S1 > R > S0"),
        ("S0 > R > P > S1", "S1 > S0 > R > S0"),
    ],
)
def test_lowering_takes_the_steps_of_the_plan_even_if_others_are_shorter(
    forward: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).tanh().relu()

    x = torch.randn(4, 8, requires_grad=True)
    sharding = StageSharding.from_texts((2,), ("data",), {"/tanh#0": "S0 -> S0", "/relu#0": "S1 -> S1"})
    steps = TensorRedistribution(
        "/tanh#0", "/relu#0", Passage(((0,),), ((0,),)), parse_passage(f"{forward}, back {backward}")
    )
    sharding = replace(sharding, redistributions=(steps,))
    pm = pipelined(Two(), one_stage(capture(Two(), (x,), {}), sharding, 1))
    assert_same_step(Two(), pm, x.detach())
    (stage,) = pm.stages
    (node,) = [n for n in stage.graph.nodes if n.target is collectives.gradient and n.meta["tensor"].startswith("tanh")]
    sides = [steps.own.forward, steps.own.backward]
    moves = [tuple(move_between(a, b) for a, b in itertools.pairwise(side)) for side in sides]
    assert tuple(node.kwargs["moves"]) == moves[1]
    nodes = [n for n in stage.graph.nodes if n.target in MOVES.values() and n.meta["tensor"].startswith("tanh")]
    ran = [(n.target.__name__, n.kwargs["axis"], n.kwargs["dim"]) for n in nodes]
    assert ran == list(moves[0])
    # The same plan without steps takes the ones in which a device sends the fewest bytes: one all-to-all.
    plain = pipelined(Two(), one_stage(capture(Two(), (x,), {}), replace(sharding, redistributions=()), 1))
    plain(x)
    names = [n.target.__name__ for n in plain.stages[0].graph.nodes if n.target in MOVES.values()]
    assert [name for name in names if name not in LOCAL] == ["all_to_all"]


@pytest.mark.parametrize("turned", [False, True])
def test_readers_of_sums_and_of_gradients_that_are_sums_get_their_own_parts(turned: bool) -> None:
    """One reads Partial with whole gradients (by the steps Replicate, Partial), one whole with Partial gradients."""
    values = DeviceValues((2,), 2)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    given = values.graph.placeholder("x")
    given.meta["val"] = x
    whole, addend = (REPLICATE,), (PARTIAL,)
    made = DeviceValue(values.read(DeviceValue((given,)), given, whole, addend), (whole,), (addend,), True)
    pairs = [(addend, whole), (whole, addend)]
    outputs = []
    for layout, gradient in reversed(pairs) if turned else pairs:
        nodes = values.read(made, given, layout, gradient)
        outputs.append(values.joined(DeviceValue(nodes, (layout,), (gradient,), True), 0, given))
    values.graph.output(tuple(outputs))
    found = fx.GraphModule({}, values.graph)(x)
    for output in found:
        torch.testing.assert_close(output, x)
    (found[0].sum() + 2 * found[1].sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))


def with_strategies(
    model: nn.Module, x: torch.Tensor, mesh: tuple[int, ...], wanted: dict[str, str], stored: dict[str, Stored]
) -> tuple[Program, StageSharding]:
    """`wanted`: by node."""
    program = capture(model, (x,), {})
    problem, _ = chosen(program, [x], len(x), mesh, 1.0, FAST)
    fixed = {
        name: next(s for s in problem.options[name].costs.strategies if strategy_text(s) == text)
        for name, text in wanted.items()
    }
    keys = {node.name: key for node, key in operator_keys(program).items()}
    return program, whole_graph_sharding(problem, problem.with_choices(fixed, stored), keys)


@pytest.mark.slow
def test_the_bias_of_rows_moves_for_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On replicas x tensor, as Megatron-LM cuts an MLP; its gradient is that of the plain model."""
    model, x = Mlp(8).double(), torch.randn(8, 8, dtype=torch.float64)
    rows = {"linear": "S0R RS0 RS0 -> S0S1", "linear_1": "S0S1 RS1 RP -> S0P"}
    program, sharding = with_strategies(model, x, (2, 2), rows, {})
    for_parameters = [e for e in sharding.exchanges if e.tensor.endswith(("weight", "bias"))]
    assert {e.tensor for e in for_parameters} == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert all(e.once for e in for_parameters)
    of_bias = [one for one in sharding.redistributions if one.tensor == "down.bias"]
    assert [passage_text(one.own) for one in of_bias] == ["RR > RP, back PR"]  # local, and not at all
    pm = pipelined(model, one_stage(program, sharding, 4))
    assert_same_step(model, pm, x, tolerance=1e-12)
    _, ran, _ = ran_by(pm.stages[0], sharding.axes, leaves_of(pm, [x]), monkeypatch)
    names = {node.name: str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    assert not [names[node] for node, passages in ran.items() if passages and node in names]


class Reused(nn.Module):
    """One layer, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def test_every_reader_of_a_parameter_gathers_it_for_itself_as_it_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is whole only while one of them runs, which is what the peak counts."""
    model, x = Reused().double(), torch.randn(8, 8, dtype=torch.float64)
    by_samples = {"linear": "S0 R -> S0", "linear_1": "S0 R -> S0"}
    cut = {"layer.weight": Stored((0,), (0,))}
    program, sharding = with_strategies(model, x, (2,), by_samples, cut)
    pm = pipelined(model, one_stage(program, sharding, 2))
    assert_same_step(model, pm, x, tolerance=1e-12)
    keys = {node.name: key for node, key in operator_keys(program).items()}
    names = {node.name: keys.get(node.name, str(node.target)) for node in program.graph.nodes}
    args = Counter[Any](), names, pm.stages[0], leaves_of(pm, [x]), monkeypatch
    assert assert_runs_as_priced(sharding, *args) == 5  # two gathers, two scatters, and the caller's gather
    of_weight = [e for e in sharding.exchanges if e.collective == "all_gather" and e.tensor == "layer.weight"]
    assert len(of_weight) == 4
