"""An optimizer's step: bytes against torch's formulas, launches against torch's loop, seconds against both limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import allocated
from cost_models import PRECISIONS, host_costs, optimizer_step_seconds, optimizer_step_temporaries
from cost_models.memory.optimizer_state import OPTIMIZER_KINDS, OPTIMIZERS, optimizer_state_elements
from cost_models.memory.optimizer_step import (
    FUSED,
    IMPLEMENTATIONS,
    NO_STEP,
    Implementation,
    OptimizerRates,
    StepShare,
    _launches,
    fewest_kernels,
    implementation_of,
    optimizer_launches,
    optimizer_step_bytes,
    step_work,
)
from cost_models.memory.training_memory import FULL, HALF, MIXED, MIXED_FULL_GRADIENTS, Precision

NAMES = sorted(OPTIMIZER_KINDS)
PAIRS = [(name, how) for name in NAMES for how in IMPLEMENTATIONS if how != "fused" or name in FUSED]
precisions = st.sampled_from(sorted(PRECISIONS.values(), key=repr))
shapes = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 300)), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("precision", "nbytes"), [(FULL, 28), (HALF, 14), (MIXED, 2 + 8 + 16 + 2), (MIXED_FULL_GRADIENTS, 4 + 8 + 16 + 2)]
)
def test_a_fused_adam_reads_and_writes_every_tensor_once(precision: Precision, nbytes: int) -> None:
    """Reads gradient, parameter (or master) and both moments, writes all but the gradient, and the parameter."""
    assert optimizer_step_bytes("adam", 1000, precision=precision, implementation="fused") == nbytes * 1000


def test_a_foreach_adam_goes_through_its_lines_one_by_one() -> None:
    """torch.optim.adam._multi_tensor_adam: lerp_(m, g), mul_(v), addcmul_(v, g, g), sqrt(v), div_, add_, addcdiv_."""
    work = step_work("adam", "foreach")
    assert (work.gradient, work.parameter, work.held) == (2, 2, 1)
    assert work.state == 2 + 2 + 2 + 1 + 1  # lerp_, mul_, addcmul_, sqrt, addcdiv_
    assert work.temporary == 1 + 2 + 2 + 1  # sqrt, div_, add_, addcdiv_
    assert len(work.lists) == 7


@pytest.mark.parametrize(("name", "how"), PAIRS)
def test_no_step_moves_less_than_what_it_changes(name: str, how: Implementation) -> None:
    """Each gradient is read; each parameter and each state is read and written, at the least."""
    least = 4 * (3 + 2 * min(optimizer_state_elements(name, (256, 256)) / 256**2, 1))
    moved = optimizer_step_bytes(name, 1 << 16, implementation=how) / (1 << 16)
    assert moved >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_moves_least_and_launches_least(name: str) -> None:
    sizes = [1 << 20] * 30
    fused, foreach, loop = (optimizer_step_bytes(name, 1 << 20, implementation=how) for how in IMPLEMENTATIONS)
    assert fused <= min(foreach, loop)
    launches = [optimizer_launches(name, sizes, implementation=how) for how in IMPLEMENTATIONS]
    assert launches == sorted(launches)
    assert optimizer_step_temporaries(name, [(1 << 20,)], implementation="fused") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("adafactor", "rprop")])
@pytest.mark.parametrize("how", ["foreach", "for-loop"])
def test_temporaries_are_what_a_step_on_a_cpu_allocates(name: str, how: Implementation) -> None:
    """Oracle: torch's profiler follows the bytes that the allocator hands out in a real step."""
    kind = OPTIMIZER_KINDS[name]
    parameters = [torch.nn.Parameter(torch.randn(64, 512)) for _ in range(3)]
    optimizer = kind.maker(parameters, lr=1e-3, foreach=how == "foreach", **kind.settings)  # type: ignore[call-arg]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    for _ in range(8):
        optimizer.step()
    most, _ = allocated(optimizer.step)
    counted = optimizer_step_temporaries(name, [p.shape for p in parameters], implementation=how)
    assert counted == pytest.approx(most, abs=4096)


def test_gradients_of_16_bits_are_converted_for_float32_masters() -> None:
    whole = optimizer_step_temporaries("adam", [(1000,), (24,)], precision=MIXED_FULL_GRADIENTS)
    assert optimizer_step_temporaries("adam", [(1000,), (24,)], precision=MIXED) == whole + 4 * 1024
    assert optimizer_step_bytes("adam", 10, precision=MIXED) > optimizer_step_bytes("adam", 10, precision=FULL)


def torch_loop(sizes: list[int], most_tensors: int) -> int:
    """multi_tensor_apply of aten/src/ATen/native/cuda/MultiTensorApply.cuh, chunk by chunk."""
    launches = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // 65536)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == 320 or (tensors == most_tensors and last):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


