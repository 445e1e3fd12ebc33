"""What a step of a model needs, whatever the plan: FLOPs and tokens, the base of model FLOPs utilisation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

import torch

from autopar.analysis.example import Example
from autopar.analysis.operators import on_device
from autopar.capture.repeated_layers.fold import fold
from autopar.costs.cost_table import Calls
from autopar.costs.whole_batch import WholeBatch
from autopar.plan.step_work import StepWork
from cost_models import Cluster, Device
from cost_models.graphs import on_meta, private_copy
from cost_models.hardware.device_specs import DeviceSpec, data_sheet_of, rates_of
from cost_models.hardware.devices import gpu_of
from cost_models.kernels.autocast_casts import AutocastCasts
from cost_models.kernels.efficiency_curves import CONVOLUTIONS
from cost_models.kernels.operator_work import OperatorWork, count

ByPeak = Mapping[tuple[torch.dtype, bool], float]
"""FLOPs by what their peak depends on: the dtype of the products, and whether these are convolutions."""


def model_flops(example: Example, device_type: str | None = None) -> ByPeak:
    """FLOPs of a step on the whole batch: forward and, in training, backward.

    Two for each multiplication and addition, of products alone; nothing is counted twice for recomputation, and a loss
    outside of the model does not count. Convolutions and causal attention count in full, as utilisation is usually
    reported, although some kernels leave products out. `device_type`: that of the devices at hand, on which
    torch.autocast of this thread, if it is on, casts products; None: the products of the program as it is.
    """
    program, meta = example.program, torch.device("meta")
    calls = Calls(program, [on_meta(x) for x in example.leaves])
    with torch.device("cpu"):
        module = private_copy(on_device(program.graph_module, program.device, meta), meta)
    folded = fold(module)
    rows = max(1, program.batch_size)
    casts: AbstractContextManager[object] = nullcontext() if device_type is None else AutocastCasts(device_type)
    with casts:
        work = count(folded.module, rows, training=example.training, inputs=calls.inputs(rows))
        of_end = _work_of_end(example)
    found: dict[tuple[torch.dtype, bool], float] = defaultdict(float)
    for one, copies in (*((one, folded.copies.get(name, 1)) for name, one in work.items()), (of_end, 1)):
        for kernel in (*one.forward, *one.backward):
            if kernel.flops:
                found[kernel.dtype, kernel.kind in CONVOLUTIONS] += kernel.flops * copies
    return dict(found)


def _work_of_end(example: Example) -> OperatorWork:
    """Of the end of the model that runs once on the whole batch. None where its sizes depend on values, as where a mask
    selects what a mean is over: such ends rarely have products."""
    end = WholeBatch.of(replace(example, loss=None, loss_split=None))
    if end is not None:
        with suppress(RuntimeError):  # torch's for what has no result without values
            return end.work()
    return OperatorWork((), ())


def least_seconds(flops: ByPeak, cluster: Cluster) -> float:
    """Seconds that all devices of a cluster need for these FLOPs at the peaks of their data sheets.

    Kernels that compute fewer products than the model has (Winograd's, of causal attention) may take less.
    """
    return _at_peaks(flops, cluster.node) / cluster.nodes


def _at_peaks(flops: ByPeak, specs: Sequence[DeviceSpec]) -> float:
    """Seconds that devices need for these FLOPs together. Raises ValueError for a dtype without a peak."""
    rates = [rates_of(spec) for spec in specs]
    return sum(n / sum(rate.peak(dtype, convolution=conv) for rate in rates) for (dtype, conv), n in flops.items())


def step_work(example: Example, cluster: Cluster, flops: ByPeak | None = None) -> StepWork:
    """What a step of the example's call does on a cluster. `flops`: those of the model, where they are known."""
    flops = model_flops(example) if flops is None else flops
    return StepWork(tokens_of(example), sum(flops.values()), least_seconds(flops, cluster))


def step_work_at_hand(example: Example, devices: Sequence[Device]) -> StepWork:
    """What a step of the example's call does on devices at hand.

    The least time needs the data sheet of every device (`data_sheet_of`): no CPU has one. Workers that share a GPU
    have its peak together. FLOPs are not counted where code runs uncaptured, whose operators cannot be seen, and where
    an operator has no result without values.
    """
    work = StepWork(tokens_of(example))
    if example.program.uncaptured:
        return work
    types = {device.torch_device.type for device in devices}
    try:
        flops = model_flops(example, types.pop() if len(types) == 1 else None)
    except (RuntimeError, ValueError):  # of torch for what has no result without values; sizes that depend on data
        return work
    work = replace(work, flops=sum(flops.values()))
    gpus = {gpu_of(device.name): device.kind for device in devices}
    specs = [spec for kind in gpus.values() if (spec := data_sheet_of(kind)) is not None]
    if len(specs) < len(gpus) or any(dtype not in rates_of(spec).peak_flops for dtype, _ in flops for spec in specs):
        return work
    return replace(work, least_time=_at_peaks(flops, specs))


def tokens_of(example: Example) -> int | None:
    """Entries of the first input of whole numbers with a batch and a length, such as `input_ids`."""
    for leaf, place in zip(example.leaves, example.program.inputs, strict=True):
        whole = isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.dtype == torch.bool)
        if whole and leaf.dim() == 2 and place.batch_dim is not None:
            return int(leaf.numel())
    return None
