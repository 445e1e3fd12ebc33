"""Published training runs: the layers they are made of, what a plan takes, the search, and the tables as files."""

import dataclasses
import heapq
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import published
from benchmarks.__main__ import main
from benchmarks.hybrid import predict
from benchmarks.hybrid_costs import stages_of
from benchmarks.hybrid_layers import Arithmetic, Transformer, embedding_work, gpt, head_work, layer_work
from benchmarks.hybrid_plan import Job, Split, System
from benchmarks.hybrid_search import Space, difference, search, splits
from benchmarks.hybrid_tables import TableError, gpt_flops, read_cases
from cost_models import Cluster, efficiency_of, known_devices, rates_of
from cost_models.kernels.efficiency_curves import filled
from cost_models.kernels.kernel import Kernel
from cost_models.kernels.roofline import kernel_seconds
from cost_models.memory.training_memory import MIXED

PLAIN = Arithmetic(torch.float16, flash=False, fused=True, sequence_parallel=False)
SPLIT_TOKENS = dataclasses.replace(PLAIN, sequence_parallel=True)
SYSTEM = System(PLAIN, MIXED, optimizer_bytes=62, accumulates=True, blocking_sends=True)
TINY = gpt(4, 256, 4, 128, 1024)
LLAMA = Transformer(2, 256, 8, 128, 1024, kv_heads=2, inner=512, gated=True)

MEGATRON = "params_b,heads,hidden,layers,tp,pp,gpus,batch,micro_batch,vlayers,tflops_per_gpu"
MEGATRON_ROW = "18.4,48,6144,40,8,1,256,1024,8,,135"  # Narayanan et al., 2021, table 1
TORCHTITAN = "model,gpus,fsdp,tp,pp,cp,seq,local_batch,recompute,variant,tokens_per_s_gpu,mem_gib"


def products(kernels: tuple[Kernel, ...]) -> int:
    return sum(kernel.flops for kernel in kernels)


def moved(kernels: tuple[Kernel, ...]) -> int:
    return sum(kernel.nbytes for kernel in kernels)


