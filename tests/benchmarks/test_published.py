"""Published training runs: the models they are made of, the tables as files, their prices, and the report."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_tables import ALPA, B200, KEYS, MEGATRON, MEGATRON_ROW, TORCHTITAN, VTRAIN, VTRAIN_ROW, cases_of, written

from autopar import Plan
from benchmarks import published
from benchmarks.__main__ import main
from benchmarks.published_runs.alpa import ALPA_PLANS
from benchmarks.published_runs.b200 import _ATTENTION, NVLINK
from benchmarks.published_runs.b200 import B200 as B200_DEVICE
from benchmarks.published_runs.cases import Case, Options
from benchmarks.published_runs.errors import Errors, kendall_tau, regrets
from benchmarks.published_runs.forms import _LLAMA3, gpt_flops, read_cases
from benchmarks.published_runs.models import GPTSizes, LlamaSizes, Sizes
from benchmarks.published_runs.pricing import Pricer, least_memory
from benchmarks.published_runs.vtrain import NVLINK as VTRAIN_NVLINK
from cost_models import Cluster, Group, collective_seconds, efficiency_of
from cost_models.memory.training_memory import FRAGMENTATION

TINY = GPTSizes(4, 256, 4, 128, 1024)


def case(model: Sizes = TINY, batch: int = 16, plans: tuple[dict[str, Any], ...] = (), **changes: Any) -> Case:
    wanted: dict[str, Any] = {
        "name": "run",
        "column": "ms",
        "published": 10.0,
        "unit": "ms",
        "model": model,
        "batch": batch,
        "cluster": Cluster.preset("8xA100-80"),
        "options": Options(precision="fp16-mixed"),
        "plans": plans or (degrees(),),
        "per_second": 1e3,
    }
    return Case(**{**wanted, **changes})


def degrees(tensor: int = 2, pipeline: int = 2, data: int = 2, micro_batch: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "data": data,
        "micro_batch": micro_batch,
        "recompute": "full",
    } | more


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        (GPTSizes(24, 2304, 24, 2048, 51200), 1.7),  # Narayanan et al., 2021, table 1
        (GPTSizes(48, 8192, 64, 2048, 51200), 39.1),
        (GPTSizes(128, 25600, 160, 2048, 51200), 1008.0),
        (GPTSizes(24, 1024, 16, 1024, 51200), 0.355),  # Alpa
        (LlamaSizes(**_LLAMA3["8b"], seq=8192), 8.03),
        (LlamaSizes(**_LLAMA3["70b"], seq=8192), 70.6),
        (LlamaSizes(**_LLAMA3["405b"], seq=8192), 405.9),
        (LlamaSizes(**_LLAMA3["8b"], seq=8192, fused=False), 8.03),
    ],
)
def test_models_have_the_published_numbers_of_parameters(sizes: Sizes, billions: float) -> None:
    assert sizes.parameters() / 1e9 == pytest.approx(billions, rel=0.03)  # they are rounded
    assert sum(parameter.numel() for parameter in sizes.build().parameters()) == sizes.parameters()


@pytest.mark.parametrize(
    "sizes",
    [
        TINY,
        replace(TINY, fused_softmax=False),
        LlamaSizes(2, 64, 4, 2, 96, 16, vocab=64),
        LlamaSizes(2, 64, 4, 2, 96, 16, vocab=64, fused=False),
        LlamaSizes(2, 64, 4, 2, 96, 16, vocab=64, one_product=False),
    ],
)
def test_models_return_the_loss_of_random_guesses(sizes: Sizes) -> None:
    model = sizes.build().to_empty(device="cpu").float().eval()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.02)
        else:
            tensor.zero_()
    tokens = torch.randint(sizes.vocab, (2, sizes.seq))
    loss = model(tokens, tokens.flip(0))
    assert loss.item() == pytest.approx(math.log(sizes.vocab), rel=0.1)


@pytest.mark.slow
def test_a_layer_of_22_billion_parameters_takes_about_what_was_published() -> None:
    # Korthikanti et al., 2022, table 4: 7.7 ms forward on 8 A100.
    def forward(layers: int) -> float:
        one = case(
            GPTSizes(layers, 6144, 64, 2048, 51200), 4, (degrees(8, 1, 1, 4),), cluster=Cluster.preset("8xA100-80")
        )
        plan = Pricer([one]).price(one).plan
        assert plan is not None
        return plan.stages[0].forward_time or 0.0

    assert forward(5) - forward(4) == pytest.approx(7.7e-3, rel=0.15)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_the_published_equation() -> None:
    # Narayanan et al., 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    model, batch = GPTSizes(96, 12288, 96, 2048, 51200), 1536
    s, layers, h, v = model.seq, model.layers, model.hidden, model.vocab
    expected = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert gpt_flops(model, batch, recomputed=True) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("header", "row", "column", "batch", "wanted"),
    [
        (MEGATRON, MEGATRON_ROW, "tflops_per_gpu", 16, degrees(2, 2, 2, 1, chunks=1)),
        (VTRAIN, VTRAIN_ROW, "iteration_ms", 16, degrees(2, 2, 2, 2, recompute="none")),  # made of traces: vtrain.py
        (VTRAIN, "multi-node,16,32,2,256,4,4,128,2,4,2,50", "iteration_ms", 32, degrees(2, 2, 4, 2)),
        (
            B200,
            "llama3-70b,12,2,1,4,1,1,4096,4,725.5,60.68,62.53",
            "step_ms",
            16,
            degrees(2, 1, 4, 1, recompute="none", zero=1, sequence_parallel=True),
        ),
        (
            TORCHTITAN,
            "8B,8,8,1,1,1,8192,2,selective,eager,5762,82.4",
            "tokens_per_s_gpu",
            16,
            degrees(1, 1, 8, 2, recompute="selective-op", zero=3, sequence_parallel=False, chunks=1),
        ),
    ],
)
def test_a_table_is_known_by_its_columns_whatever_its_name(
    header: str, row: str, column: str, batch: int, wanted: dict[str, Any], tmp_path: Path
) -> None:
    (one,) = cases_of(tmp_path / "any.csv", header, row)
    assert (one.column, one.batch, one.plans) == (column, batch, (wanted,))
    mixed = ",".join(reversed(header.split(",")))
    (again,) = cases_of(tmp_path / "other.csv", mixed, ",".join(reversed(row.split(","))))
    assert again == one


def test_plans_of_a_model_are_rivals_however_they_cut_its_vocabulary(tmp_path: Path) -> None:
    rows = [f"single-node,4,16,2,256,4,4,128,{tensor},{4 // tensor},1,50" for tensor in (1, 2, 4)]
    whole, half, quarter = cases_of(tmp_path / "t.csv", VTRAIN, *rows)
    vocabularies = [one.model.vocab for one in (whole, half, quarter)]
    assert vocabularies == [50257, 2 * (50257 // 2), 4 * (50257 // 4)]
    assert whole.rivals == half.rivals == quarter.rivals
    (other,) = cases_of(tmp_path / "o.csv", VTRAIN, "single-node,4,8,2,256,4,4,128,1,4,1,50")
    assert other.rivals != whole.rivals


@pytest.mark.parametrize(("samples", "fused"), [(1, False), (2, True), (4, True)])
def test_scores_of_few_heads_have_no_fused_softmax(samples: int, fused: bool, tmp_path: Path) -> None:
    """Two heads on each device: Megatron-LM's kernel takes multiples of four, over all samples."""
    (one,) = cases_of(tmp_path / "t.csv", VTRAIN, f"single-node,8,8,{samples},256,16,4,128,8,1,1,50")
    assert isinstance(one.model, GPTSizes)
    assert one.model.fused_softmax == fused


