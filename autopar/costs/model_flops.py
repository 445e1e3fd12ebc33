"""What a step of a model needs, whatever the plan: FLOPs and tokens, the base of model FLOPs utilisation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from autopar.analysis.example import Example
from autopar.analysis.operators import on_device
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.cost_table import Calls
from autopar.plan.step_work import StepWork
from cost_models import Cluster
from cost_models.graphs import on_meta, private_copy
from cost_models.hardware.device_specs import rates_of
from cost_models.kernels.operator_work import count


def model_flops(example: Example) -> Mapping[torch.dtype, float]:
    """FLOPs of a step on the whole batch by the dtype of the products: forward and, in training, backward.

    Two for each multiplication and addition, of products alone; nothing is counted twice for recomputation, and a loss
    outside of the model does not count.
    """
    program, meta = example.program, torch.device("meta")
    calls = Calls(program, [on_meta(x) for x in example.leaves])
    with torch.device("cpu"):
        module = private_copy(on_device(program.graph_module, program.device, meta), meta)
    folded = fold(module)
    rows = max(1, program.batch_size)
    work = count(folded.module, rows, training=example.training, inputs=calls.inputs(rows))
    found: dict[torch.dtype, float] = defaultdict(float)
    for name, one in work.items():
        for kernel in (*one.forward, *one.backward):
            if kernel.flops:
                found[kernel.dtype] += kernel.flops * folded.copies.get(name, 1)
    return dict(found)


def least_seconds(flops: Mapping[torch.dtype, float], cluster: Cluster) -> float:
    """Seconds that all devices of a cluster need for these FLOPs at the peaks of their data sheets."""
    rates = [rates_of(spec) for spec in cluster.node]
    together = {dtype: cluster.nodes * sum(rate.peak(dtype) for rate in rates) for dtype in flops}
    return sum(n / together[dtype] for dtype, n in flops.items())


def step_work(
    example: Example, cluster: Cluster | None = None, flops: Mapping[torch.dtype, float] | None = None
) -> StepWork:
    """What a step of the example's call does. `cluster`: the devices, where data sheets give their peaks; without,
    FLOPs are not counted. `flops`: those of the model, where they are known."""
    if cluster is None:
        return StepWork(tokens=tokens_of(example))
    flops = model_flops(example) if flops is None else flops
    return StepWork(tokens_of(example), sum(flops.values()), least_seconds(flops, cluster))


def tokens_of(example: Example) -> int | None:
    """Entries of the first input of whole numbers with a batch and a length, such as `input_ids`."""
    for leaf, place in zip(example.leaves, example.program.inputs, strict=True):
        whole = isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.dtype == torch.bool)
        if whole and leaf.dim() == 2 and place.batch_dim is not None:
            return int(leaf.numel())
    return None
