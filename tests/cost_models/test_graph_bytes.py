"""Bytes counted on the meta device are those of a real pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, Case, bert, ragged_mask, tokens
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention

from autopar.capture.program import capture
from cost_models.graphs import on_meta, private_copy, storage_key
from cost_models.kernels.device_kernels import DeviceKernels
from cost_models.memory.graph_bytes import GraphBytes, measure_bytes

RECURRENT = {"lstm", "gru"}  # a CPU's kernels of LSTM keep a workspace of their own


def both_ways(model: nn.Module, inputs: dict[str, Any], rows: int, training: bool) -> tuple[GraphBytes, GraphBytes]:
    program = capture(model.train(training), (), inputs)
    bound = program.bind((), inputs)
    assert bound is not None
    leaves = [x.clone() if isinstance(x, torch.Tensor) else x for x in bound[0]]
    real = measure_bytes(program.graph_module, leaves, rows, training)
    return real, measure_bytes(program.graph_module, [on_meta(x) for x in leaves], rows, training)


def keepers(counted: GraphBytes) -> Counter[tuple[tuple[str, ...], int]]:
    """(operators, bytes) of every storage that is kept for the backward."""
    nodes: dict[int, list[str]] = {}
    nbytes: dict[int, int] = {}
    for node, kept in counted.saved.items():
        for storage, size in kept:
            nodes.setdefault(storage, []).append(node)
            nbytes[storage] = size
    return Counter((tuple(names), nbytes[storage]) for storage, names in nodes.items())


def assert_same(real: GraphBytes, meta: GraphBytes) -> None:
    assert meta.output == real.output
    assert meta.fresh == real.fresh
    assert keepers(meta) == keepers(real)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in RECURRENT], ids=lambda c: c.name)
def test_a_pass_on_the_meta_device_counts_what_a_real_one_does(case: Case, training: bool) -> None:
    real, meta = both_ways(case.build(), case.inputs(4), 4, training)
    assert_same(real, meta)
    assert any(real.saved.values()) == training


@pytest.mark.slow
def test_dropout_is_counted_as_it_is() -> None:
    assert_same(*both_ways(bert(dropout=0.1), {"input_ids": tokens(4), "attention_mask": ragged_mask(4)}, 4, True))


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, mask, **self.options)


@settings(deadline=None, max_examples=examples(20))
@given(
    dims=st.sampled_from([(3, 4), (2, 4), (4,), ()]),
    lengths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    widths=st.sampled_from([(8, 8), (8, 4)]),
    mask=st.sampled_from(["none", "causal", "bool", "added", "trained"]),
    dropout=st.sampled_from([0.0, 0.1]),
    groups=st.sampled_from([1, 2]),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_attention_is_in_one_kernel_where_torch_has_it_so(
    dims: tuple[int, ...],
    lengths: tuple[int, int],
    widths: tuple[int, int],
    mask: str,
    dropout: float,
    groups: int,
    transposed: bool,
    dtype: torch.dtype,
) -> None:
    def make(dims: tuple[int, ...], length: int, width: int) -> torch.Tensor:
        made = torch.randn((*dims, length, width), dtype=dtype)
        return made.transpose(-2, -1).contiguous().transpose(-2, -1) if transposed else made

    groups = groups if len(dims) == 2 else 1
    shared = (*dims[:-1], dims[-1] // groups) if dims else dims
    q, k, v = (
        make(dims, lengths[0], widths[0]),
        make(shared, lengths[1], widths[0]),
        make(shared, lengths[1], widths[1]),
    )
    scores = (*dims[:1], *[1] * (len(dims) - 1), *lengths)
    masks = {"bool": torch.rand(scores) > 0.1, "added": torch.randn(scores, dtype=dtype)}
    masks["trained"] = masks["added"].clone().requires_grad_()
    options = {"dropout_p": dropout, "is_causal": mask == "causal", "enable_gqa": groups > 1}
    graph = fx.symbolic_trace(Attention(**options))
    inputs = [*(x.requires_grad_() for x in (q, k, v)), masks.get(mask)]
    for node in graph.graph.nodes:
        if node.op == "output":
            node.args = ((node.args[0],),)
    real = measure_bytes(graph, inputs, 1, True)
    meta = measure_bytes(graph, [on_meta(x) for x in inputs], 1, True)
    assert_same(real, meta)


@contextmanager
def kept_on_a_gpu() -> Iterator[dict[int, int]]:
    """Bytes of every storage that is kept for the backward inside."""
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor.untyped_storage())
        kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), DeviceKernels("cuda"):
        yield kept


def test_a_gpu_keeps_a_byte_an_element_of_a_dropout_and_no_scores_of_an_attention_that_drops() -> None:
    q = torch.empty(2, 4, 64, 8, device="meta", requires_grad=True)
    with kept_on_a_gpu() as kept:
        out = torch.nn.functional.dropout(q, 0.1)
        assert sum(kept.values()) == q.numel()
        kept.clear()
        attended = scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert sum(kept.values()) == q.nbytes + attended.nbytes + 4 * 2 * 4 * 64
    assert out.requires_grad


@pytest.mark.parametrize("scale", [None, 1.0, -0.5])
def test_a_gpu_keeps_a_byte_a_score_of_the_dropout_of_an_attention_by_products(scale: float | None) -> None:
    """Besides: the scores after the softmax and after the dropout, and the factors of both products."""
    q, k, v = (torch.empty(2, 4, 64, 8, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.empty(1, 4, 64, 64, device="meta", requires_grad=True)  # no kernel on GPUs has its gradient
    with kept_on_a_gpu() as kept:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1, scale=scale)
    scores = 2 * 4 * 64 * 64
    assert Counter(kept.values())[4 * scores] == 2
    assert Counter(kept.values())[scores] == 1
    assert sum(kept.values()) == 9 * scores + 3 * q.nbytes
    out.backward(torch.empty_like(out))
    assert mask.grad is not None
    assert mask.grad.shape == mask.shape


def test_what_shares_memory_shares_it_on_another_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 3))
            self.b = nn.Parameter(self.a.data)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (x @ self.a @ self.b @ self.a,)

    module = fx.symbolic_trace(Tied())
    moved = private_copy(module, torch.device("meta"))
    assert moved.a is not moved.b  # each has a gradient of its own
    assert storage_key(moved.a) == storage_key(moved.b)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32])
def test_a_gpu_keeps_the_input_of_an_rms_norm_and_a_number_for_every_row(weight: torch.dtype | None) -> None:
    scale = None if weight is None else torch.empty(8, dtype=weight, device="meta", requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.empty(4, 6, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with DeviceKernels("cuda"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = torch.nn.functional.rms_norm(x, (8,), scale)
    rows = [t for t in saved if tuple(t.shape) == (4, 6)]
    if weight == torch.float32:  # no kernel takes two dtypes
        assert len(saved) > 3
        return
    assert [t.dtype for t in rows] == [torch.float32]
    assert sorted(t.numel() for t in saved) == sorted([x.numel(), 24, *([8] if weight else [])])
    out.backward(torch.empty_like(out))
    assert x.grad is not None
