"""Plans by hand that are refused: all that is wrong is said at once, and what a refusal proposes is accepted."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hand_plans import Language, by_hand
from torch import nn

from autopar import Cluster, InputError, Plan, PlanError
from autopar.analysis.example import Example, example_ahead
from autopar.options import PlanOptions
from autopar.planner.hand_plan.by_hand import plan_by_hand
from autopar.planner.hand_plan.degrees import Limits, read_degrees
from autopar.planner.hand_plan.shared_work import SharedWork
from autopar.schedule.builders import SCHEDULES


@pytest.mark.parametrize(
    ("degrees", "texts"),
    [
        (
            {"tensor": 3, "pipeline": 2, "zero": 5, "recompute": "some", "chunks": 2, "schedule": "1f1b"},
            [
                "zero must be one of 0, 1, 2, 3, got 5",
                "recompute must be one of none, selective, full, selective-op, stage, got 'some'",
                "tensor=3 x pipeline=2 x data=1 are 6 devices, not 8",
                "chunks=2 needs schedule='interleaved-1f1b' or 'interleaved-zb' or 'zb-v', got '1f1b'",
            ],
        ),
        (
            {"pipeline": 5, "data": 2, "micro_batch": 3, "tensor": 0},
            [
                "tensor must be a whole number of at least 1, got 0",
                "are 10 devices, not 8",
                "6 samples at a time, but the batch of 8 samples is no multiple of 6\n",
                "makes 5 stages, but the model has 4 layers: some stages would have none; at most 4 stages can be\n",
                "\n  tensor=1, pipeline=4, micro_batch=2 would be right",
            ],
        ),
        (
            {"zero": 1.0, "recompute": ["full"], "schedule": {}},
            ["zero must be one of 0, 1, 2, 3, got 1.0", "selective-op, stage, got ['full']", "zb-v, got {}"],
        ),
        ({"zero": 1, "pipeline": 4, "tensor": 2}, ["zero=1 cuts what replicas hold, and data=1 has no replicas"]),
        ({"sequence_parallel": True}, ["sequence_parallel=True", "tensor=1 has one: it needs tensor=2 or more"]),
        (
            {"tensor": 6, "data": 3, "recompute": "some", "launch": "slow", "precision": "fp7", "overlap": "most"},
            [
                "launch must be one of eager, compiled",
                "precision must be one of fp32",
                "overlap cannot be used",
                "recompute must be one of none",
                "are 18 devices, not 8\n",
                "but the batch of 8 samples is no multiple of 3\n",
                "'blocks.0.attention/scaled_dot_product_attention#0', 'blocks.1.attention/",
                "and 1 more of 4 heads cannot be shared evenly by tensor=6 devices\n",
                "'blocks.0.attention.query.weight', 'blocks.0.attention.key.weight', 'blocks.0.attention.value.weight' "
                "and 13 more of shape (16, 16) cannot be cut over tensor=6: no size is a multiple of it\n",
                "\n  tensor=4, data=2, recompute='none' would be right",
            ],
        ),
        (
            {"tensor": 8, "data": 1, "precision": "bf16-mixed", "zero": 1},
            ["precision='bf16-mixed' is for parameters in torch.bfloat16", "zero=1 cuts", "of 4 heads"],
        ),
        (
            {"overlap": ["sends"], "zero": 4},
            ["zero must be one of 0, 1, 2, 3, got 4", "overlap cannot be used: it is none, all", "got ['sends']"],
        ),
        ({"tensor": 8}, ["blocks.0.attention/scaled_dot_product_attention#0'", "\n  tensor=4 would be right"]),
    ],
)
def test_everything_that_contradicts_is_said_at_once(degrees: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(Cluster.preset("8xH100"), **degrees)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["2", 0, 1.5, True])
def test_a_wrong_number_of_replicas_is_all_that_is_wrong(data: Any) -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(Cluster.preset("8xH100"), tensor=2, data=data)
    assert str(caught.value).endswith(f"\n  data must be a whole number of at least 1, got {data!r}")


@pytest.mark.slow
def test_replicas_that_nobody_asked_for_are_not_what_should_change() -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(Cluster.preset("8xH100", 3), tensor=2, pipeline=4)
    assert "tensor=2 x pipeline=4 leave data=3 replicas of 24 devices" in str(caught.value)
    assert "the batch of 8 samples is no multiple of 3\n  pipeline=3 would be right" in str(caught.value)


USUAL: dict[str, Any] = {
    "tensor": 1,
    "pipeline": 1,
    "data": None,
    "micro_batch": None,
    "schedule": None,
    "chunks": 1,
    "zero": 0,
    "recompute": "none",
    "sequence_parallel": False,
}
asked_degrees = st.fixed_dictionaries(
    {"zero": st.integers(0, 4), "sequence_parallel": st.booleans()},
    optional={name: st.integers(0, 8) for name in ("tensor", "pipeline", "data", "micro_batch")}
    | {"chunks": st.integers(0, 4), "schedule": st.sampled_from([*SCHEDULES, "fast"])},
)


def proposals(refusal: str) -> list[dict[str, Any]]:
    """The degrees that each line proposes."""
    values = r"\w+=(?:\d+|'[\w-]+'|True|False)"
    found = re.findall(rf"(?:give |or |; |^ *)({values}(?:, {values})*)(?: would be right)?$", refusal, re.MULTILINE)
    return [{n: ast.literal_eval(v) for n, v in (one.split("=") for one in text.split(", "))} for text in found]


@given(
    limits=st.builds(
        Limits,
        n_devices=st.integers(1, 24),
        batch=st.integers(1, 24),
        obstacle=st.sampled_from(["", "", "samples are mixed"]),
        least=st.integers(1, 2),
        n_layers=st.integers(0, 8),
        refused=st.sampled_from([1, 4, 6, 0]).map(
            lambda size: lambda degrees: [] if size and size % degrees.tensor == 0 else ["tensor divides no size"]
        ),
    ),
    asked=asked_degrees,
)
def test_degrees_that_a_refusal_proposes_are_right_with_the_others(limits: Limits, asked: dict[str, Any]) -> None:
    degrees, problems = read_degrees(limits, **(USUAL | asked))
    proposed = proposals("\n".join(problems))
    if proposed:
        (changes,) = proposed
        degrees, problems = read_degrees(limits, **(USUAL | asked | changes))
        assert problems == []
        assert list(limits.refused(degrees)) == []
    elif problems and "no degrees fit the model" in problems[-1]:
        every = range(1, limits.n_devices + 1), range(1, limits.n_devices + 1), range(1, limits.batch + 1)
        for tensor, pipeline, micro_batch in itertools.product(*every):
            if limits.n_devices % (tensor * pipeline) == 0 and limits.batch % micro_batch == 0:
                other = {"tensor": tensor, "pipeline": pipeline, "micro_batch": micro_batch}
                assert read_degrees(limits, **(USUAL | other))[1]
    else:
        assert all(re.search(r" must be .*, got ", problem) for problem in problems)


@functools.cache
def four_layers(batch: int) -> tuple[Example, SharedWork]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    example = example_ahead(model, (torch.zeros(batch, 16),), {})
    return example, SharedWork(example, PlanOptions(optimizer="adam"))


def refusal_of(n_devices: int, batch: int, asked: dict[str, Any]) -> str:
    """What is wrong with a plan by hand for four layers of 16 x 16; empty for a plan."""
    example, shared = four_layers(batch)
    cluster = Cluster.preset(f"{n_devices}xH100")
    try:
        plan_by_hand(example, cluster, PlanOptions(optimizer="adam"), USUAL | asked, shared=shared)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(n_devices=st.integers(1, 8), batch=st.integers(1, 9), asked=asked_degrees)
@example_of(n_devices=4, batch=7, asked={"tensor": 3})
@example_of(n_devices=6, batch=8, asked={"tensor": 6})
@example_of(n_devices=5, batch=8, asked={"tensor": 5})
@example_of(n_devices=6, batch=8, asked={"tensor": 3, "pipeline": 2, "zero": 3})
def test_a_refusal_proposes_once_and_the_model_accepts_it(n_devices: int, batch: int, asked: dict[str, Any]) -> None:
    proposed = proposals(refusal_of(n_devices, batch, asked))
    assert len(proposed) <= 1
    for changes in proposed:
        assert refusal_of(n_devices, batch, asked | changes) == ""


def test_weights_that_a_degree_does_not_divide_share_a_line() -> None:
    weights = "'0.weight', '1.weight', '2.weight' and 1 more of shape (16, 16)"
    assert refusal_of(6, 8, {"tensor": 3, "pipeline": 2}).splitlines()[1:] == [
        f"  {weights} cannot be cut over tensor=3: no size is a multiple of it",
        "  tensor=2, pipeline=3 would be right",
    ]


@pytest.mark.slow
def test_weights_of_all_equal_layers_are_counted() -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(Cluster.preset("8xH100"), Language(layers=9), tensor=8)
    heads = "blocks.{}.attention/scaled_dot_product_attention#0"
    assert f"{', '.join(repr(heads.format(i)) for i in range(3))} and 6 more of 4 heads" in str(caught.value)


def test_a_refusal_says_where_no_degrees_fit() -> None:
    """5 devices cut neither 16 columns nor 8 samples nor 4 layers."""
    refusal = refusal_of(5, 8, {"tensor": 5})
    assert refusal.endswith("\n  no degrees fit the model, 5 devices and the batch of 8 samples")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({"data": 1}, {"pipeline": 3, "data": 2}),
        ({"data": 6}, {"pipeline": 3, "data": 2}),
        ({"tensor": 2, "data": 1}, {"pipeline": 3}),
        ({"pipeline": 4}, {"pipeline": 3}),
    ],
)
def test_what_a_refusal_proposes_is_accepted(asked: dict[str, int], changes: dict[str, int]) -> None:
    """8 samples and 4 layers, of sizes that 4 divides, on 6 devices."""
    cluster = Cluster.preset("6xH100")
    with pytest.raises(PlanError, match=", ".join(f"{name}={n}" for name, n in changes.items()) + " would be right$"):
        by_hand(cluster, **asked)
    assert by_hand(cluster, **(asked | changes)).devices == tuple(device.name for device in cluster.devices)


def test_a_batch_that_cannot_be_split_is_said_before_sizes_of_its_parts() -> None:
    class Mixing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))

    model, cluster = Mixing(nn.Linear(8, 8), nn.Linear(8, 8)), Cluster.preset("2xH100")
    call: dict[str, Any] = {"example_args": (torch.randn(8, 8),)}
    with pytest.raises(PlanError, match=r"the batch cannot be split, [^\n]*\n  micro_batch=8 would be right$"):
        Plan.by_hand(model, cluster, tensor=2, micro_batch=5, **call)
    with pytest.raises(PlanError, match=r"the batch cannot be split, [^\n]*\n  pipeline=2, data=1 would be right$"):
        Plan.by_hand(model, cluster, data=2, micro_batch=8, **call)
    assert Plan.by_hand(model, cluster, pipeline=2, data=1, micro_batch=8, **call).n_microbatches == 1


def test_a_model_without_layers_has_nothing_to_divide() -> None:
    with pytest.raises(PlanError, match=r"pipeline=1 makes 1 stage, but the model has 0 layers: .*nothing to divide"):
        Plan.by_hand(nn.Identity(), Cluster.preset("8xH100"), example_args=(torch.zeros(8, 4),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "changes"),
    [(3, {"tensor": 1, "pipeline": 3}), (6, {"tensor": 2, "pipeline": 3}), (12, {"tensor": 4, "pipeline": 3})],
)
def test_a_proposed_tensor_degree_divides_the_devices_too(devices: int, changes: dict[str, int]) -> None:
    """All matrices and the 4 heads have sizes that 4 divides, and 3 does not divide the 8 samples."""
    cluster = Cluster.preset(f"{devices}xH100")
    with pytest.raises(PlanError) as caught:
        by_hand(cluster, tensor=devices)
    assert "of 4 heads cannot be shared evenly" in str(caught.value)
    assert proposals(str(caught.value)) == [changes]
    assert by_hand(cluster, **changes).devices == tuple(device.name for device in cluster.devices)


@pytest.mark.slow
def test_what_is_wrong_with_a_step_alone_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"^launch must be one of .*, got 'slow'$"):
        by_hand(Cluster.preset("2xH100"), tensor=2, launch="slow")
    with pytest.raises(InputError, match=r"^precision='bf16' is for parameters in"):
        by_hand(Cluster.preset("2xH100"), tensor=2, precision="bf16")


@pytest.mark.slow
def test_mixed_stages_are_said_beside_other_contradictions() -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(Cluster.preset("2xH100+2xT4"), tensor=4, zero=1)
    assert "stage 0 would have devices of several types, H100, T4" in str(caught.value)
    assert "zero=1 cuts what replicas hold" in str(caught.value)
    (changes,) = proposals(str(caught.value))
    assert len(by_hand(Cluster.preset("2xH100+2xT4"), **({"tensor": 4, "zero": 1} | changes)).devices) == 4


def test_batch_norm_needs_samples_enough_in_a_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with pytest.raises(PlanError, match=r"batch norm needs 2 .*\n  micro_batch=2 would be right$"):
        Plan.by_hand(model, Cluster.preset("2xH100"), example_args=(torch.randn(4, 4),), pipeline=2, micro_batch=1)


def test_the_samples_proposed_for_a_batch_norm_divide_the_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    call: dict[str, Any] = {"example_args": (torch.randn(9, 4),), "pipeline": 2}
    with pytest.raises(PlanError, match=r"micro_batch=1 is 1 sample at a time, .*\n  micro_batch=3 would be right$"):
        Plan.by_hand(model, Cluster.preset("2xH100"), micro_batch=1, **call)
    assert Plan.by_hand(model, Cluster.preset("2xH100"), micro_batch=3, **call).n_microbatches == 3


def test_a_model_that_mixes_samples_is_not_split_over_replicas() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.b(y - y.mean(0))

    with pytest.raises(PlanError, match=r"the batch cannot be split.*\n  pipeline=2, data=1 would be right$"):
        Plan.by_hand(Centred(), Cluster.preset("2xH100"), example_args=(torch.randn(8, 8),), data=2)
    plan = Plan.by_hand(Centred(), Cluster.preset("2xH100"), example_args=(torch.randn(8, 8),), pipeline=2)
    assert plan.n_microbatches == 1


@pytest.mark.slow
def test_a_stage_on_devices_of_several_types_is_refused() -> None:
    cluster = Cluster.preset("2xH100+2xT4")
    with pytest.raises(PlanError, match="stage 0 would have devices of several types, H100, T4"):
        by_hand(cluster, tensor=4)
    plan = by_hand(cluster, tensor=2, pipeline=2)
    assert [{d.partition(":")[2] for d in stage.devices} for stage in plan.stages] == [{"H100"}, {"T4"}]


class Routed(nn.Module):
    """Each expert gets the samples that choose it: how many shows only in values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            result = result.index_add(0, rows, weight[rows, None] * expert(x[rows]))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu", "cpu"], Cluster.preset("2xH100")])
def test_a_model_whose_sizes_depend_on_values_is_refused_in_words(devices: Any) -> None:
    with pytest.raises(InputError, match="it has no result without values"):
        Plan.by_hand(Routed(), devices, example_args=(torch.randn(8, 8),), data=2)
