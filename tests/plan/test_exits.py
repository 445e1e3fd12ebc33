"""A plan leaves as another tool's configuration, which says all of it or names what it lacks, and comes back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exit_plans import degrees, plan_with
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar import Cluster, InputError, Plan, PlanError
from autopar.plan.assumptions import Assumptions
from autopar.plan.degrees import Degrees
from autopar.plan.exits.configuration import ToolConfiguration
from autopar.plan.exits.megatron import arguments_in, layout_counts, layout_text
from autopar.plan.exits.plan_degrees import degrees_in
from autopar.plan.exits.tools import TOOLS, configuration_for, degrees_for
from autopar.plan.exits.torchtitan import settings_in
from autopar.plan.stage import Stage
from autopar.sharding.stage_sharding import Passage, StageSharding, Stored, TensorRedistribution
from autopar.sharding.strategies import OperatorPlacements

PLAIN = Degrees(1, 2, 1, 1, "1f1b", 1, 0, "none", False, 8)
MESHES = Degrees(2, 2, 2, 1, "1f1b", 1, 1, "none", False, 8)


def named(configuration: ToolConfiguration) -> set[str]:
    return {one.name for one in configuration.not_expressed}


# -- degrees ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(degrees(), st.integers(0, 5))
def test_the_degrees_of_a_plan_are_those_that_it_was_made_with(wanted: Degrees, more: int) -> None:
    assert degrees_in(plan_with(wanted, wanted.n_stages + more), "a tool") == wanted


@pytest.mark.slow
@given(degrees(), st.integers(0, 5), st.sampled_from(sorted(TOOLS)))
def test_what_a_configuration_does_not_say_is_named(wanted: Degrees, more: int, tool: str) -> None:
    plan = plan_with(wanted, wanted.n_stages + more)
    try:
        configuration = configuration_for(plan, tool)
    except PlanError:
        return  # refused, as other tests say
    in_text = tool in ("megatron", "torchtitan") and not configuration.companions
    if configuration.companions:
        read = dict(degrees_for("schedule-csv", configuration.companions["schedule.csv"]).degrees)
    else:
        found = degrees_for(tool, configuration.text if in_text else configuration)
        assert found.batch_size in (None, wanted.batch)
        read = dict(found.degrees)
    lost = named(configuration)
    if wanted.pipeline == 1:
        lost.add("schedule")
    if wanted.n_microbatches == 1 or wanted.schedule == "gpipe":
        read.pop("schedule", None)  # tables of several schedules are equal
    aliases = {"chunks": {"stages"}, "micro_batch": {"micro-batches"}}
    for name, value in read.items():
        if not lost & {name, *aliases.get(name, ())}:
            assert value == getattr(wanted, name), name


@pytest.mark.parametrize("wanted", [PLAIN, MESHES, replace(MESHES, zero=3, sequence_parallel=True)])
def test_the_degrees_of_a_plan_are_found(wanted: Degrees) -> None:
    assert degrees_in(plan_with(wanted, 4), "a tool") == wanted


# -- a model, there and back ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Two products behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Layers(nn.Module):
    """Four layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "wanted"),
    [
        ("megatron", {"tensor": 2, "pipeline": 2, "chunks": 2, "micro_batch": 1, "zero": 1, "sequence_parallel": True}),
        ("megatron", {"tensor": 2, "zero": 3, "micro_batch": 2, "recompute": "full"}),
        ("megatron", {"pipeline": 2, "zero": 2, "micro_batch": 1, "recompute": "stage"}),
        ("torchtitan", {"tensor": 2, "zero": 3, "micro_batch": 1, "recompute": "selective-op"}),
        ("accelerate", {"tensor": 4, "zero": 3, "micro_batch": 2, "recompute": "full"}),
        ("deepspeed", {"pipeline": 4, "micro_batch": 1, "zero": 1}),
        ("deepspeed", {"tensor": 2, "micro_batch": 2, "zero": 2}),
    ],
)
def test_a_plan_that_a_tool_expresses_comes_back_the_same(tool: str, wanted: dict[str, Any]) -> None:
    model, cluster, ids = Layers(), Cluster.preset("8xH100"), torch.randint(0, 32, (16, 8))
    call: dict[str, Any] = {"example_args": (ids,), "target": ids}
    call["loss_fn"] = lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    plan = Plan.by_hand(model, cluster, **wanted, **call)
    assert degrees_in(plan, tool).zero == wanted.get("zero", 0)
    configuration = configuration_for(plan, tool)
    assert Plan.from_configuration(model, cluster, tool, configuration, **call) == plan


