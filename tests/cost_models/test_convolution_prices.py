"""ResNet-50 from data sheets, against what others have measured and published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from autopar.analysis.operators import on_device
from autopar.capture.program import capture
from cost_models import efficiency_of, known_devices, rates_of
from cost_models.kernels.kernel import Kernel
from cost_models.kernels.operator_work import OperatorWork, count, count_call
from cost_models.kernels.roofline import busy_seconds

NVIDIA = "github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, container 21.03"
OTHER = "github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp, channels first"
PUBLISHED = [  # device, training, dtype, images, seconds, source
    ("A100-80", True, torch.float32, 256, 256 / 938, NVIDIA + ", TF32"),
    ("V100", True, torch.float32, 256, 256 / 367, NVIDIA),
    ("V100", True, torch.float32, 128, 0.34237, OTHER),
    ("V100", True, torch.float16, 128, 0.15220, OTHER),  # under autocast
    ("V100", False, torch.float32, 64, 0.0554, NVIDIA),
    ("V100", False, torch.float32, 256, 0.21448, NVIDIA),
    ("T4", False, torch.float32, 64, 0.15273, NVIDIA),
    ("T4", False, torch.float32, 128, 0.30926, NVIDIA),
]

aten = torch.ops.aten


@pytest.fixture(scope="module")
def works() -> Mapping[tuple[bool, torch.dtype, int], Mapping[str, OperatorWork]]:
    """The kernels of every case."""
    return {case: resnet_50(*case) for case in {row[1:4] for row in PUBLISHED}}


def resnet_50(training: bool, dtype: torch.dtype, images: int) -> Mapping[str, OperatorWork]:
    meta = torch.device("meta")
    with meta:
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).to(dtype).train(training)
        pixels = torch.empty(images, 3, 224, 224, dtype=dtype)
    program = capture(model, (), {"pixel_values": pixels})
    return count(on_device(program.graph_module, program.device, meta), images, training=training, inputs=[pixels])


def seconds(kernels: Iterator[Kernel] | list[Kernel], device: str) -> float:
    spec = known_devices()[device]
    return sum(busy_seconds(kernel, rates_of(spec), efficiency_of(spec)) for kernel in kernels)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("device", "training", "dtype", "images", "published", "source"), PUBLISHED)
def test_resnet_50_takes_about_what_was_published(
    works: Mapping[tuple[bool, torch.dtype, int], Mapping[str, OperatorWork]],
    device: str,
    training: bool,
    dtype: torch.dtype,
    images: int,
    published: float,
    source: str,
) -> None:
    """None of these was fitted: the constants are those of an H200's kernels."""
    kernels = (k for work in works[training, dtype, images].values() for k in (*work.forward, *work.backward))
    assert seconds(kernels, device) == pytest.approx(published, rel=0.12), source


def convolution(window: int, stride: int = 1, groups: int = 1, dtype: torch.dtype = torch.float32) -> list[Kernel]:
    """Forward and backward over 256 channels of 28 x 28."""
    x = torch.empty(64, 256, 28, 28, dtype=dtype, device="meta", requires_grad=True)
    weight = torch.empty(256, 256 // groups, window, window, dtype=dtype, device="meta", requires_grad=True)
    padding = [window // 2] * 2
    call = (x, weight, None, [stride, stride], padding, [1, 1], False, [0, 0], groups)
    _, work = count_call(aten.convolution.default, call)
    return [*work.forward, *work.backward]


def test_small_windows_that_move_by_one_need_fewer_products_on_units_for_single_ones() -> None:
    def rate(kernels: list[Kernel]) -> float:
        kernels = [k for k in kernels if k.flops]
        return sum(k.flops for k in kernels) / seconds(kernels, "V100")

    small = rate(convolution(3))
    assert small == pytest.approx(36 / 16 * rate(convolution(3, stride=2)), rel=0.05)  # but for their ramps
    assert small > 2 * max(rate(convolution(5)), rate(convolution(1)))
    assert not any(kernel.winograd for kernel in convolution(3, groups=2))


def test_a_users_own_convolution_may_call_its_arguments_as_it_likes() -> None:
    @torch.library.custom_op("autopar_tests::causal_convolution", mutates_args=())
    def causal_convolution(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        return x * taps

    @causal_convolution.register_fake
    def _(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    x, taps = (torch.empty(4, 8, 16, device="meta") for _ in range(2))
    _, work = count_call(torch.ops.autopar_tests.causal_convolution.default, (x, taps))
    assert [kernel.winograd for kernel in work.forward] == [False]


def test_convolutions_follow_torchs_setting_for_tf32() -> None:
    kernels = convolution(1)
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    try:
        convolutions.fp32_precision = "tf32"
        rounded, without = seconds(kernels, "A100-80"), seconds(kernels, "V100")
        convolutions.fp32_precision = "ieee"
        assert seconds(kernels, "A100-80") > 1.5 * rounded
        assert seconds(kernels, "V100") == without  # has no such units
    finally:
        convolutions.fp32_precision = before


@pytest.mark.parametrize("gradient", [False, True])
def test_few_channels_slow_batch_norm_in_training_and_not_in_evaluation(gradient: bool) -> None:
    def taken(channels: int, training: bool) -> float:
        x = torch.empty(64, channels, 100, 16384 // channels, device="meta", requires_grad=gradient)
        own = [torch.empty(channels, device="meta") for _ in range(4)]
        _, work = count_call(aten.native_batch_norm.default, (x, *own, training, 0.1, 1e-5))
        return seconds(list(work.backward if gradient and training else work.forward), "H200")

    assert taken(64, True) > 1.8 * taken(128, True)
    assert taken(1024, True) == pytest.approx(taken(512, True), rel=0.01)
    assert taken(64, False) == pytest.approx(taken(1024, False), rel=0.01)
    assert taken(1024, True) > 2 * taken(1024, False)
