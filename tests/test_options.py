"""One definition of the options: every call takes them from it and refuses what it does not know."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import autopar
from autopar import Cluster, InputError, Plan
from autopar.options import AHEAD_ONLY, HELP, CompareKeywords, PlanKeywords, PlanOptions

FOR_CLUSTERS = AHEAD_ONLY
FIELDS = {field.name: field for field in dataclasses.fields(PlanOptions)}
CALL: dict[str, Any] = {"example_args": (torch.ones(4, 8),)}


def test_the_keywords_of_every_call_are_the_options() -> None:
    hints = get_type_hints(PlanOptions)
    assert get_type_hints(PlanKeywords) == hints
    assert get_type_hints(CompareKeywords).items() <= hints.items()
    assert HELP.keys() <= FIELDS.keys()
    parameters = inspect.signature(autopar.parallelize).parameters
    explicit = {name: parameters[name].default for name in FIELDS if name in parameters}
    assert explicit == {name: field.default for name, field in FIELDS.items() if name not in FOR_CLUSTERS}


def test_every_option_of_parallelize_is_documented() -> None:
    text = autopar.parallelize.__doc__ or ""
    assert [name for name in FIELDS if name not in FOR_CLUSTERS and name not in text] == []


def test_every_option_for_clusters_is_documented_and_refused_for_devices_at_hand() -> None:
    text = autopar.plan.__doc__ or ""
    assert [name for name in FOR_CLUSTERS if name not in text] == []
    values: dict[str, Any] = {"launch": "eager", "precision": "fp32", "optimizer_step": "foreach"}
    values["overlap"] = "all"
    for name in FOR_CLUSTERS:
        with pytest.raises(InputError, match=name):
            autopar.plan(nn.Linear(8, 8), ["cpu"], **CALL, **{name: values[name]})
    for name in AHEAD_ONLY:
        with pytest.raises(InputError, match=f"{name}: only for a cluster that is not at hand"):
            autopar.compare(nn.Linear(8, 8), ["cpu"], **CALL, **{name: values[name]})


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(InputError) as raised:
        PlanOptions(
            n_microbatches=0,
            schedule="zigzag",
            max_shards=True,
            launch="by hand",
            precision="bf8",
            optimizer_step="slow",  # type: ignore[arg-type]
            memory_limit="8 apples",
            optimizer="lion",
            compile=1,  # type: ignore[arg-type]
            tune=-1,
            candidates={"mine": "plan.json"},  # type: ignore[dict-item]
        )
    named = [problem.split()[0] for problem in str(raised.value).split("; ")]
    assert named == [
        *(
            "n_microbatches",
            "max_shards",
            "schedule",
            "launch",
            "precision",
            "optimizer_step",
            "optimizer",
            "memory_limit",
            "compile",
            "tune",
        ),
        "candidates['mine']",
    ]


@pytest.mark.parametrize(
    ("call", "keywords", "message"),
    [
        (autopar.plan, {"n_microbatch": 2}, "plan has no option 'n_microbatch'; did you mean 'n_microbatches'?"),
        (autopar.plan, {"max_stages": 2, "optimiser": "sgd"}, "'max_stages'.*; plan has no option 'optimiser'"),
        (autopar.compare, {"tune": 2}, "compare has no option 'tune'; its options are example_args, .*max_shards"),
        (
            autopar.plan,
            {"example_arg": ()},
            r"plan has no option 'example_arg'; did you mean 'example_args'\? Its options",
        ),
        (Plan.by_hand, {"tensr": 8}, r"by_hand has no option 'tensr'; did you mean 'tensor'\? Its options are .*zero"),
        (autopar.parallelize, {"max_shrads": 2}, "parallelize has no option 'max_shrads'; did you mean 'max_shards'?"),
        (autopar.profile, {"optimiser": "sgd"}, "profile has no option 'optimiser'; did you mean 'optimizer'?"),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest_known_one(
    call: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(nn.Linear(8, 8), ["cpu"], **CALL, **keywords)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: p.with_(nmicro=5), "with_ has no option 'nmicro'; did you mean 'n_microbatches'? Its options are "),
        (lambda p: p.with_(5), "with_: too many positional arguments"),
        (lambda p: p.move("a"), "move: missing a required argument: 'stage'"),
        (
            lambda p: p.trace("t.json", rnk=0),
            "trace has no option 'rnk'; did you mean 'rank'? Its options are path, rank",
        ),
        (
            lambda p: Plan.from_split({"a": 0}, nmicrobatches=1),
            "from_split has no option 'nmicrobatches'; did you mean",
        ),
        (lambda p: Plan.by_hand(), "by_hand: missing a required argument: 'model'"),
        (lambda p: autopar.pipeline_stage(nn.Linear(1, 1), stge=1), "pipeline_stage has no option 'stge'; did you"),
        (lambda p: autopar.accuracy(knd="H200"), "accuracy has no option 'knd'; did you mean 'kind'?"),
    ],
)
def test_arguments_that_a_call_does_not_have_are_refused_without_names_of_inner_classes(
    wrong: Any, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        wrong(Plan.from_split({"a": 0, "b": 1}, n_microbatches=2))
    assert "Plan" not in str(error.value), "no class that the user never sees"


@pytest.mark.parametrize("name", ["strict", "calibrate", "verify", "watch_nan", "cache"])
def test_a_text_is_neither_true_nor_false(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} must be True or False, got 'no'"):
        PlanOptions(**{name: "no"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["schedule", "launch", "precision", "optimizer_step", "batch_norm"])
def test_a_list_is_none_of_the_choices(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} must be one of .*, got \['x'\]"):
        PlanOptions(**{name: ["x"]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "keywords", "message"),
    [
        (autopar.parallelize, {"plan": "plan.json"}, r"plan must be a Plan, got str; Plan.load\(path\) reads a file"),
        (autopar.plan, {"plan": {"stages": []}}, "plan must be a Plan, got dict"),
        (
            autopar.compare,
            {"plans": {"mine": "plan.json"}},
            r"plans: 'mine' must be a Plan, or None for a search, got str \(Plan.load",
        ),
        (autopar.compare, {"plans": ["plan.json"]}, "plans must be a dict of names and plans, got list"),
    ],
)
def test_what_is_no_plan_is_refused(call: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(nn.Linear(8, 8), ["cpu"], **CALL, **keywords)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], Cluster.preset("2xH100")])
def test_options_replace_the_decisions_of_a_plan_that_is_priced(devices: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = Plan.from_split({"0": 0, "1": 1}, n_microbatches=4)
    found = autopar.plan(model, devices, **CALL, plan=plan, n_microbatches=2, schedule="gpipe")
    assert (found.n_microbatches, found.schedule) == (2, "gpipe")
    assert found.predicted_step_time is not None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GB", 8e9), ("8 GB", 8e9), ("8gib", 8 * 2**30), ("500MB", 5e8), ("1.5TB", 1.5e12), ("8e9", 8e9), ("64", 64)],
)
def test_an_amount_of_memory_may_be_a_text(text: str, nbytes: float) -> None:
    assert PlanOptions(memory_limit=text).memory_bytes == nbytes


@pytest.mark.parametrize(
    "nonsense", ["8 apples", "", "GB", "8G", "-8GB", "0GB", "1e400", "nan", "8GBs", True, -1, 0, [8]]
)
def test_any_other_amount_of_memory_is_refused(nonsense: Any) -> None:
    with pytest.raises(InputError, match="memory_limit"):
        PlanOptions(memory_limit=nonsense)


@pytest.mark.slow
def test_every_call_takes_an_amount_of_memory_as_text_and_an_optimizer_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    adam = torch.optim.Adam(model.parameters(), amsgrad=True)
    refused = pytest.raises(autopar.InfeasibleError, match="no plan fits")
    for call in (autopar.parallelize, autopar.plan):
        call(model, ["cpu"], **CALL, memory_limit="1GB", optimizer=adam)
        with refused:
            call(model, ["cpu"], **CALL, memory_limit="1kB", optimizer=adam)
    with refused:
        autopar.compare(model, ["cpu"], **CALL, memory_limit="1kB")
    with refused:
        autopar.plan(model, autopar.Cluster.preset("2xH100"), **CALL, memory_limit="1kB", optimizer=adam)
    profile = autopar.profile(model, ["cpu"], **CALL, optimizer=adam)
    assert profile.memory is not None
    parameters = sum(p.nbytes for p in model.parameters())
    assert profile.memory.step.optimizer >= 3 * parameters


def test_options_do_not_keep_the_optimizer_and_its_parameters() -> None:
    assert PlanOptions(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)).optimizer == "sgd"


def test_an_amount_of_memory_that_no_number_holds_is_not_said_to_be_below_0() -> None:
    with pytest.raises(InputError, match=r"give an amount that a device may have, .* got '1e400GB'$"):
        PlanOptions(memory_limit="1e400GB")


@pytest.mark.parametrize("wrong", ["x", "inducter", "", 1])
def test_a_backend_that_torch_lacks_is_refused_with_those_that_it_has(wrong: Any) -> None:
    for devices in (["cpu"], Cluster.preset("2xH100")):
        with pytest.raises(InputError, match=rf"backend of torch \(.*inductor.*\), got {wrong!r}$"):
            autopar.plan(nn.Linear(8, 8), devices, compile=wrong, **CALL)
    assert PlanOptions(compile="aot_eager").compile == "aot_eager"  # one for debugging, which torch does not list


@pytest.mark.parametrize(
    ("compile", "launch", "meant"),
    [(True, "cuda-graphs", "compiled"), ("inductor", "eager", "compiled"), ("graphs", "compiled", "cuda-graphs")],
)
def test_launches_and_compiled_stages_that_contradict_each_other_are_refused(
    compile: Any, launch: str, meant: str
) -> None:
    said = f"^compile={compile!r} says launch='{meant}', but launch='{launch}' is given; leave one of them out$"
    with pytest.raises(InputError, match=said):
        PlanOptions(compile=compile, launch=launch)
    assert PlanOptions(compile=compile, launch=meant).launches == PlanOptions(compile=compile).launches == meant
    assert PlanOptions(launch=launch).launches == launch


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [({"input": [9]}, "dimension 9 of input 'input', which has 2 dimensions"), ({"x": 0}, "names input 'x', but")],
)
def test_sizes_that_a_call_lacks_are_refused_wherever_it_is_planned(dynamic: Any, said: str) -> None:
    one = Plan.from_split({"": 0}, n_microbatches=1)
    for devices, plan in ((["cpu"], None), (["cpu"], one), (Cluster.preset("2xH100"), None)):
        with pytest.raises(InputError, match=said):
            autopar.plan(nn.Linear(8, 8), devices, dynamic=dynamic, plan=plan, tune="auto", **CALL)


@pytest.mark.parametrize("wrong", ["x", [0], 1.5, True, {"input": "0"}, {"input": 1.5}, {"input": False}, {0: 0}])
def test_a_batch_dimension_is_a_number_or_numbers_by_name(wrong: Any) -> None:
    with pytest.raises(InputError, match=f"^batch_dim must be .*, got {re.escape(repr(wrong))}$"):
        autopar.parallelize(nn.Linear(8, 8), ["cpu"], batch_dim=wrong)