@pytest.mark.slow
def test_the_call_must_have_the_samples_of_the_configuration() -> None:
    model, ids = Layers(), torch.randint(0, 32, (16, 8))
    with pytest.raises(PlanError, match="32 samples in a step, but the example call has 16"):
        Plan.from_configuration(
            model, Cluster.preset("2xH100"), "megatron", "--global-batch-size 32", example_args=(ids,)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "source"),
    [
        ("megatron", "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
        ("torchtitan", "--parallelism.tensor_parallel_degree 2 activation-checkpoint:none"),
    ],
)
def test_zero_without_replicas_is_noted_and_left_out(tool: str, source: str) -> None:
    cluster, ids = Cluster.preset("2xH100"), torch.randint(0, 32, (4, 8))
    plan = Plan.from_configuration(Layers(), cluster, tool, source, example_args=(ids,))
    assert degrees_in(plan, tool).zero == 0
    assert any("cuts nothing, as there is one replica" in note for note in plan.notes)


def test_a_degree_given_twice_must_be_the_same() -> None:
    with pytest.raises(InputError, match="tensor=4, but the configuration has tensor=2"):
        Plan.from_configuration(nn.Linear(2, 2), None, "megatron", "--tensor-model-parallel-size 2", tensor=4)


# -- what no tool, or one tool, cannot express at all -----------------------------------------------------------------


def hand_plan(devices: list[tuple[str, ...]], m: int = 4, batch: int | None = 8, **more: Any) -> Plan:
    stages = tuple(Stage(names, (f"layers.{s}/linear#0",)) for s, names in enumerate(devices))
    return Plan(stages, m, more.pop("schedule", "1f1b"), batch, **more)


def on_mesh(layout: int, moves: bool, axis: str = "x", cut: int = 1) -> Plan:
    """A stage on two devices, whose parameter lies as `layout`, and whose result may be gathered."""
    key = "layers.0/linear#0"
    strategies = ((key, OperatorPlacements(((cut,),), ((cut,),))),)
    gathered = TensorRedistribution(key, "layers.0/add#0", Passage(((1,),)), Passage(((1,), (-1,))))
    sharding = StageSharding((2,), (axis,), strategies, (("w", Stored((layout,), (layout,))),), (gathered,) * moves)
    return Plan((Stage(("a", "b"), (key,), sharding=sharding),), 1, "1f1b", 4)


@pytest.mark.parametrize("tool", sorted(set(TOOLS) - {"schedule-csv"}))
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (hand_plan([("a", "b"), ("c",)]), "different numbers of devices: stage 0 has 2, stage 1 has 1"),
        (hand_plan([("a",), ("b",)], m=3), "3 micro-batches of 8 samples have different sizes"),
        (hand_plan([("a", "b")], m=1), "1 micro-batches do not go evenly round 2 replicas"),
        (hand_plan([("a",)], batch=None), "autopar.plan.model, devices, plan=plan"),
        (hand_plan([("a",)], training=False), "for inference"),
        (on_mesh(-1, moves=True), "along axis 'x' of its mesh cut no parameter, but exchange 'layers.0/linear#0'"),
    ],
)
def test_a_plan_without_degrees_is_refused(plan: Plan, why: str, tool: str) -> None:
    with pytest.raises(PlanError, match=why):
        configuration_for(plan, tool)