@pytest.mark.parametrize("heads", _ATTENTION)
def test_attention_on_the_b200_of_simumax_takes_what_was_measured(heads: int) -> None:
    """Within a sixth: two figures a curve summarise four measurements."""
    curves, flops = efficiency_of(B200_DEVICE).compute, 4 * 4096**2 * 128 * heads
    peak = B200_DEVICE.peak_flops["bfloat16"]
    for name, times, efficiency in zip(("attention", "attention_backward"), (1, 2.5), _ATTENTION[heads], strict=True):
        measured = times * flops / (efficiency * peak)
        predicted = curves[name].seconds(times * flops / 2, 0, peak, 8e12)  # type: ignore[index]
        assert predicted == pytest.approx(measured, rel=1 / 6)


@pytest.mark.parametrize("devices", [2, 8])
def test_collectives_on_the_b200_of_simumax_take_what_its_authors_fitted(devices: int) -> None:
    """Their formula for an all-gather of 64 MB, with its own constants."""
    nbytes = 64 << 20
    moved = nbytes * (devices - 1) / devices / (0.6735 * 900 * 2**30)
    fitted = moved + (9.1828e-6 * (devices - 1)) + 23.1049e-6
    found = collective_seconds("all_gather", nbytes, Group(devices, 1, NVLINK))
    assert found == pytest.approx(fitted, rel=0.05)


