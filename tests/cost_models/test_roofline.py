"""Work of operators against torch's own counter and closed forms, and the roofline over it."""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers its operators)
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, Case
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.analysis.operators import compute_nodes
from autopar.capture.program import Program, capture
from cost_models import MeasurementCache, efficiency_of, known_devices, parse_devices, rates_of
from cost_models.kernels import operator_work as work_module
from cost_models.kernels.device_kernels import one_kernel_attention
from cost_models.kernels.efficiency_curves import (
    LARGEST_TILES,
    TILES,
    ComputeCurve,
    Efficiency,
    MemoryCurve,
    filled,
)
from cost_models.kernels.kernel import COMPUTE_KINDS, MEMORY_KINDS, Kernel, formulas
from cost_models.kernels.operator_work import OperatorWork, count, count_call
from cost_models.kernels.roofline import Rates, busy_seconds, estimate, kernel_seconds
from cost_models.measuring import calibration
from cost_models.measuring.calibration import Calibration, calibrate

pytestmark = pytest.mark.usefixtures("shared_exports")

aten = torch.ops.aten
ROWS = 3
# torch counts nothing for nn.LSTM's fused kernel on a CPU.
COUNTED = [case for case in CASES if case.name != "lstm"]


def attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products: q k' and scores v."""
    batch, heads, length, depth = query
    return 2 * batch * heads * length * key[2] * (depth + value[3])


def attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Five: q k' once more, and the two gradients of each product."""
    batch, heads, length, depth = query
    return 2 * batch * heads * length * key[2] * (3 * depth + 2 * value[3])


def grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Every row meets the matrix of its group."""
    return 2 * a[0] * a[1] * b[2]


# The kernels of a CPU, and those of transformers for experts, which torch's counter leaves out.
MORE = {
    torch.ops.transformers.grouped_mm_fallback: grouped_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}
if hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):  # a kernel of its own since transformers 5.2x
    MORE[torch.ops.transformers.grouped_mm_fallback_backward] = lambda *args, **kwargs: 2 * grouped_flops(*args)


def captured(case: Case) -> Program:
    return capture(case.model(), (), case.inputs(4))


def really_counted(program: Program, inputs: list[Any]) -> tuple[int, int]:
    """FLOPs of forward and backward of the captured graph, run by torch."""
    with FlopCounterMode(display=False, custom_mapping=MORE) as forward:
        outputs = program.graph_module(*inputs)
    roots = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    with FlopCounterMode(display=False, custom_mapping=MORE) as backward:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return forward.get_total_flops(), backward.get_total_flops()


def flops(work: dict[str, OperatorWork]) -> tuple[int, int]:
    forward = sum(kernel.flops for one in work.values() for kernel in one.forward)
    return forward, sum(kernel.flops for one in work.values() for kernel in one.backward)


@pytest.mark.slow
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_flops_of_a_model_are_those_that_torch_counts_when_it_runs(case: Case) -> None:
    program = captured(case)
    bound = program.bind((), case.inputs(ROWS))
    assert bound is not None
    inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in bound[0]]
    assert flops(count(program.graph_module, ROWS)) == really_counted(program, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_operator_is_handled(case: Case) -> None:
    """None falls back on the bytes of its inputs and outputs, and only what moves nothing is free."""
    program = captured(case)
    counted = count(program.graph_module, ROWS)
    nodes = compute_nodes(program.graph)
    assert list(counted) == [node.name for node in nodes]
    maybe = {"reshape", "contiguous", "to", "dropout", "flatten", "lift_fresh_copy"}  # copies what is not so already
    for node in nodes:
        if counted[node.name].forward or getattr(node.target, "__module__", "") == "_operator":  # of sizes, tuples
            continue
        assert isinstance(node.target, torch._ops.OpOverload)
        name = node.target.overloadpacket.__name__
        assert (
            node.target.is_view or name in maybe | {"empty", "empty_like", "sym_size", "detach_"} or "chunk" in name
        ), name
    kernels = {kernel.operator for one in counted.values() for kernel in one.forward}
    assert [name for name in kernels - {"attention"} if not hasattr(aten, name)] in ([], ["grouped_mm_fallback"])


@pytest.mark.slow
def test_the_number_of_samples_may_be_any() -> None:
    case = next(case for case in CASES if case.name == "bert")
    program = captured(case)
    inputs = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in bound_inputs(case, 9)]
    assert count(program.graph_module, 9) == count(program.graph_module, 4, inputs=inputs)
    many = count(program.graph_module, 1_000_000)  # without making a tensor of that size
    assert flops(many)[0] == 1_000_000 * flops(count(program.graph_module, 1))[0]


def bound_inputs(case: Case, rows: int) -> list[Any]:
    bound = captured(case).bind((), case.inputs(rows))
    assert bound is not None
    return bound[0]


def test_without_training_there_is_no_backward() -> None:
    program = captured(CASES[0])
    counted = count(program.graph_module, ROWS, training=False)
    assert not any(one.backward for one in counted.values())
    assert flops(counted)[0] == flops(count(program.graph_module, ROWS))[0]


def meta(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def bytes_of(function: Any, *args: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(read, written) of the kernels forward, and backward."""
    _, one = count_call(function, args)
    return [(k.read, k.written) for k in one.forward], [(k.read, k.written) for k in one.backward]


