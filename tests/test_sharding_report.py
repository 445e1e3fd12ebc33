"""What plans with sharded stages print, and how their operators are explained: facts, not whole texts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Plan, PlanError
from autopar.capture import capture
from autopar.operators import captured_device, on_device, operator_keys
from autopar.plan import Link, Stage
from autopar.report.patterns import folded
from autopar.report.sharding import axis_text, stored_words
from autopar.search.assigned import assignment, exchanges_within
from autopar.search.predict import Conditions, predict
from autopar.search.sharding import Sharding, ShardingProblem, Task, choose
from autopar.search.sharding_explain import InsideExplained, Solved, Whole, operator_explainer
from autopar.sharding.assignment import Exchange, Repeated, StageSharding, parse_stored, parse_strategy, strategy_text
from autopar.sharding.mesh import make_mesh
from benchmarks.planning import Case, synthetic_costs
from cost_models import Cluster

META = torch.device("meta")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
M = 4  # micro-batches
INF = float("inf")


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids).loss
        return loss


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))).square().mean()


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=1024, n_head=16, vocab_size=8192))


def llama() -> nn.Module:
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 8192}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes))


def problem_of(name: str) -> tuple[ShardingProblem, dict[str, str]]:
    """A training step over a mesh data 2 x model 2, and the keys of its operators by node."""
    with META:
        model = {"mlp": Mlp, "gpt2": lambda: Loss(gpt2()), "llama": lambda: Loss(llama())}[name]().train()
        x = torch.empty(8, 512, 1024) if name == "mlp" else torch.zeros(8, 512, dtype=torch.long)
    program = capture(model, (x,), {}, look_into_one=True)
    module = on_device(program.graph_module, captured_device(program), META)
    cluster = Cluster.preset("4xH100")
    mesh = make_mesh((2, 2), [device.name for device in cluster.devices], ("data", "model"))
    keys = {node.name: key for node, key in operator_keys(program).items()}
    return ShardingProblem(Task(module, [x], 8, cluster, M), mesh), keys


@cache
def chosen(name: str, room: float = 1.0) -> tuple[Plan, ShardingProblem, Sharding, dict[str, str], float]:
    """`room`: of the bytes that the fastest strategies take."""
    problem, keys = problem_of(name)
    found, memory = problem.solve(INF, {}), INF
    if room < 1:
        memory = room * found.nbytes
        found = problem.solve(memory, {})
    stage = Stage(problem.mesh.devices, tuple(keys.values()), sharding=assignment(problem, found, keys))
    plan = Plan((stage,), M, batch_size=8 * M, predicted_step_time=M * found.seconds)
    solved = Solved(problem, found, {key: node for node, key in keys.items()}, memory)
    return plan.explained_by(inside=operator_explainer(lambda _: solved)), problem, found, keys, memory


def sharding_in(plan: Plan, stage: int = 0) -> StageSharding:
    found = plan.stages[stage].sharding
    assert found is not None
    return found


def explained(plan: Plan, path: str) -> InsideExplained:
    found = plan.explain(path)
    assert isinstance(found, InsideExplained)
    return found


def table_in(text: str, head: str) -> list[list[str]]:
    """Cells of the rows of the table whose head begins like this."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 2
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:end]]


@pytest.mark.parametrize(("name", "room"), [("gpt2", 1.0), ("llama", 1.0), ("llama", 0.6), ("mlp", 0.5)])
def test_a_stage_lists_every_collective_that_was_chosen_as_often_as_it_happens(name: str, room: float) -> None:
    plan, problem, found, keys, _ = chosen(name, room)
    sharding = sharding_in(plan)
    within = tuple(exchanges_within(problem, found, keys))
    between = sharding.exchanges[: len(sharding.exchanges) - len(within)]
    assert (*between, *within) == sharding.exchanges
    for once in (False, True):
        wanted = [c for c in found.collectives if c.once is once]
        mine = [e for e in between if e.once is once]
        assert len(mine) == sum(c.times * sum(move.collective is not None for move in c.moves) for c in wanted)
        assert math.fsum(e.seconds for e in mine) == pytest.approx(math.fsum(c.seconds for c in wanted))
    work = math.fsum(w.forward + w.backward for w in found.work.values())
    assert sharding.collective_time == pytest.approx(found.seconds - work + math.fsum(e.seconds for e in within))
    inputs = {node.name for node in problem.task.module.graph.nodes if node.op == "placeholder"}
    assert not inputs & {key for key, _ in sharding.parameters}
    assert {e.operator for e in sharding.exchanges} <= set(keys.values())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_text_of_a_plan_counts_all_collectives_of_a_step_and_says_their_share(name: str) -> None:
    plan = chosen(name)[0]
    text, sharding = str(plan), sharding_in(plan)
    count = sum(1 if e.once else M for e in sharding.exchanges)
    seconds = sum(e.seconds * (1 if e.once else M) for e in sharding.exchanges)
    (stage,) = table_in(text, "stage  mesh")
    assert stage[1] == "data 2 x model 2"
    assert int(stage[3]) == count
    assert stage[6] == f"{seconds / (plan.predicted_step_time or 0):.1%}"
    rows = table_in(text, "collective ")
    numbers = [int(row[-4]) for row in rows]
    assert sum(numbers) == count
    assert all(row[0] in COLLECTIVES or row[0].startswith("...") for row in rows)


