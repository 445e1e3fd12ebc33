"""Results on the meta device that are repeated are those that torch works out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.graphs import storage_key, tensors_in
from cost_models.memory.meta_results import MetaResults


class Compared(TorchDispatchMode):
    """Calls every operator twice by `MetaResults`, and compares with what torch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.results, self.repeated = MetaResults(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return self.results.of(func, args, kwargs)
        expected = func(*args, **kwargs)
        for _ in range(2):
            found = self.results.of(func, args, kwargs)
            assert type(found) is type(expected)
            for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        given = {storage_key(t) for t in tensors_in((args, tuple(kwargs.values())))}
        is_view = any(storage_key(t) in given for t in tensors_in(expected))
        assert is_view == any(storage_key(t) in given for t in tensors_in(found))
        self.repeated += len({storage_key(t) for t in tensors_in(found)} - given)
        return found


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, x.shape[-1:], bias, bias)
    y = F.linear(y, weight, bias).transpose(0, 1)
    scores = (y @ y.transpose(1, 2)).softmax(-1).masked_fill(torch.ones(1, device="meta") > 0, 0.0)
    dropped = torch.native_dropout(scores @ y, 0.5, True)[0]
    return x + F.gelu(dropped).transpose(0, 1).contiguous() * 2 + x.sum(0, keepdim=True).expand_as(x)


def test_repeated_results_are_those_of_torch() -> None:
    with torch.device("meta"):
        x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 8), (8, 8), (8,)))
    with Compared() as mode:
        for _ in range(2):
            F.cross_entropy(
                layer(x, weight, bias).flatten(0, 1), torch.zeros(12, dtype=torch.long, device="meta")
            ).backward()
    assert mode.repeated > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_numbers_of_other_types_are_other_calls(dtype: torch.dtype) -> None:
    results, add = MetaResults(), torch.ops.aten.add.Tensor
    x = torch.ones(2, dtype=dtype, device="meta")
    for other in (1, 1.0, True, 1, 1.0):
        assert results.of(add, (x, other), {}).dtype == (x + other).dtype


def test_the_default_dtype_counts() -> None:
    results, divide = MetaResults(), torch.ops.aten.div.Tensor
    x = torch.ones(2, dtype=torch.int64, device="meta")
    assert results.of(divide, (x, x), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert results.of(divide, (x, x), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_every_result_has_a_storage_of_its_own() -> None:
    results, x = MetaResults(), torch.ones(2, 3, device="meta")
    made = [results.of(torch.ops.aten.exp.default, (x,), {}) for _ in range(3)]
    assert len({storage_key(t) for t in [x, *made]}) == 4
    assert storage_key(results.of(torch.ops.aten.view.default, (x, [6]), {})) == storage_key(x)


def test_what_depends_on_values_is_called_each_time() -> None:
    results, x = MetaResults(), torch.ones(3)
    assert [results.of(torch.ops.aten.add.Tensor, (x, n), {}).sum().item() for n in (1, 1)] == [6.0, 6.0]
    for _ in range(2):
        with pytest.raises((RuntimeError, NotImplementedError)):
            results.of(torch.ops.aten.nonzero.default, (x.to("meta"),), {})