TOKENS = torch.empty(6, dtype=torch.long, device="meta")


@pytest.mark.parametrize(
    ("function", "args", "forward", "backward"),
    [
        (aten.add.Tensor, (meta(5, 8), meta(5, 8)), [(320, 160)], []),
        (aten.relu.default, (meta(5, 8),), [(160, 160)], [(320, 160)]),
        (aten.relu_.default, (meta(5, 8),), [(160, 160)], [(320, 160)]),
        (aten.mul.Tensor, (meta(5, 8), meta(5, 8)), [(320, 160)], [(320, 160), (320, 160)]),
        (aten.mul.Tensor, (meta(5, 8), meta(5, 8, grad=False)), [(320, 160)], [(320, 160)]),
        (aten.add.Tensor, (meta(5, 8), meta(8).expand(5, 8).detach()), [(192, 160)], []),  # read once, then cached
        (aten.view.default, (meta(5, 8), [40]), [], []),
        (aten.transpose.int, (meta(5, 8), 0, 1), [], []),
        (aten.zeros_like.default, (meta(5, 8, grad=False),), [(0, 160)], []),
        (aten.fill_.Scalar, (meta(5, 8, grad=False), 1.0), [(0, 160)], []),
        # Six rows of a table of a hundred are read; the gradient is as large as the table.
        (aten.embedding.default, (meta(100, 8), TOKENS), [(6 * 32 + 48, 192)], [(192 + 48, 3200)]),
        (aten.mm.default, (meta(2, 3), meta(3, 5)), [(24 + 60, 40)], [(40 + 24, 60), (40 + 60, 24)]),
        # A byte of the mask for each number; nothing is dropped in the second.
        (aten.dropout.default, (meta(5, 8), 0.1, True), [(160, 160 + 40)], [(160 + 40, 160)]),
        (aten.dropout.default, (meta(5, 8), 0.1, False), [], []),
    ],
)
def test_bytes_are_those_that_the_kernels_touch(
    function: Any, args: Any, forward: list[tuple[int, int]], backward: list[tuple[int, int]]
) -> None:
    found = bytes_of(function, *args)
    assert found[0] == forward
    assert sorted(found[1]) == sorted(backward)


def test_a_loss_reads_the_classes_of_its_targets_alone() -> None:
    few, many = (
        bytes_of(aten.nll_loss_nd.default, meta(2, classes, 3), torch.zeros(2, 3, dtype=torch.long, device="meta"))
        for classes in (10, 1000)
    )
    assert few[0] == many[0]
    ((read, written),), ((more, gradient),) = few[1], many[1]
    assert read == more
    assert (written, gradient) == (2 * 10 * 3 * 4, 2 * 1000 * 3 * 4)