@pytest.mark.parametrize("room", [1.0, 0.6])
def test_nothing_is_listed_twice(room: float) -> None:
    text = str(chosen("llama", room)[0])
    for head in ("operators", "parameters", "collective "):
        if f"\n{head}" in text:
            rows = [tuple(row) for row in table_in(text, head)]
            assert len(rows) == len(set(rows))


def layered(layers: int, stages: int = 1, **more: Any) -> Plan:
    """Layers of one linear operator by columns and a relu that hands on what it reads."""
    per_stage = layers // stages
    made = []
    for s in range(stages):
        paths = [f"layers.{i}.fc" for i in range(s * per_stage, (s + 1) * per_stage)]
        strategies = [(f"{p}/linear#0", "S0R RS0 -> S0S1") for p in paths]
        strategies += [(f"{p}/relu#0", "S0S1 -> S0S1") for p in paths]
        sharding = StageSharding((2, 2), ("data", "model"), tuple(strategies), **more)
        keys = tuple(key for p in paths for key in (f"{p}/linear#0", f"{p}/relu#0", f"{p}/norm#0"))
        made.append(Stage(tuple(f"{s}:{i}" for i in range(4)), keys, sharding=sharding))
    return Plan(tuple(made), M)


@pytest.mark.parametrize("stages", [1, 2])
def test_equal_layers_are_told_once_and_what_hands_on_is_counted(stages: int) -> None:
    text = str(layered(8, stages))
    assert table_in(text, "operators") == [["layers.0-7.fc linear", "dim 0", "columns", "S0R RS0 -> S0S1"]]
    assert "8 other operators keep the layouts" in text
    assert "8 are done whole by every device" in text


def test_repeated_work_names_the_operators_that_make_most_of_it() -> None:
    repeated = tuple(Repeated(f"layers.{i}.fc/norm#0", 0.001) for i in range(8))
    plan = layered(8, repeated_time=0.008, repeated=repeated)
    assert f"layers.0-7.fc norm {M * 8:.1f} ms" in str(plan)


