"""The devices of SimuMax's table of B200, and what connects them, as its authors measured them: single operators and
collectives, no training steps (configs/system/b200_bf16_ceperm.json, github.com/MooreThreads/SimuMax, 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.published_runs.models import LlamaSizes
from cost_models.hardware.device_specs import device_spec
from cost_models.hardware.networks import Network
from cost_models.kernels.efficiency_curves import ComputeCurve, Efficiency

_PEAK = 2250e12  # FLOP/s; the file gives fractions of it

_PRODUCTS = (0.4867, 0.4829, 0.4536, 0.4847, 0.4742, 0.4594, 0.4874, 0.4710, 0.4548)
"""`matmul` of 10^12 FLOPs and more: perceptron and head of Llama-3 70B on 4096 tokens, each forward, for the gradient
of the input, and for that of the weight. Smaller ones reach 0.4 to 0.65, by shape."""

_ATTENTION = {8: (0.3102, 0.6586), 16: (0.5783, 0.7553), 32: (0.7318, 0.7963), 64: (0.8715, 0.7294)}
"""Heads: `sdp_fwd` and `sdp_bwd` of 4096 tokens, heads of 128, 8 to a key, `qkv_contiguous`. The FLOPs include what a
causal mask hides."""


def _attention_curves() -> tuple[ComputeCurve, ComputeCurve]:
    """Forward and backward. Few heads leave units idle; a ramp models that."""
    products = {heads: 4 * 4096**2 * 128 * heads for heads in _ATTENTION}  # two, of a multiplication and an addition
    curves = []
    for part, factor in ((0, 1.0), (1, 2.5)):  # the backward has five
        samples = [
            (factor * flops / 2, 1.0, factor * flops / (_ATTENTION[heads][part] * _PEAK))
            for heads, flops in products.items()
        ]
        curves.append(ComputeCurve.fit(samples, _PEAK, float("inf")))
    return curves[0], curves[1]


def _device() -> Any:
    usual = device_spec("B200")
    product, copy = sum(_PRODUCTS) / len(_PRODUCTS), 0.666
    curves = Efficiency.default(product, copy).to_json()
    names = ("attention", "attention_backward")
    curves["compute"] |= {n: dataclasses.asdict(curve) for n, curve in zip(names, _attention_curves(), strict=True)}
    return dataclasses.replace(
        usual,
        name="B200 of SimuMax",
        flops_efficiency=product,
        bandwidth_efficiency=copy,
        units=0,
        curves=curves,
        sources={
            "flops_efficiency": "mean of its `matmul` of 10^12 FLOPs and more",
            "bandwidth_efficiency": "its `bandwidth.default`",
            "curves": "its `sdp_fwd` and `sdp_bwd` by number of heads",
        },
    )


B200 = _device()

NVLINK = Network(
    "NVLink5 of SimuMax",
    latency=8.6e-6,
    line_rate=900 * 2**30,
    efficiency=0.673,
    start=24.3e-6,
    sources={
        "latency": "`latency_us` of all_gather and reduce_scatter, 9.18 and 8.03, for each of n - 1 steps: a line "
        "through nccl-tests of 1 MB to 8 GB on 8 devices",
        "line_rate": "`gbps`, in GiB",
        "efficiency": "`efficient_factor` of both, 0.6735 and 0.6731, of the same line",
        "start": "`fixed_latency_us` of both, 23.1 and 25.6: what collectives of 32 MB took beyond that line on 2, 4 "
        "and 8 devices as a model calls them (simu_tools/efficency_test)",
    },
)
"""Its runs with tensor parallelism cut the sequence, too, and their optimizer's states: all their collectives gather or
scatter. They have no all-reduce; one would take 5.5 us a step, at 0.742 of the line rate."""

_CUBLAS = 32 << 20
"""Bytes of Transformer Engine's own workspace for cuBLAS, from Hopper on (`get_cublas_workspace_size_bytes` of
transformer_engine/pytorch/module/base.py, 2025)."""


def library_bytes(model: LlamaSizes, tensor: int) -> int:
    """Bytes that Transformer Engine and Megatron-LM keep on each of `tensor` devices, whatever the plan.

    Gradients of weights are added to float32 sums within the products. Autograd gets a placeholder in their place: one
    for each shape of a weight, in bfloat16, which is kept (`get_dummy_wgrad` of transformer_engine/pytorch/module/
    base.py). With the sequence cut, the head's input is gathered into a buffer that is kept, too (`GlobalMemoryBuffer`
    of megatron/core/utils.py).
    """
    h, kv = model.hidden, model.hidden // model.heads * model.kv_heads
    weights = h * (h + 2 * kv) + h * h + 2 * h * model.inner + model.inner * h  # q, k, v; out; gate, up; down
    gathered = model.seq * h if tensor > 1 else 0
    return 2 * (weights // tensor + gathered) + _CUBLAS