@pytest.mark.parametrize(
    ("devices", "published"), [(2, (53.4, 131.9, 763.6)), (4, (55.7, 179.6, 998.6)), (8, (93.25, 232.4, 1162.0))]
)
def test_all_reduces_of_vtrain_take_what_its_authors_measured(devices: int, published: tuple[float, ...]) -> None:
    """Within a fifth, at 2, 16 and 128 MiB; us."""
    found = [collective_seconds("all_reduce", n << 20, Group(devices, 1, VTRAIN_NVLINK)) * 1e6 for n in (2, 16, 128)]
    assert found == pytest.approx(published, rel=0.2)


def test_other_tables_are_of_no_form(tmp_path: Path) -> None:
    assert read_cases(written(tmp_path / "hardware.csv", "gpu,bf16", "A100,312")) is None


def test_virtual_stages_are_recognised_by_their_layers(tmp_path: Path) -> None:
    (one,) = cases_of(tmp_path / "t.csv", MEGATRON, "76.1,80,10240,60,8,4,1024,1792,2,5,140")
    assert one.plans[0]["chunks"] == 3
    assert one.cluster.nodes == 128


def test_what_no_plan_can_say_is_a_row_without_prediction(tmp_path: Path) -> None:
    long, experts, plain = cases_of(
        tmp_path / "t.csv",
        B200,
        "llama3-70b,12,1,2,2,2,1,4096,4,843.0,66.55,70.88",
        "llama3-70b,12,1,2,4,1,4,4096,4,843.0,66.55,70.88",
        "llama3-70b,12,1,2,4,1,1,4096,4,843.0,66.55,70.88",
    )
    assert (long.not_expressed, experts.not_expressed) == ("context parallelism", "expert parallelism")
    assert plain.not_expressed == ""
    priced = Pricer([long]).price(long)
    assert (priced.plan, priced.why_not) == (None, "a plan cannot say context parallelism")


@pytest.mark.slow
def test_reserved_memory_has_the_gaps_between_tensors() -> None:
    one = case(plans=(degrees(1, 1, 8, 2),))
    priced = [Pricer([each]).price(each) for each in (one, replace(one, reserved=True))]
    assert priced[1].memory == pytest.approx((1 + FRAGMENTATION["cuda"]) * (priced[0].memory or 0.0))


def test_torchtitan_logs_reserved_memory_and_has_two_products_in_swiglu(tmp_path: Path) -> None:
    (one,) = cases_of(tmp_path / "t.csv", TORCHTITAN, "8B,8,8,1,1,1,8192,2,selective,compile,6667,77.0")
    assert one.reserved
    assert isinstance(one.model, LlamaSizes)
    assert one.model.fused
    assert not one.model.one_product


