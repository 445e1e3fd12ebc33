"""Planning and comparing leave nothing behind. (Without shared exports, which keep what they captured.)"""

from __future__ import annotations

import gc
from collections.abc import Set

import pytest
from models import gpt2, tokens
from torch import nn

import autopar


def _copies(model: nn.Module, before: Set[int] = frozenset()) -> set[int]:
    """Ids of parameters that live, are none of the model's, and did not live `before`."""
    gc.collect()
    own = {id(p) for p in model.parameters()} | before
    return {id(o) for o in gc.get_objects() if type(o) is nn.Parameter} - own


@pytest.mark.slow
def test_planning_and_comparing_leave_no_copy_of_the_model_behind() -> None:
    model, inputs = gpt2().train(), {"input_ids": tokens(4), "use_cache": False}
    before = _copies(model)
    plan = autopar.plan(model, ["cpu", "cpu"], example_kwargs=inputs, max_replicas=1, schedule="gpipe", cache=False)
    assert not _copies(model, before)
    autopar.compare(model, ["cpu", "cpu"], {"hand": plan}, example_kwargs=inputs, repeats=1, cache=False)
    assert not _copies(model, before)
    autopar.plan(model, autopar.Cluster.preset("2xH100"), example_kwargs=inputs)
    assert not _copies(model, before)
