"""How a program rounds products of float32 numbers changes neither what is captured nor any setting of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.program import capture
from cost_models.measuring.environment import float32_settings_kept, full_float32, torch_environment

BACKENDS = torch.backends
NEWER = [
    ((BACKENDS.cudnn.conv, "ieee"),),
    ((BACKENDS.cudnn.conv, "ieee"), (BACKENDS.cudnn.rnn, "ieee")),
    ((BACKENDS.mkldnn.conv, "ieee"), (BACKENDS.mkldnn.matmul, "ieee"), (BACKENDS.mkldnn.rnn, "ieee")),
    ((BACKENDS.cuda.matmul, "tf32"), (BACKENDS.cudnn.conv, "tf32")),
]


@pytest.mark.parametrize("settings", NEWER)
def test_a_model_is_captured_whole_and_every_setting_stays(settings: tuple[tuple[object, str], ...]) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)), torch.randn(4, 3, 8, 8)
    with float32_settings_kept():
        for backend, precision in settings:
            backend.fp32_precision = precision  # type: ignore[attr-defined]
        before = torch_environment()
        program = capture(model, (x,), {})
        assert torch_environment() == before
    assert torch.backends.mkldnn.enabled
    assert not program.uncaptured
    assert program.graph_module(x)[0].shape == (4, 5)


@pytest.mark.parametrize("older", [False, True])
def test_programs_may_use_the_older_attributes(older: bool) -> None:
    with float32_settings_kept():
        torch.backends.cudnn.allow_tf32 = older
        try:
            before = torch_environment()
            assert not capture(nn.Linear(4, 4), (torch.randn(4, 4),), {}).uncaptured
            assert torch_environment() == before
            assert torch.backends.cudnn.allow_tf32 == older
        finally:
            torch.backends.cudnn.allow_tf32 = True


def test_settings_that_follow_a_general_one_follow_it_afterwards() -> None:
    with float32_settings_kept():
        torch.backends.fp32_precision = "ieee"
        try:
            before = torch_environment()
            assert not capture(nn.Linear(4, 4), (torch.randn(4, 4),), {}).uncaptured
            assert torch_environment() == before
        finally:
            torch.backends.fp32_precision = "none"


class WithoutCudnn(nn.Module):
    """Runs uncaptured, and reads torch's older settings, as transformers' CTC losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            torch.get_float32_matmul_precision()
            return self.a(x) if x.sum() > -1e9 else self.b(x)


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("tf32", [False, True])
def test_code_that_runs_uncaptured_may_read_the_older_settings(tf32: bool, matmul: str) -> None:
    model, x = WithoutCudnn(), torch.randn(8, 4)
    with float32_settings_kept():
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_float32_matmul_precision(matmul)
        try:
            before = torch_environment()
            pm = autopar.parallelize(model, ["cpu"], example_args=(x,), tune=0)
            torch.testing.assert_close(pm(x), model(x))
            with full_float32():
                assert model(x).shape == x.shape
            assert torch_environment() == before
            assert torch.backends.cudnn.allow_tf32 == tf32
            assert torch.get_float32_matmul_precision() == matmul
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = True
