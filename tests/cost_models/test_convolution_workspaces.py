"""Convolutions on a GPU hold the workspaces of cuDNN, which are asked for by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convolutions import CONVOLUTIONS, predicted
from torch import fx, nn

from cost_models.measuring import convolution_workspaces
from cost_models.measuring.convolution_workspaces import workspaces_on
from cost_models.memory.convolution_copies import BACKWARD
from cost_models.memory.micro_batch_memory import PassConditions, TensorSpec, micro_batch_memory

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(torch.backends.cudnn.is_available(), reason="torch has cuDNN")
def test_without_cudnn_nothing_is_asked() -> None:
    for call in (CONVOLUTIONS["groups"].forward, CONVOLUTIONS["groups"].backward):
        assert predicted(call("meta"), workspaces_on(GPU)) > 0


def test_workspaces_add_to_the_passes_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each while its kernel runs: that of the gradient of a weight beside what the gradient of the input needs."""
    bytes_of = {"forward": 3 << 20, "input": 5 << 20, "weight": 7 << 20}

    def workspace(func: Any, args: Any, gpu: torch.device) -> int:
        assert gpu == GPU
        return bytes_of["forward" if func is not BACKWARD else "input" if args[-1][0] else "weight"]

    monkeypatch.setattr(convolution_workspaces, "_workspace", workspace)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    module = fx.symbolic_trace(nn.Conv2d(4, 4, 3, padding=1))
    x = TensorSpec.of(torch.empty(2, 4, 8, 8, device="meta").requires_grad_())
    without, with_ = (
        micro_batch_memory(module, PassConditions((x,), device_type="cuda"), workspaces=workspaces)
        for workspaces in (None, workspaces_on(GPU))
    )
    assert with_.forward.highest == without.forward.left + bytes_of["forward"]
    (before,), (after,) = without.first_backward, with_.first_backward
    assert bytes_of["weight"] <= after.highest <= before.highest + bytes_of["weight"]
    assert (after.left, with_.forward.left) == (before.left, without.forward.left)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_peak_of_a_convolution_is_that_of_its_workspace(name: str) -> None:
    for call in (CONVOLUTIONS[name].forward, CONVOLUTIONS[name].backward):
        here = call("cuda")
        here()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        results = here()
        most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del results
        found = predicted(call("meta"), workspaces_on(GPU))
        assert 0.99 * most <= found <= 1.02 * most + 4096
