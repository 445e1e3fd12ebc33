"""One definition of the options: every call takes them from it and refuses what it does not know."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import autopar
from autopar import InputError
from autopar.options import HELP, CompareKeywords, PlanKeywords, PlanOptions

FIELDS = {field.name: field for field in dataclasses.fields(PlanOptions)}
CALL: dict[str, Any] = {"example_args": (torch.ones(4, 8),)}


def test_the_keywords_of_every_call_are_the_options() -> None:
    hints = get_type_hints(PlanOptions)
    assert get_type_hints(PlanKeywords) == hints
    assert get_type_hints(CompareKeywords).items() <= hints.items()
    assert HELP.keys() <= FIELDS.keys()
    parameters = inspect.signature(autopar.parallelize).parameters
    explicit = {name: parameters[name].default for name in FIELDS if name in parameters}
    assert explicit == {name: field.default for name, field in FIELDS.items() if name != "max_shards"}


def test_every_option_of_parallelize_is_documented() -> None:
    text = autopar.parallelize.__doc__ or ""
    assert [name for name in FIELDS if name != "max_shards" and name not in text] == []


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(InputError) as raised:
        PlanOptions(
            n_microbatches=0,
            schedule="zigzag",
            max_shards=True,
            memory_limit="8e9",  # type: ignore[arg-type]
            optimizer="lion",
            compile=1,  # type: ignore[arg-type]
            tune=-1,
            candidates={"mine": "plan.json"},  # type: ignore[dict-item]
        )
    named = [problem.split()[0] for problem in str(raised.value).split("; ")]
    assert named == [
        *("n_microbatches", "max_shards", "schedule", "optimizer", "memory_limit", "compile", "tune"),
        "candidates['mine']",
    ]


@pytest.mark.parametrize(
    ("call", "keywords", "message"),
    [
        (autopar.plan, {"n_microbatch": 2}, "plan has no option 'n_microbatch'; did you mean n_microbatches?"),
        (autopar.plan, {"max_stages": 2, "optimiser": "sgd"}, "'max_stages'.*; plan has no option 'optimiser'"),
        (autopar.compare, {"tune": 2}, "compare has no option 'tune'; its options are n_microbatches, schedule"),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest_known_one(
    call: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(nn.Linear(8, 8), ["cpu"], **CALL, **keywords)