@given(
    st.lists(st.one_of(st.integers(0, 10), st.integers(0, 50_000_000), st.integers(1, 700).map((65536).__mul__))),
    st.sampled_from([(1, 110), (2, 64), (3, 48), (4, 36), (5, 30)]),
)
def test_multi_tensor_kernels_are_launched_as_torch_launches_them(sizes: list[int], lists: tuple[int, int]) -> None:
    assert _launches(sizes, lists[0]) == torch_loop(sizes, lists[1])


@given(st.sampled_from(PAIRS), shapes, st.floats(1e10, 1e13), precisions, st.sampled_from(["eager", "cuda-graphs"]))
def test_a_step_takes_its_bytes_and_its_launches_and_less_with_more_bandwidth(
    pair: tuple[str, Implementation],
    sizes: list[tuple[int, int]],
    bandwidth: float,
    precision: Precision,
    mode: str,
) -> None:
    name, how = pair
    host = host_costs(mode)
    found, faster = (
        optimizer_step_seconds(name, sizes, rate, precision=precision, implementation=how, host=host)
        for rate in (bandwidth, 2 * bandwidth)
    )
    counts = [math.prod(size) for size in sizes]
    moving = optimizer_step_bytes(name, sum(counts), precision=precision, implementation=how) / bandwidth
    launches = optimizer_launches(name, counts, precision=precision, implementation=how)
    assert found >= max(moving, launches * (host.operator + host.kernel)) * (1 - 1e-9)
    assert faster <= found * (1 + 1e-12)
    more = optimizer_step_seconds(
        name, [*sizes, (64, 64)], bandwidth, precision=precision, implementation=how, host=host
    )
    assert more >= found * (1 - 1e-12)


def test_many_small_tensors_one_by_one_wait_for_the_host_and_large_ones_for_the_memory() -> None:
    small, large = [(64,)] * 1000, [(1 << 14, 1 << 14)]
    one_by_one, fused = (
        optimizer_step_seconds("adamw", small, 1.4e12, implementation=how) for how in ("for-loop", "fused")
    )
    assert one_by_one > 20 * fused
    assert optimizer_step_seconds("adamw", large, 1.4e12, implementation="fused") == pytest.approx(
        28 * (1 << 28) / 1.4e12, rel=0.05
    )


def test_no_optimizer_and_no_parameters_take_no_time() -> None:
    for how in IMPLEMENTATIONS:
        assert optimizer_step_seconds("none", [(5, 5)], 1e12, implementation=how) == 0
        assert optimizer_step_temporaries("none", [(5, 5)], implementation=how, precision=MIXED) == 0
    assert optimizer_step_seconds("adam", [], 1e12) == 0


def test_what_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no fused kernel for 'rprop', only for sgd"):
        optimizer_step_seconds("rprop", [(4,)], 1e12, implementation="fused")
    with pytest.raises(ValueError, match=r"'lion'.*adamw"):
        step_work("lion", "foreach")
    with pytest.raises(ValueError, match=r"'compiled'.*fused, foreach, for-loop"):
        step_work("adam", "compiled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bandwidth above 0"):
        optimizer_step_seconds("adam", [(4,)], 0)
    assert "none" in OPTIMIZERS


@pytest.mark.parametrize(("name", "how"), [("adamw", how) for how in IMPLEMENTATIONS] + [("sgd", "foreach")])
@given(sizes=st.lists(st.integers(1, 1 << 22), min_size=1, max_size=40), precision=precisions)
def test_shares_of_parameters_add_up_to_the_step(
    name: str, how: Implementation, sizes: list[int], precision: Precision
) -> None:
    """But for the last launch of every line, which is shared by fewer tensors than it has room for."""
    rates = OptimizerRates(1e12, host_costs("eager"), fewest_kernels(name, how))
    every = [StepShare.of(name, size, precision=precision, implementation=how) for size in sizes]
    found = rates.seconds(StepShare(*map(sum, zip(NO_STEP, *every, strict=True))))
    exact = optimizer_step_seconds(name, [(n,) for n in sizes], 1e12, precision=precision, implementation=how)
    launch = rates.host.operator + rates.host.kernel + rates.host.gap
    lists = len(step_work(name, how).lists) + 2
    assert found == pytest.approx(exact, rel=0.05, abs=0.0 if how == "for-loop" else lists * launch)


def test_an_optimizer_knows_its_implementation() -> None:
    parameters = list(torch.nn.Linear(2, 2).parameters())
    assert implementation_of(torch.optim.AdamW(parameters)) is None
    assert implementation_of(torch.optim.AdamW(parameters, fused=True)) == "fused"
    assert implementation_of(torch.optim.AdamW(parameters, foreach=True)) == "foreach"
    assert implementation_of(torch.optim.AdamW(parameters, foreach=False)) == "for-loop"
    assert implementation_of("adamw") is None
