"""Training memory: optimizers as torch.optim allocates, ZeRO as its paper says, peaks as a walk through a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cost_models.memory.optimizer_state import optimizer_state_elements
from cost_models.memory.training_memory import (
    FRAGMENTATION,
    FULL,
    HALF,
    MIXED,
    MIXED_FULL_GRADIENTS,
    WORKSPACE,
    Precision,
    bytes_per_element,
    precision_named,
    training_memory,
    usable_memory,
)

MAKERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}
SHAPES = [(7, 5), (5,), (2, 3, 4, 5), (), (1, 6)]
GB = 10**9


@pytest.mark.parametrize("optimizer", sorted(MAKERS))
@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, FULL), (torch.bfloat16, HALF)])
def test_states_are_what_torch_allocates(optimizer: str, dtype: torch.dtype, precision: Precision) -> None:
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    steps = MAKERS[optimizer](parameters)
    sum(p.square().sum() for p in parameters).backward()  # type: ignore[union-attr]
    steps.step()
    counted = training_memory(SHAPES, optimizer=optimizer, precision=precision)
    assert counted.parameters == sum(p.nbytes for p in parameters)
    assert counted.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    state = [value for kept in steps.state.values() for name, value in kept.items() if name != "step"]
    assert counted.optimizer == sum(tensor.nbytes for tensor in state if tensor is not None)


def test_an_unknown_optimizer_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lion'.*none, sgd, momentum, adam, adamw, .*adafactor"):
        optimizer_state_elements("lion", (2, 3))


@pytest.mark.parametrize(("stage", "published"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_needs_what_its_paper_says(stage: int, published: float) -> None:
    """Figure 1 of Rajbhandari et al. 2020: 7.5 billion parameters, Adam, mixed precision, 64 replicas."""
    counted = training_memory([(7_500_000_000,)], precision=MIXED, zero=stage, replicas=64)
    assert counted.total / GB == pytest.approx(published, abs=0.05)


shapes = st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5)


@given(
    shapes, st.sampled_from([*MAKERS, "none"]), st.sampled_from([FULL, MIXED, MIXED_FULL_GRADIENTS]), st.integers(1, 9)
)
def test_stage_three_shares_everything_and_every_stage_is_between(
    shapes: list[list[int]], optimizer: str, precision: Precision, replicas: int
) -> None:
    stages: list[Any] = [
        training_memory(shapes, optimizer=optimizer, precision=precision, zero=stage, replicas=replicas)
        for stage in range(4)
    ]
    totals = [stage.total for stage in stages]
    assert totals == sorted(totals, reverse=True)
    assert 0 <= totals[3] * replicas - totals[0] < 3 * replicas  # each of three parts is rounded up


def test_the_whole_is_the_sum_of_its_parts_and_the_reserve() -> None:
    counted = training_memory([(1000,)], activations=300, buffers=20, transient=7, device_type="cuda")
    parts = 4000 + 4000 + 8000 + 300 + 20 + 7
    assert parts * (1 + FRAGMENTATION["cuda"]) <= counted.total <= parts * (1 + FRAGMENTATION["cuda"]) + 1
    assert training_memory([(1000,)], activations=300).reserve == 0


@pytest.mark.parametrize(
    "wrong", [{"zero": 4}, {"zero": -1}, {"replicas": 0}, {"device_type": "abacus"}, {"optimizer": "lion"}]
)
def test_what_does_not_exist_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        training_memory([(2,)], **wrong)


@pytest.mark.parametrize(("name", "nbytes"), [("fp32", 16), ("bf16", 8), ("bf16-mixed", 18), ("fp16-mixed", 16)])
def test_precisions_need_the_bytes_an_element_that_are_published_for_adam(name: str, nbytes: int) -> None:
    """ZeRO, section 3.1: 16 with fp16; Megatron-LM, "Distributed Optimizer": 18 with bf16 and 16 with fp32."""
    assert bytes_per_element("adam", precision_named(name)) == nbytes
    counted = training_memory([(1000,)], precision=precision_named(name))
    assert counted.total == nbytes * 1000


def test_an_unknown_precision_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'int4'.*fp32, bf16, bf16-mixed"):
        precision_named("int4")


@given(st.integers(1, 10**12), st.sampled_from(sorted(FRAGMENTATION)))
def test_what_is_usable_leaves_room_for_the_reserve_and_workspaces(memory: int, device_type: str) -> None:
    usable = usable_memory(memory, device_type)
    assert usable <= usable_memory(memory + 10**9, device_type)
    filled = training_memory([], activations=usable, device_type=device_type)
    assert filled.total + WORKSPACE[device_type] <= max(memory, WORKSPACE[device_type]) + 1
    assert usable_memory(memory, "cpu") == memory


def test_the_memory_of_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="abacus"):
        usable_memory(1, "abacus")