def test_alpas_columns_are_the_best_of_their_sets(tmp_path: Path) -> None:
    every = cases_of(tmp_path / "t.csv", ALPA, "1.3,4,55,58,53,58")
    plans = {one.column: one.plans for one in every}
    assert list(plans) == list(ALPA_PLANS)
    assert {plan["pipeline"] for plan in plans["intra_only"]} == {1}
    assert {(plan["tensor"], plan["pipeline"], plan["data"]) for plan in plans["inter_only"]} == {(1, 4, 1)}
    assert {plan["zero"] for plan in plans["megatron"]} == {0}
    assert all(plan["tensor"] * plan["pipeline"] * plan["data"] == 4 for one in plans.values() for plan in one)
    assert set(map(str, plans["alpa"])) >= {str(plan) for one in plans.values() for plan in one}


# -- prices -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_case_has_the_price_of_the_plan_by_hand() -> None:
    one, other = case(batch=16), case(batch=8, plans=(degrees(micro_batch=2),))
    pricer = Pricer([one, other])
    for mine in (one, other, one):  # what they share changes no price
        tokens = torch.empty(mine.batch, TINY.seq, dtype=torch.int64, device="meta")
        wanted = Plan.by_hand(
            TINY.build(),
            mine.cluster,
            example_args=(tokens, tokens),
            optimizer="adam",
            precision="fp16-mixed",
            launch="eager",
            optimizer_step="fused",
            overlap="none",
            **mine.plans[0],
        )
        assert pricer.price(mine).seconds == wanted.predicted_step_time


@pytest.mark.slow
def test_a_batch_of_one_sample_is_captured_by_itself() -> None:
    one = case(batch=1, plans=(degrees(4, 2, 1),))
    assert Pricer([one, case(batch=16)]).price(one).plan is not None