def test_replicas_of_a_plan_by_hand_may_exchange_what_no_operator_cuts_by_samples() -> None:
    """Attention that folds samples, experts that mix them: the degrees are those that the user gave."""
    plan = on_mesh(-1, moves=True, axis="data")
    found = degrees_in(plan, "a tool")
    assert (found.data, found.tensor) == (2, 1)
    assert any("replicas exchange 'layers.0/linear#0'" in one.why for one in plan.to_deepspeed().not_expressed)
    sharding = plan.stages[0].sharding
    assert sharding is not None
    scattered = TensorRedistribution("layers.0/linear#0", "layers.0/add#0", Passage(((-2,), (1,))), Passage(((1,),)))
    stage = replace(plan.stages[0], sharding=replace(sharding, redistributions=(scattered,)))
    assert not degrees_in(replace(plan, stages=(stage,)), "a tool").sequence_parallel, "nothing cuts tensors"


class Products(nn.Module):
    """Layers of one product each, which a plan by hand cuts by columns and gathers for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_gradients_that_go_back_to_the_parts_of_a_gathered_tensor_are_no_sequence_parallelism() -> None:
    how: dict[str, Any] = {"tensor": 2, "pipeline": 2, "micro_batch": 1, "zero": 1}
    plan = Plan.by_hand(
        Products(), Cluster.preset("8xH100"), example_args=(torch.zeros(16, 8, dtype=torch.long),), **how
    )
    assert not degrees_in(plan, "a tool").sequence_parallel
    assert "--sequence-parallel" not in plan.to_megatron_args().text


@pytest.mark.slow
def test_sums_that_are_gathered_before_they_are_read_are_no_sequence_parallelism() -> None:
    """On their way to other samples they are scattered for a while, which saves bytes."""
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    how: dict[str, Any] = {"example_args": (torch.randn(16, 8, 32),), "tensor": 2, "data": 4}
    assert not degrees_in(Plan.by_hand(encoder, Cluster.preset("8xH100"), **how), "a tool").sequence_parallel


def test_a_stage_of_a_plan_by_hand_may_cut_nothing() -> None:
    plan = on_mesh(-1, moves=False, axis="tensor", cut=-1)
    found = degrees_in(plan, "a tool")
    assert (found.data, found.tensor) == (1, 2)
    lost = [one.why for one in plan.to_megatron_args().not_expressed]
    assert any("devices along axis 'tensor' of stage 0 all do the same" in why for why in lost)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"data": 8}, {"tensor": 2, "zero": 1}, {"tensor": 2, "pipeline": 2}])
def test_plans_by_hand_of_an_encoder_with_attention_of_torch_leave_with_their_degrees(degrees: dict[str, int]) -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model, x = nn.TransformerEncoder(layer, 4), torch.empty(16, 8, 64)
    plan = Plan.by_hand(model, Cluster.preset("8xH100"), **degrees, example_args=(x,))
    found = plan.to_megatron_args()
    assert found.settings["--tensor-model-parallel-size"] == str(degrees.get("tensor", 1))
    assert found.settings["--pipeline-model-parallel-size"] == str(degrees.get("pipeline", 1))
    assert any("replicas exchange" in one.why and "self_attn" in one.why for one in found.not_expressed)


def mixed(n_samples: int, n_columns: int) -> Plan:
    """A stage on two devices, with operators that cut samples, and others that read a parameter in parts."""
    samples = [(f"layers.{i}/linear#0", OperatorPlacements(((0,),), ((0,),))) for i in range(n_samples)]
    columns = [(f"head.{i}/linear#0", OperatorPlacements(((-1,),), ((2,),))) for i in range(n_columns)]
    parameters = tuple((f"head.{i}.weight", Stored((0,), (0,))) for i in range(n_columns))
    sharding = StageSharding((2,), ("model",), (*samples, *columns), parameters)
    return Plan((Stage(("a", "b"), tuple(key for key, _ in (*samples, *columns)), sharding=sharding),), 1, "1f1b", 4)


def test_an_axis_is_what_most_of_its_operators_do() -> None:
    replicas, tensors = degrees_in(mixed(9, 1), "a tool"), degrees_in(mixed(1, 9), "a tool")
    assert (replicas.data, replicas.tensor, replicas.zero) == (2, 1, 0)
    assert (tensors.data, tensors.tensor) == (1, 2)
    lost = [one.why for one in mixed(9, 1).to_megatron_args().not_expressed]
    assert any("'head.0.weight' are cut over replicas" in why for why in lost)
    lost = [one.why for one in mixed(1, 9).to_megatron_args().not_expressed]
    assert any("'layers.0/linear#0' are cut along their first dimension" in why for why in lost)
    with pytest.raises(PlanError, match="some operators cut samples, and others parameters"):
        mixed(5, 5).to_megatron_args()


def test_stages_that_share_work_differently_are_refused() -> None:
    on_tensor, replicas = on_mesh(1, moves=True).stages[0], Stage(("c", "d"), ("layers.1/linear#0",))
    with pytest.raises(PlanError, match="stage 0 has 1 replica of a mesh x=2; stage 1 has 2 replicas"):
        Plan((on_tensor, replicas), 2, "1f1b", 4).to_megatron_args()


@pytest.mark.parametrize(
    ("tool", "changes", "why"),
    [
        ("accelerate", {}, "no pipelines, and the plan has pipeline=2"),
        ("deepspeed", {"data": 2, "zero": 2}, "pipelines go with zero=0 or 1, not with zero=2"),
        ("deepspeed", {"tensor": 2}, "does not go with pipelines: tensor=2, pipeline=2"),
        ("deepspeed", {"chunks": 2, "schedule": "interleaved-1f1b"}, "one stage a device, and the plan has chunks=2"),
        (
            "megatron",
            {"chunks": 2, "schedule": "interleaved-1f1b", "batch": 7},
            "a multiple of pipeline=2 micro-batches",
        ),
    ],
)
def test_what_one_tool_cannot_express_at_all_is_refused(tool: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        configuration_for(plan_with(replace(PLAIN, **changes), 4), tool)


def test_two_lists_of_layers_make_no_pipeline_of_megatron_or_torchtitan() -> None:
    stages = tuple(Stage((d,), (f"{d}.layers.0/linear#0",)) for d in ("encoder", "decoder"))
    for exit_of in (Plan.to_megatron_args, Plan.to_torchtitan):
        with pytest.raises(PlanError, match=r"module lists are: encoder.layers, decoder.layers"):
            exit_of(Plan(stages, 2, "1f1b", 4))


# -- what is lost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "changes", "name", "why"),
    [
        ("megatron", {"schedule": "zb-h1"}, "schedule", "zb-h1; Megatron-LM runs 1f1b"),
        ("megatron", {"recompute": "selective-op"}, "recompute", "selective-op"),
        ("torchtitan", {"data": 2, "zero": 1}, "zero", "ZeRO 2"),
        ("torchtitan", {"recompute": "selective"}, "recompute", "selective"),
        ("accelerate", {"pipeline": 1, "tensor": 2, "sequence_parallel": True}, "sequence_parallel", "True"),
        ("accelerate", {"pipeline": 1, "tensor": 2, "data": 2}, "zero", "0; FSDP"),
        ("accelerate", {"pipeline": 1}, "micro-batches", "gradient_accumulation_steps=8"),
        ("deepspeed", {"schedule": "gpipe"}, "schedule", "gpipe; DeepSpeed runs 1f1b"),
        ("deepspeed", {}, "stages", "num_stages=2"),
        ("schedule-csv", {"recompute": "full"}, "recompute", "checkpoints"),
        ("schedule-csv", {"tensor": 2}, "sharding", "stages 0, 1"),
    ],
)
def test_what_a_tool_lacks_is_named(tool: str, changes: dict[str, Any], name: str, why: str) -> None:
    lost = configuration_for(plan_with(replace(PLAIN, **changes), 4), tool).not_expressed
    assert any(one.name == name and why in one.why for one in lost), lost


def test_what_degrees_do_not_say_is_named() -> None:
    plan = plan_with(MESHES, 4, cut_inside=True)
    first, last = plan.stages
    moved = replace(
        plan,
        stages=(replace(first, devices=last.devices, layerwise=True), replace(last, devices=first.devices)),
        devices=(*plan.devices, "cuda:99"),
        one_worker=True,
        assumed=Assumptions(overlap="all"),
    )
    lost = {one.name: one.why for one in moved.to_megatron_args().not_expressed if one.name != "devices"}
    assert set(lost) == {"recompute", "layers", "one worker", "overlap", "strategies"}
    assert "stage 0 full, stage 1 none; the configuration has full for all stages" in lost["recompute"]
    assert "layers.0 to stage 0" in lost["layers"]
    assert "overlap=all" in lost["overlap"]
    devices = [one.why for one in moved.to_megatron_args().not_expressed if one.name == "devices"]
    assert any("'cuda:99' is not used: start 8 processes without it" in why for why in devices)
    assert any("not 'cuda:4', 'cuda:5'" in why for why in devices)


def test_nothing_is_named_where_a_tool_says_all() -> None:
    assert plan_with(PLAIN, 4).to_megatron_args().not_expressed == ()
    assert plan_with(replace(PLAIN, data=2, zero=3, pipeline=1), 4).to_deepspeed().not_expressed == ()
    assert plan_with(replace(PLAIN, data=2, batch=16), 4).to_torchtitan().not_expressed == ()


def test_a_configuration_prints_and_saves_with_its_companions(tmp_path: Path) -> None:
    configuration = plan_with(replace(PLAIN, schedule="zb-h1", data=2, zero=1, batch=16), 4).to_torchtitan()
    text = str(configuration)
    assert "--parallelism.pipeline-parallel-schedule-csv schedule.csv" in text
    assert "not expressed:" in text
    assert "- zero: 1" in text
    configuration.save(tmp_path / "args.txt")
    assert (tmp_path / "args.txt").read_text() == configuration.text
    assert (tmp_path / "schedule.csv").read_text() == configuration.companions["schedule.csv"]
    assert degrees_for("schedule-csv", tmp_path / "schedule.csv").degrees["schedule"] == "zb-h1"


# -- what is read -----------------------------------------------------------------------------------------------------

SCRIPT = """
# a script's arguments
MODEL --num-layers 32 --hidden-size 4096 \\
 --tensor-model-parallel-size 8 --pipeline_model_parallel_size=4 \\
 --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --bf16
 --micro-batch-size 2 --global-batch-size 1536 --use-distributed-optimizer --recompute-activations
