"""The tools themselves read what exits write. Where a tool is not installed, its test is skipped."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exit_plans import degrees, plan_with
from hypothesis import HealthCheck, assume, given, settings

from autopar import PlanError
from autopar.plan.degrees import Degrees
from autopar.plan.exits.configuration import ToolConfiguration
from autopar.plan.exits.megatron import arguments_in
from autopar.plan.exits.tools import configuration_for, degrees_for
from autopar.schedule.builders import make_schedule

PLAIN = Degrees(1, 2, 1, 1, "1f1b", 1, 0, "none", False, 8)


def expressed(tool: str, wanted: Degrees, n_layers: int) -> ToolConfiguration:
    """The configuration, of degrees that the tool can express."""
    try:
        return configuration_for(plan_with(wanted, n_layers), tool)
    except PlanError:
        assume(False)
        raise


@pytest.mark.slow
@given(degrees().filter(lambda d: d.pipeline == 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accelerate_reads_its_configuration(tmp_path_factory: Any, wanted: Degrees) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    configuration = expressed("accelerate", wanted, 4)
    sizes = accelerate.ParallelismConfig(**configuration.settings["ParallelismConfig"])  # refuses what it cannot do
    assert sizes.total_size == configuration.n_devices == wanted.data * wanted.tensor
    assert (sizes.data_parallel_size, sizes.tp_size) == (wanted.data, wanted.tensor)
    read_back = degrees_for("accelerate", sizes).degrees  # of the tool's own object
    assert (read_back["data"], read_back["tensor"]) == (wanted.data, wanted.tensor)
    path = tmp_path_factory.mktemp("accelerate") / "config.json"
    configuration.save(path)
    read = load_config_from_file(str(path))  # refuses unknown keys
    assert read.num_processes == configuration.n_devices
    assert read.parallelism_config["parallelism_config_tp_size"] == wanted.tensor


def deepspeed_config(configuration: ToolConfiguration, wanted: Degrees) -> Any:
    from deepspeed.runtime.config import DeepSpeedConfig

    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: wanted.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.comm.get_rank", lambda: 0)
        return DeepSpeedConfig(dict(configuration.settings["config"]), mpu=ranks)


@pytest.mark.slow
@given(degrees())
def test_deepspeed_reads_its_configuration(wanted: Degrees) -> None:
    pytest.importorskip("deepspeed")
    configuration = expressed("deepspeed", wanted, wanted.n_stages)
    read = deepspeed_config(configuration, wanted)  # refuses a batch that is not micro-batch x steps x replicas
    assert read.world_size == wanted.data
    assert read.gradient_accumulation_steps == wanted.n_microbatches
    assert read.zero_optimization_stage == wanted.zero
    assert (read.tensor_parallel_config.autotp_size or 1) == wanted.tensor


@pytest.fixture
def without_distributed() -> Any:
    pytest.importorskip("megatron.core")
    from megatron.core import num_microbatches_calculator

    yield num_microbatches_calculator
    num_microbatches_calculator.unset_num_microbatches_calculator()


@pytest.mark.slow
@given(degrees())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_megatron_core_accepts_the_arguments(without_distributed: Any, wanted: Degrees) -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    n_layers = wanted.n_stages + 1
    arguments = arguments_in(expressed("megatron", wanted, n_layers).text)
    names = {"num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size"}
    fields = {names.get(name[2:].replace("-", "_"), name[2:].replace("-", "_")): v for name, v in arguments.items()}
    batch, micro_batch = int(fields.pop("global_batch_size")), int(fields.pop("micro_batch_size"))
    own = {name: fields.pop(name) for name in list(fields) if name in TransformerConfig.__dataclass_fields__}
    values = {name: int(v) if str(v).isdecimal() else v for name, v in own.items()}
    TransformerConfig(
        hidden_size=64, num_attention_heads=4, pipeline_dtype=torch.float32, use_cpu_initialization=True, **values
    )
    if "pipeline_model_parallel_layout" in own:
        layout = PipelineParallelLayerLayout(own["pipeline_model_parallel_layout"], wanted.pipeline)
        layout.validate_layer_layout(n_layers, None)
        assert layout.virtual_pipeline_model_parallel_size == wanted.chunks
    fields.pop("no_gradient_accumulation_fusion", None), fields.pop("ckpt_format", None)  # of megatron.training alone
    DistributedDataParallelConfig(**fields)
    without_distributed.unset_num_microbatches_calculator()
    without_distributed.init_num_microbatches_calculator(0, None, batch, micro_batch, wanted.data)
    assert without_distributed.get_num_microbatches() == wanted.n_microbatches


@pytest.mark.parametrize(("ranks", "chunks", "m"), [(2, 2, 4), (2, 3, 6), (4, 2, 8)])
def test_megatron_interleaves_in_the_same_order(ranks: int, chunks: int, m: int) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = make_schedule("interleaved-1f1b", m, [1] * ranks, chunks=chunks)
    for actions in table.actions:
        ours = [(a.microbatch, a.stage // ranks) for a in actions if a.phase.value == "F"]
        assert ours == get_schedule_table(m, chunks, ranks)


def torchtitan_config(configuration: ToolConfiguration) -> Any:
    from torchtitan.config.manager import ConfigManager

    words = shlex.split(configuration.text.replace("\\\n", " "))
    return ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *words])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tensor": 2, "data": 2, "zero": 3, "recompute": "full", "batch": 16},
        {"tensor": 2, "sequence_parallel": True, "recompute": "selective-op"},
        {"chunks": 2, "schedule": "interleaved-1f1b", "data": 2, "zero": 2, "batch": 16},
        {"schedule": "gpipe", "micro_batch": 2},
        {"schedule": "zb-h1"},
        {"chunks": 2, "schedule": "zb-v"},
        {"pipeline": 1, "data": 4, "zero": 3},
    ],
)
def test_torchtitan_reads_its_arguments(changes: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torchtitan.trainer")
    from torchtitan.distributed import ParallelDims, pipeline_parallel

    wanted = replace(PLAIN, **changes)
    configuration = plan_with(wanted, 2 * wanted.n_stages).to_torchtitan()
    read = torchtitan_config(configuration)
    dims = ParallelDims.from_config(read.parallelism, configuration.n_devices)  # refuses another product
    assert (dims.tp, dims.pp, dims.dp_replicate * dims.dp_shard) == (wanted.tensor, wanted.pipeline, wanted.data)
    assert (dims.dp_shard > 1) == (wanted.zero > 0)
    assert read.training.global_batch_size == wanted.batch
    kinds = {"none": "NoneType", "full": "FullAC", "selective-op": "SelectiveAC"}
    assert type(read.activation_checkpoint).__qualname__.split(".")[0] == kinds[wanted.recompute]
    if wanted.tensor > 1:
        assert read.parallelism.enable_sequence_parallel == wanted.sequence_parallel
    if wanted.pipeline == 1:
        return
    parts = read.parallelism.module_fqns_per_model_part
    assert [name for part in parts for name in part if name.startswith("layers.")] == [
        f"layers.{i}" for i in range(2 * wanted.n_stages)
    ]
    configuration.save(tmp_path / "arguments")
    monkeypatch.chdir(tmp_path)
    stages = [
        SimpleNamespace(
            group=None, stage_index=s, group_rank=0, group_size=wanted.pipeline, num_stages=len(parts), submod=None
        )
        for s in range(0, wanted.n_stages, wanted.pipeline)
    ]
    for stage in stages:
        stage.is_first, stage.is_last, stage.has_backward = stage.stage_index == 0, False, True
    schedule = pipeline_parallel._build_pipeline_schedule(
        parallelism=read.parallelism,
        local_batch_size=read.training.local_batch_size,
        stages=stages,
        loss_fn=lambda *_: (None, None),
    )
    assert schedule._n_microbatches == wanted.n_microbatches
    if configuration.companions:
        rows = [[str(action) for action in row] for row in schedule.pipeline_order.values()]
        assert rows == [line.split(",") for line in configuration.companions["schedule.csv"].split()]