@pytest.mark.slow
def test_of_several_plans_the_fastest_that_fits_counts() -> None:
    plans = [degrees(1, 1, 8, 2), degrees(8 // 4, 4, 1, 1), degrees(2, 2, 2, 4)]
    one = case(plans=tuple(plans))
    pricer = Pricer([one])
    alone = {i: pricer.price(case(plans=(plan,))).seconds for i, plan in enumerate(plans)}
    best = pricer.price(one)
    assert best.seconds == min(seconds for seconds in alone.values() if seconds is not None)
    assert best.candidates == 3


def test_where_no_plan_fits_there_is_no_prediction() -> None:
    # 39 billion parameters have 624 GB of states, eight V100 have 128 GB.
    large = GPTSizes(48, 8192, 64, 1024, 51200)
    one = case(large, plans=(degrees(), degrees(4, 2, 1)), cluster=Cluster.preset("8xV100"))
    assert least_memory(one, degrees(4, 2, 1)) > 16e9
    priced = Pricer([one]).price(one)
    assert (priced.plan, priced.seconds, priced.why_not) == (None, None, "no plan fits the memory")


# -- errors -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=12))
def test_tau_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    expected = stats.kendalltau(a, b).statistic
    found = kendall_tau(a, b)
    assert (found is None and math.isnan(expected)) or found == pytest.approx(expected)


def test_errors_are_fractions_of_what_was_published() -> None:
    errors = Errors.of([11.0, 18.0, 30.0], [10.0, 20.0, 30.0])
    assert (errors.mean, errors.median) == (pytest.approx(0.2 / 3), pytest.approx(0.1))
    assert (errors.signed, errors.tau) == (pytest.approx(0.0), pytest.approx(1.0))
    assert errors.p95 == pytest.approx(0.1)
    assert Errors.of([], []) == Errors(None, None, None, None, None)


def test_a_run_without_prediction_is_never_chosen_but_may_have_been_the_best() -> None:
    assert regrets(["a", "a"], [None, 2.0], [1.0, 1.5]) == [pytest.approx(0.5)]
    assert regrets(["a", "a", "b", "b"], [None, None, 1.0, 2.0], [1.0, 1.5, 1.0, 2.0]) == [0.0]


def test_regret_is_what_following_the_prediction_costs() -> None:
    groups, predicted, measured = ["a", "a", "a", "b", "c", "c"], [3.0, 2.0, 4.0, 1.0, 1.0, 2.0], [1.0, 1.5, 9, 1, 2, 3]
    assert regrets(groups, predicted, measured) == [pytest.approx(0.5), 0.0]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_the_errors_of_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slower = "single-node,8,16,1,256,4,4,128,2,2,2,60"
    written(tmp_path / "runs.csv", VTRAIN, VTRAIN_ROW, slower)
    written(tmp_path / "memory.csv", B200, "llama3-70b,2,8,1,1,1,1,256,4,20,9,9", "llama3-70b,2,4,1,1,2,1,256,4,20,9,9")
    written(tmp_path / "hardware.csv", "gpu,bf16", "A100,312")
    out = tmp_path / "out.json"
    arguments = ["published", "--tables", str(tmp_path), "--json", str(out), "--results", str(tmp_path / "results")]
    assert main(arguments) == 0
    assert "hardware.csv: skipped" in capsys.readouterr().err
    data = json.loads(out.read_text())
    assert set(data) == {"runs", "memory"}
    runs = data["runs"]
    assert set(runs) == KEYS
    predicted, known = ([row[name] for row in runs["rows"]] for name in ("predicted", "published"))
    errors = [a / b - 1 for a, b in zip(predicted, known, strict=True)]
    assert runs["mean_abs_error"] == pytest.approx(np.mean(np.abs(errors)))
    assert runs["signed_mean_error"] == pytest.approx(np.mean(errors))
    assert runs["regret_mean"] in (0.0, pytest.approx(0.2))
    assert runs["without_prediction"] == []
    memory = data["memory"]
    assert set(memory) == KEYS | {"memory_mean_abs_error", "memory_worst_under"}
    assert len(memory["without_prediction"]) == 1
    assert memory["rows"][1]["why_not"] == "a plan cannot say context parallelism"
    under = max(0.0, 1 - memory["rows"][0]["memory_bytes"] / (9 * 2**30))
    assert memory["memory_worst_under"] == pytest.approx(under)
    page = (tmp_path / "results" / "published.md").read_text()
    assert "All tables" in page
    assert "runs, iteration_ms" in page


@pytest.mark.slow
def test_figures_of_several_columns_have_errors_of_their_own(tmp_path: Path) -> None:
    written(tmp_path / "t.csv", "params_b,gpus,megatron,intra_only", "0.355,1,47,46", "39,8,50,")
    report = published.run_published(tmp_path, quick=False)
    assert report is not None
    data = report.data["t"]
    assert set(data["mean_abs_errors"]) == {"megatron", "intra_only"}
    assert data["mean_abs_errors"]["megatron"] == data["mean_abs_error"]
    assert data["without_prediction"] == ["39B on 8, megatron"]


@pytest.mark.slow
def test_models_shared_out_over_processes_have_the_prices_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "get_context", lambda _: forked.context())
    rows = [VTRAIN_ROW, VTRAIN_ROW.replace(",256,4,4,", ",128,4,4,"), VTRAIN_ROW.replace(",8,16,2,", ",8,32,2,")]
    cases = cases_of(tmp_path / "t.csv", VTRAIN, *rows)
    alone, shared = (published.evaluate("t", cases, processes=n) for n in (1, 2))
    assert len({one.model for one in cases}) == 2
    assert [o.case for o in shared] == cases
    assert [o.priced for o in shared] == [o.priced for o in alone]
    assert all(o.seconds is not None for o in alone)


def test_without_tables_the_command_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["published"]) == 0
    assert main(["published", "--tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("skipped: ") == 2