"""


def test_a_script_of_megatron_is_read() -> None:
    found = degrees_for("megatron", SCRIPT)
    sizes = {"tensor": 8, "pipeline": 4, "chunks": 2, "micro_batch": 2}
    how = {"schedule": "interleaved-1f1b", "zero": 1, "recompute": "selective", "sequence_parallel": True}
    assert dict(found.degrees) == sizes | how
    assert found.batch_size == 1536


@pytest.mark.parametrize(
    ("tool", "source", "why"),
    [
        (
            "megatron",
            "--context-parallel-size 2 --expert-model-parallel-size 4",
            "--context-parallel-size 2\n.*--expert",
        ),
        ("megatron", "--tensor-model-parallel-size two", "needs a whole number, got two"),
        ("megatron", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|tL", "3, 1 layers"),
        ("megatron", "--pipeline-model-parallel-layout EtmL", "only E, t and L"),
        ("megatron", "--num-layers-per-virtual-pipeline-stage 2", "give --num-layers"),
        ("megatron", "--recompute-granularity full --recompute-method block", "block"),
        ("megatron", "--recompute-granularity selective --recompute-modules mlp", "--recompute-modules mlp"),
        ("torchtitan", "--parallelism.context_parallel_degree 2", "context_parallel_degree=2"),
        ("torchtitan", "--parallelism.data_parallel_replicate_degree 2", "HSDP"),
        (
            "torchtitan",
            "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule DualPipeV",
            "DualPipeV",
        ),
        ("torchtitan", "activation-checkpoint:memory-budget", "memory-budget"),
        (
            "torchtitan",
            "--parallelism.pipeline_parallel_degree 2 --parallelism.module_fqns_per_model_part layers.0,layers.1 norm",
            "stages have 2, 0 layers, those of a plan by hand 1, 1",
        ),
        ("accelerate", {"dp_replicate_size": 2, "dp_shard_size": 2}, "HSDP"),
        ("accelerate", {"cp_size": 2}, "cp_size=2"),
        ("accelerate", {"tp_size": "two"}, "tp_size must be a whole number of at least 1, got 'two'"),
        ("accelerate", '{"distributed_type": "DEEPSPEED"}', "DEEPSPEED"),
        ("accelerate", "[1]", "list"),
        ("deepspeed", '{"train_batch_size": "many"}', "'auto' leaves it open"),
        ("deepspeed", {"tensor_parallel": {"autotp_size": "2"}}, "autotp_size must be a whole number, got '2'"),
        ("deepspeed", {"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, got True"),
        ("deepspeed", {"zero_optimization": 2}, "zero_optimization must have settings by name, got 2"),
        ("deepspeed", 3, "settings by name are needed, got int"),
        ("deepspeed", "{}", "is this a configuration of DeepSpeed"),
        ("megatron", "--train-iters 5", "is this a command line of Megatron-LM"),
        ("megatron", '{"train_batch_size": 8}', "is this a command line of Megatron-LM"),
        ("megatron", "--tensor-model-parallel-size '2", "the text is no command line: No closing quotation"),
        ("megatron", [1], "a command line has words, got 1"),
        ("megatron", 7, "a command line has words, got 7"),
        ("torchtitan", "--train-iters 5", "is this a configuration of torchtitan"),
        ("torchtitan", "--training.local_batch_size '1", "the text is no command line"),
        ("torchtitan", '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"', "ac_option=2"),
        ("accelerate", {}, "is this a ParallelismConfig"),
        ("accelerate", "train_batch_size: 8", "is this a ParallelismConfig, or a file of accelerate"),
        ("accelerate", {"distributed_type": "FSDP", "num_processes": "8"}, "num_processes must be a whole number"),
        ("accelerate", {"num_processes": 8, "fsdp_config": 5}, "fsdp_config must have settings by name, got 5"),
        (
            "accelerate",
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}},
            "fsdp_sharding_strategy=HYBRID_SHARD",
        ),
        ("schedule-csv", {"a": 1}, "the text of a CSV is needed, got dict"),
        ("schedule-csv", "0F0,0B999999999", "1 stages and 1000000000 micro-batches need 1000000000 forwards"),
        ("deepspeed", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ("deepspeed", "{", "not JSON"),
        ("schedule-csv", "0F0,0B0\n1F0,0SEND_F0", "'0SEND_F0' is no action of computing"),
        ("schedule-csv", "", "no actions"),
        ("schedule-csv", "0F0,0F1,0B1,0B0", "row 0 is not that of 1f1b: action 1 is 0F1 in place of 0B0"),
        ("schedule-csv", "0F0,1F0,1B0,0B0\n2F0,2B0", "3 stages do not go round 2 ranks"),
    ],
)
def test_what_no_plan_by_hand_has_is_refused_by_name(tool: str, source: Any, why: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s)no plan by hand expresses.*{why}"):
        degrees_for(tool, source)


TITAN = """
[training]
local_batch_size = 2
global_batch_size = 64
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "full"
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: true
"""


@pytest.mark.parametrize(
    ("tool", "source", "wanted", "batch"),
    [
        ("megatron", {"tensor_model_parallel_size": 2, "--micro-batch-size": "4", "sequence_parallel": True}, {}, None),
        ("megatron", "--tensor-model-parallel-size 2 --micro-batch-size 4 --sequence-parallel", {}, None),
        ("torchtitan", TITAN, {"zero": 3, "recompute": "full", "data": 4, "tensor": 2, "micro_batch": 2}, 64),
        (
            "torchtitan",
            {"parallelism": {"data_parallel_shard_degree": 4}, "activation_checkpoint.mode": "none"},
            {"zero": 3, "recompute": "none", "data": 4, "tensor": 1},
            None,
        ),
        ("accelerate", YAML.format(reshard="true"), {"data": 8, "zero": 3, "recompute": "full", "tensor": 1}, None),
        ("accelerate", YAML.format(reshard="false"), {"data": 8, "zero": 2, "recompute": "full", "tensor": 1}, None),
        ("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 4}, {"data": 4, "tensor": 1}, None),
        (
            "deepspeed",
            {
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
                "bf16": {"enabled": "auto"},
            },
            {"zero": 2, "tensor": 1, "pipeline": 1},
            None,
        ),
    ],
)
def test_configurations_are_read_in_each_form_that_their_tools_have(
    tool: str, source: Any, wanted: dict[str, Any], batch: int | None
) -> None:
    if "distributed_type:" in str(source):
        pytest.importorskip("yaml")
    found = degrees_for(tool, source)
    if tool == "megatron":
        wanted = {"tensor": 2, "micro_batch": 4, "sequence_parallel": True, "pipeline": 1, "zero": 0}
    assert {name: found.degrees.get(name) for name in wanted} == wanted
    assert found.batch_size == batch
    assert len(found.notes) == str(source).count("'auto'") - str(source).count("'enabled': 'auto'")


def test_layers_that_torchtitan_would_share_out_itself_are_noted() -> None:
    found = degrees_for("torchtitan", "--parallelism.pipeline_parallel_degree 2")
    assert found.degrees["pipeline"] == 2
    assert "fewer layers" in found.notes[0]


def test_unknown_tools_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="known are torchtitan, megatron"):
        degrees_for("colossal", "")
    with pytest.raises(InputError, match="cannot be read"):
        degrees_for("megatron", tmp_path / "no.txt")
    with pytest.raises(InputError, match="configuration of deepspeed is no configuration of megatron"):
        degrees_for("megatron", plan_with(PLAIN, 2).to_deepspeed())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_layouts_of_megatron_are_read_as_written(counts: list[int]) -> None:
    assert layout_counts(layout_text(counts)) == tuple(counts)


def test_repetitions_in_layouts_of_megatron() -> None:
    assert layout_counts("Et*2|(tt|)*2t,L") == (2, 2, 2, 1)


def test_uneven_stages_have_a_layout() -> None:
    arguments = arguments_in(plan_with(PLAIN, 5).to_megatron_args())
    assert arguments["--pipeline-model-parallel-layout"] == "Ettt|ttL"
    assert arguments["--num-layers"] == "5"


# -- schedules and precisions -----------------------------------------------------------------------------------------


def test_torchtitan_gets_a_csv_where_torch_has_no_such_schedule() -> None:
    for changes in ({"schedule": "zb-h1"}, {"batch": 1}):
        configuration = plan_with(replace(PLAIN, **changes), 4).to_torchtitan()
        assert configuration.settings["parallelism.pipeline_parallel_schedule_csv"] == "schedule.csv"
        assert "schedule.csv" in configuration.companions


def test_precisions_are_written() -> None:
    plan = replace(plan_with(replace(PLAIN, pipeline=1), 4), assumed=Assumptions(precision="bf16-mixed"))
    assert plan.to_megatron_args().settings["--bf16"] is True
    assert json.loads(plan.to_accelerate().text)["mixed_precision"] == "bf16"
    assert json.loads(plan.to_deepspeed().text)["bf16"] == {"enabled": True}
    assert "precision" in named(plan.to_torchtitan())


@pytest.mark.parametrize(
    "source",
    [
        "# run with --module llama3\n[parallelism]\ntensor_parallel_degree = 2\n",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.tensor_parallel_degree 2",
    ],
    ids=["a file with options in a comment", "an option that is TOML, too", "words"],
)
def test_a_file_of_torchtitan_and_its_command_line_are_distinguished(source: str) -> None:
    assert settings_in(source) == {"parallelism.tensor_parallel_degree": "2"}
