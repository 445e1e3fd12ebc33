"""What all tests share: workers, one thread per operator, examples of hypothesis, their own cache, no downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import forked
import pytest
import torch
from examples import PROFILE
from hypothesis import settings
from shared_exports import SharedExports

from autopar.capture import export
from autopar.runtime.other_systems import processes

# Set before a test module imports transformers, which reads it once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.load_profile(PROFILE)

MOST_WORKERS = 4  # each imports torch and transformers: 0.5 GB

# pytest-xdist hands whole files to workers in the order of collection. The files that take longest go first, so that
# no worker starts one of them when the others are about to end.
LONGEST_FIRST = (
    "ranks/test_restarts.py",
    "ranks/test_ranks.py",
    "ranks/test_rank_training.py",
    "ranks/test_faults.py",
    "ranks/test_rank_checkpoints.py",
    "ranks/test_states.py",
    "ranks/test_hosts.py",
    "integrations/test_examples.py",
    "benchmarks/test_benchmarks.py",
    "benchmarks/test_gpu_benchmark.py",
    "docs/test_pages.py",
    "benchmarks/test_published.py",
    "lower/test_priced_transfers.py",
    "runtime/test_fake_gpus.py",
    "planner/test_rehearsed_memory.py",
    "planner/test_recompute_layers.py",
    "planner/test_laws.py",
    "planner/test_planning_leaks.py",
    "planner/test_partition_instances.py",
    "planner/test_hand_plans.py",
    "planner/test_overlap.py",
    "planner/test_shards_at_hand.py",
    "planner/test_planning_ahead.py",
    "lower/test_sharded_corners.py",
    "lower/test_sharded_models.py",
    "lower/test_sharded_execution.py",
    "runtime/test_models.py",
    "planner/test_partition.py",
    "planner/test_meshes.py",
    "runtime/test_faults_at_random.py",
    "cost_models/test_step_memory.py",
    "capture/test_rnn.py",
    "cost_models/test_roofline.py",
    "planner/test_search.py",
    "planner/test_recompute.py",
    "analysis/test_batch_proof.py",
    "runtime/test_ending.py",
    "cost_models/test_graph_bytes.py",
    "runtime/test_schedules_run.py",
    "planner/test_sharding_explain.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` starts one worker per core, also where two cores are threads of one processor core."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


# Files whose tests keep the same promise for many models: every tenth case runs by default, or in the slow set if the
# test is slow, the others among the exhaustive tests.
EVERY_TENTH_CASE = (
    "analysis/test_batch_proof.py",
    "analysis/test_batching.py",
    "analysis/test_in_place_writes.py",
    "analysis/test_loss.py",
    "analysis/test_rules.py",
    "analysis/test_unruled.py",
    "benchmarks/test_gpu_benchmark.py",
    "benchmarks/test_published.py",
    "capture/test_capture.py",
    "capture/test_module_hooks.py",
    "capture/test_registrations.py",
    "capture/test_rnn.py",
    "capture/test_uncaptured.py",
    "cost_models/test_cache.py",
    "cost_models/test_graph_bytes.py",
    "cost_models/test_optimizer_step.py",
    "cost_models/test_roofline.py",
    "cost_models/test_sends.py",
    "cost_models/test_step_memory.py",
    "costs/test_crowded_workers.py",
    "costs/test_measured_cache.py",
    "hints/test_shard_hints.py",
    "integrations/test_examples.py",
    "integrations/test_trainer.py",
    "lower/test_batch_norm.py",
    "lower/test_fused_random_operators.py",
    "lower/test_priced_transfers.py",
    "lower/test_projection.py",
    "lower/test_random_operators.py",
    "lower/test_regather.py",
    "lower/test_sharded_corners.py",
    "lower/test_sharded_execution.py",
    "lower/test_sharded_models.py",
    "lower/test_tied_weights.py",
    "plan/test_serialization.py",
    "planner/test_elimination.py",
    "planner/test_hand_plans.py",
    "planner/test_kept_bytes.py",
    "planner/test_meshes.py",
    "planner/test_module_hints_resolved.py",
    "planner/test_never_beaten_by_hand.py",
    "planner/test_overlap.py",
    "planner/test_partition.py",
    "planner/test_pipeline_copies.py",
    "planner/test_planning_ahead.py",
    "planner/test_price_sharded.py",
    "planner/test_recompute.py",
    "planner/test_recompute_layers.py",
    "planner/test_rehearsed_memory.py",
    "planner/test_schedules_with_meshes.py",
    "planner/test_search.py",
    "planner/test_selective.py",
    "planner/test_shard_examples.py",
    "planner/test_shard_hints_refused.py",
    "planner/test_sharding_explain.py",
    "planner/test_shards_at_hand.py",
    "planner/test_stage_sends.py",
    "planner/test_step_prices.py",
    "planner/test_strategy_search.py",
    "planner/test_transit_memory.py",
    "ranks/test_collective_order.py",
    "ranks/test_initial_values.py",
    "ranks/test_rank_checkpoints.py",
    "ranks/test_rank_gpus.py",
    "ranks/test_rank_training.py",
    "ranks/test_ranks.py",
    "ranks/test_states.py",
    "report/test_sharding_report.py",
    "runtime/test_autograd.py",
    "runtime/test_batches.py",
    "runtime/test_calibration.py",
    "runtime/test_compile.py",
    "runtime/test_ending.py",
    "runtime/test_failures.py",
    "runtime/test_fake_gpus.py",
    "runtime/test_faults_at_random.py",
    "runtime/test_graphed_stages.py",
    "runtime/test_host_waits.py",
    "runtime/test_layers_run_again.py",
    "runtime/test_losses.py",
    "runtime/test_models.py",
    "runtime/test_recompute_memory.py",
    "runtime/test_refusals.py",
    "runtime/test_rerun_cores.py",
    "runtime/test_runtime.py",
    "runtime/test_schedules_run.py",
    "runtime/test_step_profile.py",
    "runtime/test_stream_order.py",
    "runtime/test_thread_state.py",
    "runtime/test_threads.py",
    "runtime/test_train_step.py",
    "runtime/test_transformers.py",
    "runtime/test_transparency.py",
    "runtime/test_tuning.py",
    "runtime/test_uncaptured_checkpoints.py",
    "runtime/test_uncaptured_corners.py",
    "runtime/test_uncaptured_runs.py",
    "runtime/test_user_warnings.py",
    "runtime/test_watching.py",
    "sharding/test_local_work.py",
    "sharding/test_strategies.py",
)

# Files whose tests keep a promise for some models each: the first case runs by default, every other one of the rest in
# the slow set. Of a file that is in EVERY_TENTH_CASE, too, every tenth case is in the slow set.
FIRST_CASE = (
    "analysis/test_kept_products.py",
    "analysis/test_loss_digest.py",
    "capture/test_attention_masks.py",
    "capture/test_buffer_assignments.py",
    "capture/test_float32_settings.py",
    "capture/test_module_hooks.py",
    "capture/test_parameter_writes.py",
    "capture/test_repeated_layers.py",
    "capture/test_rnn.py",
    "capture/test_symbolic_lengths.py",
    "cost_models/test_graph_bytes.py",
    "cost_models/test_optimizer_step.py",
    "costs/test_crowded_gpus.py",
    "integrations/test_lightning.py",
    "lower/test_sharded_execution.py",
    "lower/test_sharded_models.py",
    "lower/test_size_values.py",
    "plan/test_assumptions.py",
    "plan/test_changes.py",
    "plan/test_plan_file_versions.py",
    "planner/test_hand_plan_layers.py",
    "planner/test_hand_plan_refusals.py",
    "planner/test_laws.py",
    "planner/test_losses_left_out.py",
    "planner/test_losses_with_tensors.py",
    "planner/test_memory_under_autocast.py",
    "planner/test_other_speeds.py",
    "planner/test_recomputed_collectives.py",
    "planner/test_regathering.py",
    "planner/test_shard_pinned.py",
    "planner/test_zero3.py",
    "report/test_axis_words.py",
    "runtime/test_assigned_buffers.py",
    "runtime/test_autocast_answers.py",
    "runtime/test_batch_tails.py",
    "runtime/test_changed_attributes.py",
    "runtime/test_dynamic_sizes.py",
    "runtime/test_later_values.py",
    "runtime/test_losses_with_state.py",
    "runtime/test_lost_by_tracers.py",
    "runtime/test_models.py",
    "runtime/test_overhead.py",
    "runtime/test_shared_gpu.py",
    "runtime/test_workers.py",
    "runtime/test_written_buffers.py",
)

# Of slow tests every third case runs in the slow set, the others are exhaustive; but all cases of these files are slow.
ALL_SLOW_CASES = (
    "benchmarks/test_published.py",
    "docs/test_pages.py",
    "ranks/test_bad_input.py",
    "ranks/test_faults.py",
    "ranks/test_restarts.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, int] = {}
    slow_cases: dict[str, int] = {}
    thinned = {*ALL_SLOW_CASES, *EVERY_TENTH_CASE}  # by another rule, or not at all
    for item in items:
        file, test = "/".join(item.path.parts[-2:]), item.nodeid.partition("[")[0]
        number = cases.setdefault(test, 0)
        cases[test] += 1
        left_out = (file in EVERY_TENTH_CASE and number % 10) or (file in FIRST_CASE and number % 2)
        if item.get_closest_marker("slow") is not None and not left_out and file not in thinned:
            left_out = slow_cases.setdefault(test, 0) % 3
            slow_cases[test] += 1
        if left_out:
            item.add_marker(pytest.mark.exhaustive)
        elif file in FIRST_CASE and number:
            item.add_marker(pytest.mark.slow)
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}

    def rank(item: pytest.Item) -> int:
        return ranks.get("/".join(item.path.parts[-2:]), len(ranks))

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _processes_are_forked() -> Iterator[None]:
    """Those of other systems and of ceilings, which autopar starts anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "mp", SimpleNamespace(get_context=lambda _: forked.context()))
        yield


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of other systems and ceilings start as without tests."""
    monkeypatch.setattr(processes, "mp", torch.multiprocessing)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


# Files and folders whose tests are about exporting itself, or about what is left in memory.
OWN_EXPORTS = ("capture", "test_planning_leaks.py")


@pytest.fixture(scope="session")
def _exports() -> SharedExports:
    return SharedExports(export._export)


@pytest.fixture(autouse=True)
def shared_exports(request: pytest.FixtureRequest, _exports: SharedExports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal models are exported once in a session."""
    if not {request.path.name, request.path.parent.name} & set(OWN_EXPORTS):
        monkeypatch.setattr(export, "_export", _exports)