@pytest.mark.parametrize(("weights", "times"), [(True, 2), (False, 1)])
def test_gradients_of_a_norms_weights_read_its_input_once_more(weights: bool, times: int) -> None:
    args = (meta(64, 8), [8], meta(8, grad=weights), meta(8, grad=weights))
    ((read, written),) = bytes_of(aten.layer_norm.default, *args)[1]
    x, vectors = 64 * 8 * 4, (2 * 64 + 2 * 8) * 4  # means and scales of rows, weight and bias
    assert read == 2 * x * times + vectors
    assert written == x + 2 * 8 * 4 * weights


@pytest.mark.parametrize("words", [50257, 50258])
@pytest.mark.parametrize("tokens", [255, 256])
def test_odd_rows_slow_a_product_of_16_bits_whatever_its_other_sizes(words: int, tokens: int) -> None:
    """Rows of tokens x words and of words x 64 numbers: of these the first alone may start at odd addresses."""
    spec = known_devices()["A100-80"]
    rates, efficiency = rates_of(spec), efficiency_of(spec)
    for dtype, slow in ((torch.float16, words % 2 == 1), (torch.float32, False)):
        args = (meta(tokens, 64, dtype=dtype), meta(words, 64, dtype=dtype))
        _, work = count_call(aten.linear.default, args)
        for kernel in (*work.forward, *work.backward):
            usual = replace(kernel, aligned=True)
            assert kernel.aligned == (not slow or dtype == torch.float32)
            longer = busy_seconds(kernel, rates, efficiency) - busy_seconds(usual, rates, efficiency)
            assert (longer > 0) == slow


def test_attention_by_products_takes_what_was_measured() -> None:
    """Dao et al., FlashAttention, 2022, figure 2: 41.7 ms on an A100 of 40 GB, where masking has its own kernels."""
    spec = known_devices()["A100-40"]
    rates, efficiency = rates_of(spec), efficiency_of(spec)
    narrow, wide = meta(1024, 1024, 64, dtype=torch.float16), meta(1024, 64, 1024, dtype=torch.float16)
    scores = meta(1024, 1024, 1024, dtype=torch.float16)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.bmm.default, (narrow, wide)),
        (aten.softmax.int, (scores, -1)),
        (aten.dropout.default, (scores, 0.1, True)),
        (aten.bmm.default, (scores, narrow)),
    ]
    works = [count_call(*each)[1] for each in calls]
    kernels = [kernel for work in works for kernel in (*work.forward, *work.backward)]
    seconds = sum(busy_seconds(kernel, rates, efficiency) for kernel in kernels)
    assert 0.7 * 41.7e-3 < seconds < 41.7e-3


def test_a_device_without_units_for_16_bits_loses_nothing_by_odd_rows() -> None:
    spec = known_devices()["cpu"]
    _, work = count_call(aten.mm.default, (meta(64, 63, dtype=torch.bfloat16), meta(63, 65, dtype=torch.bfloat16)))
    for kernel in (*work.forward, *work.backward):
        same = [busy_seconds(k, rates_of(spec), efficiency_of(spec)) for k in (kernel, replace(kernel, aligned=True))]
        assert not kernel.aligned
        assert same[0] == same[1]


@pytest.mark.parametrize(("wanted", "products"), [((True, True), 2), ((True, False), 1), ((False, False), 0)])
def test_of_a_product_only_the_wanted_gradients_cost(wanted: tuple[bool, bool], products: int) -> None:
    _, one = count_call(aten.linear.default, (meta(4, 6, grad=wanted[0]), meta(5, 6, grad=wanted[1])))
    assert [k.flops for k in one.forward] == [2 * 4 * 5 * 6]
    assert sum(k.flops for k in one.backward) == products * 2 * 4 * 5 * 6