def test_micro_batches_that_replicas_share_and_forwards_that_run_again_count_as_often_as_they_happen() -> None:
    exchange = Exchange("all_reduce", "model", "layers.0.fc/relu#0", "layers.0.fc/linear#0", 1000, 0.001)
    plan = layered(8, exchanges=(exchange, replace(exchange, backward=True), replace(exchange, once=True)))
    stage = replace(plan.stages[0], devices=tuple(f"d:{i}" for i in range(8)), recompute=True)
    rows = table_in(str(replace(plan, stages=(stage,))), "collective ")
    assert {row[2]: int(row[4]) for row in rows} == {"forward": 2 * M // 2, "backward": M // 2, "once a step": 1}


@pytest.mark.parametrize(
    ("text", "gathered", "told"),
    [
        ("RS0", (), "dim 0 cut by model"),
        ("RR / S0R", (), "state cut by data (ZeRO 1)"),
        ("RR / S0S0", (), "state cut by data and model (ZeRO 1)"),
        ("S1S0", ("data",), "dim 1 cut by data, gathered for every use (ZeRO 3); dim 0 cut by model"),
        ("RR", (), ""),
    ],
)
def test_where_parameters_lie_is_told_in_the_words_of_zero(text: str, gathered: tuple[str, ...], told: str) -> None:
    assert stored_words(parse_stored(text, 2), ("data", "model"), gathered) == told


@pytest.mark.parametrize(
    ("name", "strategy", "told"),
    [
        ("linear", "S0R RS0 -> S0S2", ["dim 0", "columns"]),
        ("linear", "S0S2 RS1 -> S0P", ["dim 0", "rows, to be summed"]),
        ("addmm", "RR S0S1 RS0 -> S0P", ["dim 0", "rows, to be summed"]),
        ("embedding", "S0S1 RR -> PS2", ["rows of the table, to be summed", "columns"]),
        ("sum", "S0P -> PP", ["parts of a sum", "a sum handed on"]),
        ("softmax", "RS1 -> RS1", ["repeated", "dim 1"]),
    ],
)
def test_what_an_axis_does_is_told_in_words(name: str, strategy: str, told: list[str]) -> None:
    sides = parse_strategy(strategy, 2)
    assert [axis_text(name, sides, axis) for axis in range(2)] == told


PARTS = st.sampled_from(["a", "layers", "b2", "0", "1", "2", "3", "17"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
KEYS = st.tuples(NAMES, st.sampled_from(["", "/linear#0", "/linear#1", "/mul_2#3"])).map("".join)


def unfolded(pattern: str) -> set[str]:
    """All names that a pattern stands for."""
    match = re.search(r"\d+(?:[-,]\d+)+", pattern)
    if match is None:
        return {pattern}
    ends = [[int(n) for n in run.split("-")] for run in match[0].split(",")]
    numbers = [n for run in ends for n in range(run[0], run[-1] + 1)]
    return {name for n in numbers for name in unfolded(f"{pattern[: match.start()]}{n}{pattern[match.end() :]}")}


@given(st.lists(KEYS, max_size=30))
def test_folded_names_stand_for_exactly_the_names_that_were_given_each_once(names: list[str]) -> None:
    found = folded(names)
    assert sorted(name for members in found.values() for name in members) == sorted(set(names))
    assert all(unfolded(pattern) == set(members) for pattern, members in found.items())


PATHS = {"mlp": "up", "gpt2": "model.transformer.h.1.mlp.c_fc/addmm", "llama": "model.model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("name", PATHS)
def test_with_a_strategy_given_the_whole_takes_what_choosing_anew_finds(name: str) -> None:
    plan, problem, found, keys, _ = chosen(name)
    (one,) = explained(plan, PATHS[name]).operators
    node = next(node for node, key in keys.items() if key == one.key)
    assert one.chosen is not None
    assert one.chosen.strategy == strategy_text(found.strategies[node])
    assert (one.chosen.whole and one.chosen.whole.seconds) == found.seconds
    assert one.others
    by_text = {strategy_text(strategy): strategy for strategy in problem.options[node][1].strategies}
    for other in one.others:
        anew = choose(problem.task, problem.mesh, fixed={node: by_text[other.strategy]})
        assert other.whole is not None
        assert other.whole.seconds == pytest.approx(anew.seconds)
        assert other.whole.seconds >= found.seconds * (1 - 1e-9)
        assert other.whole.seconds <= found.seconds + cost(other) - cost(one.chosen) + 1e-12


def cost(one: Any) -> float:
    return float(one.seconds + one.exchanged)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_collectives_beside_an_operator_are_what_the_whole_takes_more_if_all_others_stay(name: str) -> None:
    plan, problem, found, keys, _ = chosen(name)
    (one,) = explained(plan, PATHS[name]).operators
    node = next(node for node, key in keys.items() if key == one.key)
    by_text = {strategy_text(strategy): strategy for strategy in problem.options[node][1].strategies}
    assert one.chosen is not None
    for other in one.others:
        staying = problem.solve(INF, {**found.strategies, node: by_text[other.strategy]})
        assert cost(other) - cost(one.chosen) == pytest.approx(staying.seconds - found.seconds, abs=1e-12)


def test_within_a_limit_of_the_memory_every_alternative_fits_it_or_is_said_not_to() -> None:
    plan, _, found, _, memory = chosen("mlp", 0.5)
    (one,) = explained(plan, "up").operators
    wholes = [other.whole for other in one.others if other.fits]
    assert all(isinstance(whole, Whole) and whole.nbytes <= memory for whole in wholes)
    assert all(whole.seconds >= found.bound * (1 - 1e-9) for whole in wholes if whole is not None)


def test_the_text_of_an_explanation_lists_the_candidates_and_says_why_the_chosen_one_won() -> None:
    plan = chosen("mlp")[0]
    text = str(plan.explain("down"))
    (one,) = explained(plan, "down/linear").operators
    assert one.chosen is not None
    for alternative in (one.chosen, *one.others):
        assert alternative.strategy in text
    assert re.search(r"- chosen (for|as)", text)
    assert f"... and {one.more} more" in text
    for exchange in one.exchanges:
        assert f"{exchange.collective.replace('_', '-')} along {exchange.axis}" in text


def test_an_unknown_path_is_refused_with_names_close_to_it() -> None:
    plan = chosen("llama")[0]
    with pytest.raises(PlanError, match=re.escape("'model.model.layers.0.mlp.up_proj'")):
        plan.explain("model.model.layer.0.mlp.up_proj")
    with pytest.raises(PlanError, match="names no operators"):
        Plan.from_split({"a": 0}, n_microbatches=1).explain("a")


def test_a_loaded_plan_tells_what_its_own_numbers_say_of_an_operator() -> None:
    plan = chosen("llama")[0]
    loaded = Plan.from_json(plan.to_json())
    path = PATHS["llama"]
    (found,), (known,) = explained(loaded, path).operators, explained(plan, path).operators
    assert found.chosen is None
    assert (found.strategy, found.exchanges, found.repeated) == (known.strategy, known.exchanges, known.repeated)
    text = str(loaded.explain(path))
    assert found.strategy is not None
    assert found.strategy in text
    assert "only a new search can tell" in text


def test_an_operator_of_a_stage_that_is_not_split_is_told_so() -> None:
    plan = layered(8, 2)
    plan = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], sharding=None)))
    assert "stage 1 is not split: each of its replicas" in str(plan.explain("layers.7"))
    assert "all of it on every device" in str(plan.explain("layers.0.fc/norm#0"))