def job(model: Transformer = TINY, gpus: int = 8, batch: int = 16, system: System = SYSTEM) -> Job:
    return Job(model, system, batch, Cluster.preset(f"{min(gpus, 8)}xA100-80", nodes=-(-gpus // 8)))


def written(path: Path, *lines: str) -> Path:
    path.write_text("# of a test\n" + "\n".join(lines) + "\n")
    return path


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_gpt_layer_computes_the_products_of_the_formula(tensor: int) -> None:
    # Narayanan et al., 2021, appendix: 24 b s h^2 + 4 b s^2 h of a forward, twice as much of a backward.
    model, b = gpt(2, 1024, 16, 512, 4096), 3
    work = layer_work(model, PLAIN, tensor, b)
    forward = (24 * b * model.seq * model.hidden**2 + 4 * b * model.seq**2 * model.hidden) // tensor
    assert (products(work.forward), products(work.backward)) == (forward, 2 * forward)


@pytest.mark.parametrize(("how", "divided"), [(PLAIN, False), (SPLIT_TOKENS, True)])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_a_gpt_layer_keeps_the_bytes_of_the_formulas(how: Arithmetic, divided: bool, tensor: int) -> None:
    # Korthikanti et al., 2022, table 2: s b h (10 + 24 / t + 5 a s / (h t)); without the last term selectively; all
    # over t with sequence parallelism. A norm's means and deviations are left out there.
    model, b = gpt(2, 2048, 16, 1024, 4096), 2
    work = layer_work(model, how, tensor, b)
    sbh, t = model.seq * b * model.hidden, tensor
    linear = sbh * (10 / (t if divided else 1) + 24 / t)
    scores = sbh * 5 * model.heads * model.seq / (model.hidden * t)
    assert work.kept == pytest.approx(linear + scores, rel=2e-3)
    assert work.kept_selective == pytest.approx(linear, rel=2e-3)


def test_tensor_ranks_have_the_layers_parameters_among_them_but_for_norms_and_late_biases() -> None:
    model = gpt(2, 1024, 16, 128, 4096)
    h = model.hidden
    assert layer_work(model, PLAIN, 1, 1).elements == 12 * h * h + 13 * h
    assert 8 * (layer_work(model, PLAIN, 8, 1).elements - 6 * h) == 12 * h * h + 7 * h
    assert head_work(model, PLAIN, 1, 1).elements == model.vocab * h + 2 * h
    assert embedding_work(model, PLAIN, 1, 1).elements == (model.vocab + model.seq) * h


def test_a_llama_layer_computes_the_products_of_its_matrices_and_of_grouped_attention() -> None:
    how = Arithmetic(torch.bfloat16, flash=True, fused=True, sequence_parallel=False)
    b, s, h = 2, LLAMA.seq, LLAMA.hidden
    work = layer_work(LLAMA, how, 1, b)
    matrices = 2 * h * h + 2 * h * (LLAMA.kv_heads * LLAMA.head) + 3 * h * LLAMA.inner
    assert products(work.forward) == 2 * b * s * matrices + 4 * b * s * s * h
    assert work.elements == matrices + 2 * h
    # What runs again: the products of keys, of the attention's result, and of one half of the feed-forward block.
    assert products(work.again) == 2 * b * s * (h * LLAMA.kv_heads * LLAMA.head + h * h + h * LLAMA.inner)


def test_fusing_moves_fewer_bytes_and_computes_the_same_products() -> None:
    eager, fused = (Arithmetic(torch.bfloat16, True, fused, False) for fused in (False, True))
    one, other = (layer_work(LLAMA, how, 2, 2) for how in (eager, fused))
    for kernels in ("forward", "backward"):
        assert products(getattr(one, kernels)) == products(getattr(other, kernels))
        assert moved(getattr(other, kernels)) < moved(getattr(one, kernels))


def test_a_layer_of_22_billion_parameters_takes_about_what_was_published() -> None:
    # Korthikanti et al., 2022, table 4: 7.7 ms forward and 11.9 ms backward on 8 A100, all-reduces of the backward
    # hidden behind products.
    spec, model = known_devices()["A100-80"], gpt(48, 6144, 64, 2048, 51200)
    work, cluster = layer_work(model, PLAIN, 8, 4), Cluster.preset("8xA100-80")
    rates, efficiency = rates_of(spec), efficiency_of(spec)
    sums = 2 * cluster.seconds("all_reduce", 2 * 2048 * 4 * 6144, cluster.devices)
    forward, backward = (sum(kernel_seconds(k, rates, efficiency) for k in ks) for ks in (work.forward, work.backward))
    assert forward + sums == pytest.approx(7.7e-3, rel=0.1)
    assert backward < 11.9e-3 < 1.1 * (backward + sums)


@given(st.integers(1, 3), st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 80, 108]))
def test_products_fill_whole_waves_of_tiles(count: int, rows: int, columns: int, units: int) -> None:
    """Oracle: units that take a tile each as soon as they are free, and compute for the time of a whole tile."""

    def share(height: int, width: int) -> float:
        free = [0] * units  # when each unit has finished its tiles
        useful = 0
        for row, column in itertools.product(range(0, rows, height), range(0, columns, width)):
            for _ in range(count):
                heapq.heapreplace(free, free[0] + 1)
                useful += min(height, rows - row) * min(width, columns - column)
        waves.append(max(free))
        return useful / (units * max(free) * height * width)

    waves: list[int] = []
    best = max(share(256, 128), share(128, 256))
    found = filled((count, rows, columns), units)
    if min(waves) > 1 and min(rows, columns) > 64:
        assert found == pytest.approx(best)
    else:  # smaller tiles may be better
        assert best * (1 - 1e-12) <= found <= 1 + 1e-12


def test_one_tile_more_than_a_wave_takes_two_waves() -> None:
    # 9 x 12 tiles of 256 x 128 are one wave of the 108 multiprocessors of an A100.
    assert filled((2304, 1536), 108) == 1.0
    assert filled((2304, 1537), 108) < 0.6
    assert filled((5000, 5000), 0) == 1.0  # the number of multiprocessors is not known


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split",
    [
        Split(1, 1, 8, 2),
        Split(2, 2, 2, 1),
        Split(8 // 4, 4, 1, 1, recompute="none"),
        Split(2, 2, 2, 1, chunks=2, recompute="selective"),
        Split(1, 1, 8, 1, zero=3),
    ],
    ids=str,
)
def test_parts_sum_up_to_the_step_and_nothing_beats_the_bound(split: Split) -> None:
    step = predict(job(), split)
    assert math.isclose(sum(step.parts.values()), step.seconds)
    assert all(seconds >= -1e-12 for seconds in step.parts.values())
    bound = stages_of(job(), split).bound(split, split.microbatches(16))
    assert bound <= step.seconds * (1 + 1e-12)


@given(st.sampled_from(list(splits(job(), Space()))))
@settings(max_examples=examples(15), deadline=None)
def test_no_split_that_can_run_beats_its_bound(split: Split) -> None:
    bound = stages_of(job(), split).bound(split, split.microbatches(16))
    assert bound <= predict(job(), split).seconds * (1 + 1e-9)


def test_one_device_takes_its_kernels_and_its_optimizer_alone() -> None:
    one, split = job(gpus=1, batch=4), Split(1, 1, 1, 2, recompute="none")
    step = predict(one, split)
    assert {part for part, seconds in step.parts.items() if seconds > 1e-12} == {"compute", "optimizer"}
    twice = predict(dataclasses.replace(one, batch=8), split)
    assert twice.parts["compute"] == pytest.approx(2 * step.parts["compute"])
    assert twice.parts["optimizer"] == pytest.approx(step.parts["optimizer"])


def test_recomputing_costs_a_forward_with_its_collectives_and_saves_memory() -> None:
    model = gpt(4, 2048, 16, 1024, 8192)
    none, selective, full = (
        predict(job(model), Split(8, 1, 1, 4, recompute=recompute)) for recompute in ("none", "selective", "full")
    )
    assert none.parts["recompute"] == 0 < selective.parts["recompute"] < full.parts["recompute"]
    layers = model.layers * layer_forward(model, 8, 4) * 4
    assert full.parts["recompute"] == pytest.approx(layers)
    assert full.parts["tensor"] > none.parts["tensor"] == selective.parts["tensor"]
    assert none.memory.activations > selective.memory.activations > full.memory.activations


def layer_forward(model: Transformer, tensor: int, samples: int) -> float:
    spec = known_devices()["A100-80"]
    work = layer_work(model, PLAIN, tensor, samples)
    return sum(kernel_seconds(kernel, rates_of(spec), efficiency_of(spec)) for kernel in work.forward)


def test_interleaving_shortens_the_wait_and_sends_more() -> None:
    model = gpt(8, 1024, 16, 512, 1024)
    plain, chunked = (predict(job(model), Split(2, 4, 1, 1, chunks=chunks)) for chunks in (1, 2))
    assert chunked.parts["bubble"] < plain.parts["bubble"]
    assert chunked.parts["transfers"] > plain.parts["transfers"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_divides_the_optimizer_among_the_replicas(zero: int) -> None:
    whole, part = (predict(job(), Split(1, 1, 8, 2, zero=stage)) for stage in (0, zero))
    assert 8 * part.parts["optimizer"] == pytest.approx(whole.parts["optimizer"])
    assert part.memory.optimizer == pytest.approx(whole.memory.optimizer / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (Split(2, 2, 1, 1), "are not 8"),
        (Split(8, 1, 1, 1), "heads"),
        (Split(1, 1, 8, 3), "no multiple"),
        (Split(1, 1, 8, 2, chunks=2), "interleaving"),
        (Split(1, 2, 4, 2, zero=3), "ZeRO"),
    ],
)
def test_a_split_that_cannot_run_is_refused_with_its_reason(split: Split, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        predict(job(), split)


# -- search -----------------------------------------------------------------------------------------------------------


def test_the_search_finds_what_trying_every_split_finds() -> None:
    one = job()
    tried = [(predict(one, split), split) for split in splits(one, Space())]
    fastest = min(step.seconds for step, _ in tried if step.fits)
    found = search(one)
    assert found is not None
    assert found.step.seconds == fastest
    assert found.simulated < found.candidates == sum(step.fits for step, _ in tried)


def test_the_search_takes_no_plan_that_does_not_fit() -> None:
    model = gpt(24, 4096, 32, 1024, 8192)  # 5 billion parameters: 80 GB of states alone
    one = job(model, batch=64)
    found = search(one)
    assert found is not None
    assert found.step.fits
    assert not predict(one, Split(1, 1, 8, 1)).fits
    assert search(one, Space(zero=(0,), tensor=1, pipeline=1)) is None


def test_a_space_limits_the_search() -> None:
    space = Space(recompute=("full",), zero=(0,), tensor=1, data=1, whole_layers=False)
    assert {(s.tensor, s.data, s.recompute, s.zero) for s in splits(job(pipelined()), space)} == {(1, 1, "full", 0)}


def pipelined() -> Transformer:
    return gpt(8, 256, 4, 128, 1024)


def test_differences_are_told_in_words_with_the_seconds_they_save() -> None:
    one = job(gpt(8, 2048, 16, 1024, 8192), batch=64)
    plans = [Split(8, 1, 1, 4), Split(1, 1, 8, 4)]
    first, second = ((split, predict(one, split)) for split in plans)
    told = difference(first, second)
    assert told.startswith("tensor 1 instead of 8, data 8 instead of 1: ")
    saved = first[1].parts["tensor"] - second[1].parts["tensor"]
    assert f"tensor collectives {saved:.2f} s less" in told
    assert difference(first, first) == "the same plan"


# -- tables -----------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_published_equation() -> None:
    # Narayanan et al., 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    model, batch = gpt(96, 12288, 96, 2048, 51200), 1536
    s, layers, h, v = model.seq, model.layers, model.hidden, model.vocab
    expected = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert gpt_flops(model, batch, recomputed=True) == pytest.approx(expected)


def test_a_table_is_known_by_its_columns_and_other_columns_count(tmp_path: Path) -> None:
    path = written(
        tmp_path / "any.csv",
        f"{MEGATRON},gpu,seq,recompute,sequence_parallel,flash,dtype",
        f"{MEGATRON_ROW},H100,4096,selective,true,yes,bf16",
        MEGATRON_ROW,
    )
    cases = read_cases(path, print)
    assert cases is not None
    told, plain = cases
    assert (told.job.spec.name, told.job.model.seq) == ("H100", 4096)
    assert told.job.system.arithmetic == Arithmetic(torch.bfloat16, True, True, True)
    assert told.split == Split(8, 1, 32, 8, recompute="selective")
    assert (plain.job.spec.name, plain.job.model.seq, plain.split) == ("A100-80", 2048, Split(8, 1, 32, 8))
    assert plain.job.system.arithmetic == PLAIN
    assert plain.job.cluster.nodes == 32


def test_virtual_stages_are_told_by_their_layers(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", MEGATRON, "76.1,80,10240,60,8,4,1024,1792,2,5,140")
    (case,) = read_cases(path, print) or []
    assert case.split == Split(8, 4, 32, 2, chunks=3)


def test_torchtitan_rows_shard_over_fsdp_and_leave_out_what_is_not_modelled(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv",
        TORCHTITAN,
        "8B,8,8,1,1,1,8192,2,selective,eager,5762,82.4",
        "8B,8,4,1,1,2,8192,2,selective,eager,5762,",
        "405B,512,8,8,8,1,8192,32,full,1F1B,100,82.5",
    )
    told: list[str] = []
    (case,) = read_cases(path, told.append) or []
    assert case.split == Split(1, 1, 8, 2, recompute="selective", zero=3)
    assert case.memory == 82.4 * 2**30
    assert case.work / case.published == pytest.approx(2 * 8192 / 5762)  # s of a step
    assert not case.job.system.arithmetic.fused
    assert [("context" in line, "float8" in line) for line in told] == [(True, False), (False, True)]


def test_alpas_columns_are_the_best_of_their_spaces(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.csv", "params_b,gpus,megatron,intra_only,inter_only,alpa", "0.76,2,55.53,59.54,57.94,57.9"
    )
    cases = read_cases(path, print) or []
    assert [case.column for case in cases] == ["megatron", "intra_only", "inter_only"]
    outcomes = {case.column: published.evaluate(case) for case in cases}
    plans = {column: outcome.split for column, outcome in outcomes.items()}
    assert plans["intra_only"] is not None
    assert plans["intra_only"].pipeline == 1
    assert plans["inter_only"] is not None
    assert (plans["inter_only"].pipeline, plans["inter_only"].data) == (2, 1)
    assert all(outcome.why == "none was published" for outcome in outcomes.values())


def test_a_figure_for_which_no_plan_fits_is_told_and_counts_in_no_mean(tmp_path: Path) -> None:
    # 39 billion parameters have 624 GB of states, eight V100 have 128 GB.
    written(tmp_path / "t.csv", "params_b,gpus,megatron", "39,8,50")
    report = published.run_published(tmp_path, quick=False)
    assert report is not None
    data = report.data["t"]
    assert (data["mean_abs_error"], data["without_prediction"]) == (None, ["39B on 8, megatron"])
    assert "nothing fits" in report.tables[0].rows[0]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("heads", "many"), ("hidden", ""), ("layers", "2.5"), ("gpus", "-8"), ("gpus", "20"), ("tp", "7")),
        *(("micro_batch", "5"), ("vlayers", "7"), ("pp", "3"), ("tflops_per_gpu", "nan")),
    ],
)
def test_a_bad_row_is_told_by_file_line_and_column(
    column: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = dict(zip(MEGATRON.split(","), MEGATRON_ROW.split(","), strict=True)) | {column: value}
    path = written(tmp_path / "bad.csv", MEGATRON, MEGATRON_ROW, ",".join(cells.values()))
    where = rf"bad\.csv, line 4, column '({column}|gpus)'"
    with pytest.raises(TableError, match=where):
        read_cases(path, print)
    assert main(["published", "--tables", str(tmp_path), "--results", str(tmp_path / "r")]) == 2
    assert "line 4" in capsys.readouterr().err


def test_the_command_writes_errors_and_plans_and_skips_other_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "runs.csv", MEGATRON, MEGATRON_ROW)
    written(tmp_path / "hardware.csv", "gpu,bf16", "A100,312")
    out = tmp_path / "out.json"
    arguments = ["published", "--tables", str(tmp_path), "--json", str(out), "--results", str(tmp_path / "results")]
    assert main(arguments) == 0
    assert "hardware.csv: skipped" in capsys.readouterr().err
    data = json.loads(out.read_text())
    assert set(data) == {"runs"}
    (row,) = data["runs"]["rows"]
    assert data["runs"]["mean_abs_error"] == abs(row["error"]) == abs(row["predicted"] / 135 - 1)
    assert row["found"]["seconds"] <= row["seconds"]
    assert sum(row["parts"].values()) == pytest.approx(row["seconds"])
    assert row["found"]["fits"]
    assert "instead of" in row["found"]["difference"]
    page = (tmp_path / "results" / "published.md").read_text()
    assert "predicted and published" in page
    assert "18.4B on 256" in page


def test_without_tables_the_command_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["published"]) == 0
    assert main(["published", "--tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("skipped: no tables in") == 2