@pytest.mark.parametrize("name", ["cpu", "H100"])
def test_a_product_of_complex_numbers_costs_four_of_their_parts(name: str) -> None:
    """(a + bi)(c + di) = ac - bd + (ad + bc)i, forward and for each gradient, at the peak of the parts' dtype."""
    of_parts = [count_call(aten.mm.default, (meta(512, 512), meta(512, 512)))[1] for _ in range(4)]
    wide = {"dtype": torch.complex64}
    _, work = count_call(aten.mm.default, (meta(512, 512, **wide), meta(512, 512, **wide)))
    rates = rates_of(known_devices()[name])
    for way in ("forward", "backward"):
        found = [k for k in getattr(work, way) if k.flops]
        parts = [k for one in of_parts for k in getattr(one, way) if k.flops]
        assert len(found) == len(parts) // 4
        assert sum(k.flops for k in found) == sum(k.flops for k in parts) > 0
        assert {k.dtype for k in found} == {torch.float32}
        least = sum(k.flops for k in parts) / rates.peak(torch.float32)
        assert sum(busy_seconds(k, rates, Efficiency.default()) for k in found) >= least


def test_called_modules_count_their_own_gradients_where_others_of_their_size_are_frozen() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4).requires_grad_(place % 3 != 1) for place in range(60)))
    counted = count(fx.symbolic_trace(model), 1, inputs=[meta(2, 4, grad=False)])
    product = 2 * 2 * 4 * 4
    for place in range(60):
        products = sum(k.flops for k in counted[f"_{place}"].backward) // product
        assert products == (place > 0) + (place % 3 != 1), f"gradients of the input and the weight of layer {place}"


def test_attention_moves_no_scores() -> None:
    """Inputs and outputs only, however long the sequence; and a causal mask hides (1 - 1/s) / 2 of the scores."""
    query, key, value = (meta(2, 4, 128, 16) for _ in range(3))
    _, one = count_call(aten.scaled_dot_product_attention.default, (query, key, value, None, 0.0, True))
    tensor, sums = 2 * 4 * 128 * 16 * 4, 2 * 4 * 128 * 4
    (forward,), (backward,) = one.forward, one.backward
    assert (forward.read, forward.written) == (3 * tensor, tensor + sums)
    assert (backward.read, backward.written) == (5 * tensor + sums, 3 * tensor)
    mask = torch.ones(128, 128).tril()
    assert 1 - forward.skipped == pytest.approx(mask.mean().item())
    assert backward.skipped == forward.skipped


def test_attention_whose_mask_wants_a_gradient_is_products_and_a_softmax() -> None:
    query = meta(2, 4, 12, 16)
    _, one = count_call(aten.scaled_dot_product_attention.default, (query, query, query, meta(2, 4, 12, 12)))
    assert sum(k.flops for k in one.forward) == 2 * 2 * 2 * 4 * 12 * 12 * 16
    assert sum(k.flops for k in one.backward) == 4 * 2 * 2 * 4 * 12 * 12 * 16


@pytest.mark.parametrize(
    ("dtype", "masked", "in_one"),
    [
        (torch.float64, False, False),
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
    ],
)
def test_attention_is_one_kernel_where_gpus_have_one_and_as_memory_counts_it(
    dtype: torch.dtype, masked: bool, in_one: bool
) -> None:
    """Two heads share a key and a value."""
    query, shared = (torch.empty(2, heads, 12, 16, dtype=dtype, device="meta") for heads in (4, 2))
    mask = torch.empty(12, 12, dtype=torch.bool, device="meta") if masked else None
    _, one = count_call(aten.scaled_dot_product_attention.default, (query, shared, shared, mask), {"enable_gqa": True})
    assert ([k.operator for k in one.forward] == ["attention"]) == in_one
    assert one_kernel_attention(query, shared, mask) == in_one


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    module = fx.symbolic_trace(function)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["val"] = value
    return module


def test_gradients_that_meet_are_added() -> None:
    """x is read twice, and the first of its gradients is not added to anything."""
    module = graph_of(lambda x: (torch.relu(x) * torch.exp(x),), torch.randn(5, 8))
    counted = count(module, 1, inputs=[meta(5, 8)])
    sums = [k.operator for one in counted.values() for k in one.backward if k.operator == "add_"]
    assert len(sums) == 1


