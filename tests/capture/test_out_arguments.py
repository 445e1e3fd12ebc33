"""What a model writes with `out=` is written by its captured graph, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same_outputs
from torch import nn

import autopar
from autopar import AutoparWarning, Plan
from autopar.capture import program as program_room
from autopar.capture.export import trace
from autopar.capture.program import capture


class WritesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.inner.register_buffer("mean", torch.zeros(3))
        self.inner.forward = lambda x: x + torch.mean(x, 0, out=self.inner.mean)  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_buffer_written_with_out_is_written_by_the_captured_model(recwarn: pytest.WarningsRecorder) -> None:
    model, x = WritesOut(), torch.randn(4, 3)
    program = capture(model, (x,), {})
    assert torch.count_nonzero(model.inner.mean) == 0, "capturing leaves the buffer as it was"
    assert torch.equal(program.graph_module(x)[0], x + x.mean(0))
    assert torch.equal(model.inner.mean, x.mean(0))
    assert not [w for w in recwarn if "out=" in str(w.message)]


def test_a_write_with_out_that_a_capture_loses_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced_without_out(*args: Any, **kwargs: Any) -> Any:
        traced = trace(*args, **kwargs)
        (writer,) = (n for n in traced.module.graph.nodes if "out" in n.kwargs)
        writer.target, writer.kwargs = torch.ops.aten.mean.dim, {}
        return traced

    monkeypatch.setattr(program_room, "trace", traced_without_out)
    with pytest.warns(AutoparWarning, match=r"'inner' writes into a tensor with out=.*copy_\(\)") as caught:
        capture(WritesOut(), (torch.randn(4, 3),), {})
    assert [w.filename for w in caught if "out=" in str(w.message)] == [__file__]


class WritesTwice(nn.Module):
    """An operator with two results, written with `out=` into tensors that others read before and afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        values = h.detach()
        largest, places = torch.ones_like(values[:, :1]), torch.ones_like(values[:, :1], dtype=torch.long)
        before = largest + places
        torch.max(values, 1, keepdim=True, out=(largest, places))
        halves = torch.empty_like(values)
        torch.mul(values, 0.5, out=halves)
        return self.last(h + values + before + largest * places + halves)


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_what_reads_a_tensor_after_a_write_with_out_reads_the_new_values_and_no_others(n_microbatches: int) -> None:
    plain = WritesTwice()
    plan = Plan.from_split({"first": 0, "last": 1}, n_microbatches=n_microbatches)
    pm = autopar.parallelize(copy.deepcopy(plain), ["cpu", "cpu"], plan=plan)
    x = torch.randn(6, 4)
    assert_same_outputs(pm(x), plain(x))
    pm.close()


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_write_inside_of_no_grad_is_not_lost(norm: Any, recwarn: pytest.WarningsRecorder) -> None:
    capture(nn.Sequential(nn.Linear(8, 16), norm(nn.Linear(16, 16))), (torch.randn(6, 8),), {})
    assert not [w for w in recwarn if "out=" in str(w.message)]