def test_a_diff_names_meshes_and_operators_that_are_split_otherwise() -> None:
    plan = layered(8)
    other = replace(sharding_in(plan), mesh=(4, 1), strategies=(("layers.0.fc/linear#0", "RR RR -> RR"),))
    diff = plan.diff(replace(plan, stages=(replace(plan.stages[0], sharding=other),)))
    settings = {setting.name: (setting.before, setting.after) for setting in diff.settings}
    assert settings["meshes"] == ("data 2 x model 2", "data 4 x model 1")
    assert "layers.0.fc/linear#0" in str(settings["strategies"][1])
    assert plan.diff(plan).same


def priced(sharded: bool = True, **numbers: Any) -> Plan:
    """A plan of two stages, the first of which is sharded, priced with costs of single devices."""
    costs = synthetic_costs(Case(4, devices=(5,), batch=8))
    nodes = [name for name, data in costs.graph.nodes(data=True) if not data["replicable"]]
    stage_of = {name: int(place >= len(nodes) // 2) for place, name in enumerate(nodes)}
    names = [device.name for device in costs.devices]
    sharding = StageSharding((4,), ("model",)) if sharded else None
    first = Stage(tuple(names[: 4 if sharded else 1]), sharding=sharding, **numbers)
    return predict(costs, Plan((first, Stage((names[4],))), 4, transfers=(Link(0, 1, 8, 8, 1e-6),)), stage_of, INSIDE)


INSIDE = Conditions(loss_inside=True)


def test_a_sharded_stage_without_numbers_is_not_priced_as_replicas() -> None:
    plan = priced()
    assert (plan.predicted_step_time, plan.bubble, plan.stages[0].forward_time) == (None, None, None)
    assert plan.stages[0].sharding is not None
    assert plan.stages[1].forward_time == priced(sharded=False).stages[1].forward_time
    assert "predicted step" not in str(plan)


def test_a_sharded_stage_keeps_its_own_numbers_and_the_step_follows_from_them() -> None:
    plan = priced(forward_time=1.0, backward_time=2.0, peak_memory=7)
    stage = plan.stages[0]
    assert (stage.forward_time, stage.backward_time, stage.peak_memory) == (1.0, 2.0, 7)
    assert stage.operators
    own = sum((plan.stages[1].forward_time or 0.0, plan.stages[1].backward_time or 0.0))
    assert 4 * 3.0 < (plan.predicted_step_time or 0.0) < 4 * (3.0 + own) + 0.01


class Hinted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = autopar.shard(nn.Linear(64, 256), in_strategy=((2, 2),)), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.relu(self.up(x)))


def test_a_plan_for_hints_explains_within_what_they_allow() -> None:
    plan = autopar.plan(Hinted(), Cluster.preset("4xH100"), example_args=(torch.randn(8, 64),))
    (one,) = explained(plan, "up").operators
    assert one.chosen is not None
    for alternative in (one.chosen, *one.others):
        operands, _ = parse_strategy(alternative.strategy, 2)
        assert sorted(operands[0]) == [0, 1]
    stage = plan.stages[0]
    assert plan.n_microbatches * ((stage.forward_time or 0.0) + (stage.backward_time or 0.0)) == pytest.approx(
        plan.predicted_step_time
    )
    assert "mesh" in str(plan)