def test_a_parameters_gradient_is_added_to_that_of_earlier_micro_batches() -> None:
    module = torch.export.export(nn.Linear(8, 5, bias=False), (torch.randn(4, 8),)).module()
    counted = count(module, 4)
    (add,) = [k for one in counted.values() for k in one.backward if k.operator == "add_"]
    assert add.nbytes == 3 * 8 * 5 * 4


def test_parts_that_nobody_reads_have_no_gradient() -> None:
    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.max(1)[0] * 2

    module = torch.export.export(First(), (torch.randn(4, 8, requires_grad=True),)).module()
    counted = count(module, 4, inputs=[meta(4, 8)])
    assert flops(counted) == (0, 0)
    assert any(one.backward for one in counted.values())


def test_an_operator_whose_result_depends_on_data_costs_its_bytes() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nonzero(x)

    exported = torch.export.export(Chosen(), (torch.randn(4, 2),), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    counted = count(exported.module(), 10)
    (nonzero,) = counted["nonzero"].forward
    assert (nonzero.read, nonzero.written) == (80, 10 * 2 * 8)  # as many as there are samples, for want of better


def test_a_graph_that_tells_no_shapes_needs_inputs() -> None:
    module = fx.symbolic_trace(lambda x: (torch.relu(x),))
    with pytest.raises(ValueError, match=r"'x'.*inputs"):
        count(module, 2)
    assert count(module, 2, inputs=[torch.randn(5, 8)])["relu"].forward[0].nbytes == 320


def test_torch_has_the_formulas_where_they_are_looked_for() -> None:
    """The expression of a symbolic size is not public."""
    assert {aten.mm, aten.convolution, aten._scaled_dot_product_flash_attention_backward} <= set(formulas())
    program = captured(CASES[0])
    size = program.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    assert work_module._number(size * 2 + 1, 5) == 11


def test_a_grouped_product_costs_every_row_one_matrix() -> None:
    rows, inner, outer, groups = 24, 8, 16, 3
    ends = torch.empty(groups, dtype=torch.int32, device="meta")
    args = (meta(rows, inner, dtype=torch.bfloat16), meta(groups, inner, outer, dtype=torch.bfloat16), ends)
    _, one = count_call(aten._grouped_mm.default, args)
    assert sum(k.flops for k in one.forward) == 2 * rows * inner * outer
    assert sum(k.flops for k in one.backward) == 2 * 2 * rows * inner * outer


IDEAL = Efficiency(
    dict.fromkeys(COMPUTE_KINDS, ComputeCurve(1.0)),
    dict.fromkeys(MEMORY_KINDS, MemoryCurve(1.0)),
)


@pytest.mark.slow
@given(st.integers(0, 10**12), st.integers(1, 10**9), st.floats(1e9, 1e15), st.floats(1e8, 1e13))
def test_a_kernel_takes_as_long_as_the_slower_roof_and_its_launch(
    flops: int, nbytes: int, peak: float, bandwidth: float
) -> None:
    kernel = Kernel("mm", "matmul" if flops else "pointwise", torch.float32, flops, nbytes, 0)
    expected = max(flops / peak, nbytes / bandwidth) + 1e-6
    assert kernel_seconds(kernel, Rates({torch.float32: peak}, bandwidth, 1e-6), IDEAL) == pytest.approx(expected)


@pytest.mark.slow
def test_an_estimate_sums_the_kernels_of_every_node() -> None:
    program = captured(next(case for case in CASES if case.name == "gpt2"))
    rates = Rates({torch.float32: 1e11}, 1e10, 1e-6)
    found = estimate(program.graph_module, ROWS, rates, Efficiency.default())
    counted = count(program.graph_module, ROWS)
    for name, one in counted.items():
        assert found[name].forward_flops == sum(k.flops for k in one.forward)
        assert found[name].backward_bytes == sum(k.nbytes for k in one.backward)
        assert found[name].forward_seconds >= len(one.forward) * rates.launch
    total = sum(o.forward_seconds + o.backward_seconds for o in found.values())
    faster = estimate(program.graph_module, ROWS, Rates({torch.float32: 2e11}, 2e10, 0.0), Efficiency.default())
    assert sum(o.forward_seconds + o.backward_seconds for o in faster.values()) < total


def test_products_of_a_dtype_without_a_peak_are_refused() -> None:
    program = captured(CASES[0])
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        estimate(program.graph_module, 2, Rates({torch.bfloat16: 1e12}, 1e10, 0.0), Efficiency.default())


fractions, seconds = st.floats(0.05, 1.5), st.floats(0.0, 1e-4)


@given(fractions, seconds, st.floats(0.0, 5.0))
def test_more_work_reaches_more_of_the_peak_and_never_more_than_the_best(
    best: float, ramp: float, exposed: float
) -> None:
    curve = ComputeCurve(best, ramp, exposed)
    for intensity in (1.0, 100.0):
        reached = [curve.achieved(size, intensity, 1e12, 1e11) for size in (1e3, 1e6, 1e9, 1e12)]
        assert reached == pytest.approx(sorted(reached))
        assert reached[-1] <= best * (1 + 1e-9)
    sharp = [curve.achieved(1e9, intensity, 1e12, 1e11) for intensity in (1.0, 10.0, 1e3)]
    assert sharp == pytest.approx(sorted(sharp))


@given(fractions, seconds, st.floats(0.0, 5.0))
def test_a_fit_finds_the_curve_that_products_were_drawn_from(best: float, ramp: float, exposed: float) -> None:
    truth = ComputeCurve(best, ramp, exposed)
    works = [(1e4, 1e3), (1e6, 1e5), (1e8, 1e5), (1e9, 1e8), (1e10, 1e6), (1e8, 1e7)]
    samples = [(f, b, truth.seconds(f, b, 1e11, 1e10)) for f, b in works]
    fitted = ComputeCurve.fit(samples, 1e11, 1e10)
    for f, b, s in samples:
        assert fitted.seconds(f, b, 1e11, 1e10) == pytest.approx(s, rel=1e-3)


@given(fractions, seconds, st.floats(0.0, 20.0), st.integers(0, 19))
def test_a_fit_finds_the_curve_that_copies_were_drawn_from(best: float, ramp: float, far: float, place: int) -> None:
    sizes = [1e3, 1e5, 1e6, 1e7, 1e8, 1e9]
    truth = MemoryCurve(best, ramp, far, cache=float(np.geomspace(sizes[0], sizes[-1], 20)[place]))
    fitted = MemoryCurve.fit([(n, truth.seconds(n, 1e10)) for n in sizes], 1e10)
    for n in sizes:
        assert fitted.seconds(n, 1e10) == pytest.approx(truth.seconds(n, 1e10), rel=1e-3)


def test_a_fit_of_noise_stays_possible() -> None:
    random = np.random.default_rng(1)
    samples = [(10.0**e, 10.0**e / 10, random.uniform(1e-6, 1e-3)) for e in range(3, 10)]
    curve = ComputeCurve.fit(samples, 1e11, 1e10)
    assert curve.best > 0
    assert min(curve.ramp, curve.exposed) >= 0


# Highest TFLOP/s of a bfloat16 product of any shape, found by search (stas00/ml-engineering, compute/accelerator, the
# "maximum achievable matmul" table, 2025). The efficiencies of the devices come from another table: sustained rates.
MAXIMUM = {"A100-80": 271e12, "H100": 795e12, "H200": 788e12}


@pytest.mark.parametrize("name", MAXIMUM)
def test_a_large_product_reaches_almost_and_never_more_than_the_best_that_was_measured(name: str) -> None:
    n = 16384
    spec = known_devices()[name]
    tensors = [torch.empty(n, n, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    _, one = count_call(aten.mm.default, tuple(tensors))
    (product,) = one.forward
    rate = 2 * n**3 / kernel_seconds(product, rates_of(spec), efficiency_of(spec))
    assert 0.85 * MAXIMUM[name] < rate <= MAXIMUM[name]


kernels = st.builds(
    Kernel,
    st.just("mm"),
    st.sampled_from([*COMPUTE_KINDS, *MEMORY_KINDS]),
    st.just(torch.bfloat16),
    st.integers(1, 10**14),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
)


@given(kernels, st.sampled_from(sorted(known_devices())), st.floats(1, 100))
def test_more_work_never_takes_less_time(kernel: Kernel, name: str, factor: float) -> None:
    spec = known_devices()[name]
    kernel = replace(kernel, flops=kernel.flops if kernel.kind in COMPUTE_KINDS else 0)
    before = kernel_seconds(kernel, rates_of(spec), efficiency_of(spec))
    for field in ("flops", "read", "written"):
        more = replace(kernel, **{field: int(getattr(kernel, field) * factor)})
        assert kernel_seconds(more, rates_of(spec), efficiency_of(spec)) >= before * (1 - 1e-12)


def product(count: int, rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    """`count` products of rows x depth and depth x columns matrices."""
    factors, results = count * (rows + columns) * depth, count * rows * columns
    sizes = (count, rows, columns)
    nbytes = dtype.itemsize
    return Kernel("bmm", "matmul", dtype, 2 * results * depth, factors * nbytes, results * nbytes, sizes=sizes)


sides = st.one_of(st.integers(1, 300), st.integers(1, 9000))


@given(
    st.sampled_from(sorted(known_devices())),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.tuples(st.integers(1, 64), sides, sides, sides),
    st.integers(0, 3),
    st.one_of(st.integers(1, 3), st.integers(1, 5000)),
)
def test_a_product_that_grows_in_any_dimension_never_gets_faster(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int, int], dimension: int, more: int
) -> None:
    spec = known_devices()[name]
    larger = [side + more * (place == dimension) for place, side in enumerate(shape)]
    before, after = (
        kernel_seconds(product(*dimensions, dtype), rates_of(spec), efficiency_of(spec))
        for dimensions in (shape, larger)
    )
    assert before <= after * (1 + 1e-12)


@given(st.integers(2, 64), st.integers(2, 64), st.integers(1, 300), st.integers(2, 10))
def test_units_without_a_tile_do_not_speed_a_product_up(rows: int, columns: int, depth: int, times: int) -> None:
    """A small result has at most 64 tiles, whose sums come in at most 32 parts: 2048 units, however many there are."""
    useful, more = (filled((rows, columns), units, depth) * units for units in (2048, 2048 * times))
    assert more == pytest.approx(useful)


@given(st.sampled_from(sorted(known_devices().keys() - {"cpu"})), st.integers(64, 512))
def test_a_product_of_less_than_one_wave_does_not_run_at_the_speed_of_a_full_one(name: str, side: int) -> None:
    spec = known_devices()[name]
    rates, efficiency = rates_of(spec), efficiency_of(spec)
    one = product(1, side, side, 4096)
    full = one.flops / (efficiency.compute["matmul"].best * rates.peak(torch.bfloat16))
    tiles = -((-side // 64) ** 2)
    assert busy_seconds(one, rates, efficiency) > full
    if tiles * 32 <= rates.units:  # not even sums divided into 32 parts are enough for all units
        assert busy_seconds(one, rates, efficiency) > full * rates.units / (tiles * 32)


@given(st.integers(1, 3), st.integers(65, 3000), st.integers(65, 3000), st.sampled_from([1, 80, 108]))
def test_products_fill_whole_waves_of_tiles(count: int, rows: int, columns: int, units: int) -> None:
    """Oracle: units that take a tile each as soon as they are free, and compute for the time of a whole tile."""
    reuse = 40.0

    def share(height: int, width: int) -> float:
        free = [0] * units  # when each unit has finished its tiles
        useful = 0
        for row, column in itertools.product(range(0, rows, height), range(0, columns, width)):
            for _ in range(count):
                heapq.heapreplace(free, free[0] + 1)
                useful += min(height, rows - row) * min(width, columns - column)
        waves[height, width] = max(free)
        return useful / (units * max(free) * max(height * width, (height + width) * reuse))

    waves: dict[tuple[int, int], int] = {}
    best = max(share(*tile) for tile in TILES)
    found = filled((count, rows, columns), units, reuse=reuse)
    if min(waves[tile] for tile in LARGEST_TILES) > 1:
        assert found == pytest.approx(best)
    else:  # thinner tiles may be better
        assert best * (1 - 1e-12) <= found <= 1 + 1e-12


def test_one_tile_more_than_a_wave_takes_another_wave() -> None:
    # 9 x 12 tiles of 256 x 128 are one wave of the 108 multiprocessors of an A100.
    assert filled((2304, 1536), 108) == 1.0
    assert filled((2304, 1537), 108) < 1.0
    assert filled((5000, 5000), 0) == 1.0  # the number of multiprocessors is not known


@given(st.integers(64, 4096), st.integers(64, 4096), st.integers(1, 1 << 20), st.sampled_from([40, 80, 108, 132]))
def test_a_product_never_uses_more_than_all_units(rows: int, columns: int, depth: int, units: int) -> None:
    assert 0 < filled((rows, columns), units, depth) <= 1 + 1e-12


@pytest.mark.parametrize("shape", [(1, 512, 512, 1 << 16), (1, 8, 4096, 4096), (4, 128, 128, 1 << 16)])
def test_long_sums_are_divided_over_units_that_have_no_tile(shape: tuple[int, int, int, int]) -> None:
    count, rows, columns, depth = shape
    alone = filled((count, rows, columns), 108, 1)
    assert filled((count, rows, columns), 108, depth) > 1.25 * alone


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from(sorted(known_devices())))
def test_one_copy_beats_two_of_the_same_bytes_by_a_launch(first: int, second: int, name: str) -> None:
    """Bytes are conserved: without curves of caches, only the launch is paid once more."""
    spec = known_devices()[name]
    one, other, both = (
        kernel_seconds(Kernel("clone", "pointwise", torch.float32, 0, n, n), rates_of(spec), efficiency_of(spec))
        for n in (first, second, first + second)
    )
    assert one + other - both == pytest.approx(spec.launch)


def calibration_of(value: float) -> Calibration:
    return Calibration(Rates({torch.float32: 1e11, torch.bfloat16: value}, 1e10, 1e-6), Efficiency.default())


def test_a_calibration_survives_json() -> None:
    one = calibration_of(2e11)
    assert Calibration.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_device_is_calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([calibration_of(3e11)])
    monkeypatch.setattr(calibration, "_calibrate", lambda place, budget: next(runs))
    (device,) = parse_devices("cpu")
    with MeasurementCache() as cache:
        first = calibrate(device, cache)
        assert calibrate(device, cache) == first


def test_every_sort_of_kernel_is_probed_by_one_that_is_a_single_kernel() -> None:
    for large in (False, True):
        kinds = [calibration._kernel(probe, torch.float32).kind for probe in calibration._probes(large)]
        assert all(kinds.count(kind) >= 3 for kind in COMPUTE_KINDS + MEMORY_KINDS)


@pytest.mark.slow
def test_this_machine_can_be_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = [probe for probe in calibration._probes(large=False) if sum(map(np.prod, probe.shapes)) < 1 << 17]
    monkeypatch.setattr(calibration, "_probes", lambda large: probes)
    threads = torch.get_num_threads()
    (device,) = parse_devices("cpu")
    found = calibrate(device, budget=0.2)
    assert torch.get_num_threads() == threads
    assert min(found.rates.peak(torch.float32), found.rates.bandwidth, found.rates.launch) > 0
    for kind in COMPUTE_KINDS:
        assert found.efficiency.compute[kind].best > 0
    for kind in MEMORY_KINDS:
        assert found.efficiency.memory[kind].best > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_kernel_of_a_calibrated_gpu_moves_bytes_faster_than_its_memory() -> None:
    """Large kernels against a large copy; timed as they are launched, they took less than no time."""
    found = calibrate(parse_devices("cuda:0")[0], budget=2.0)
    bandwidth = found.rates.bandwidth
    assert {kind: curve.achieved(1 << 29, bandwidth) < 1.5 for kind, curve in found.efficiency.memory.items()} == (
        dict.fromkeys(found.efficiency.memory, True)
    )
