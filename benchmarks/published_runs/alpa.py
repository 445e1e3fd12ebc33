"""The plans among which the systems of Alpa's report chose: the report gives their speed, but not the plans.

Each column is priced as the fastest of a set of plans by hand that fit the memory, all with full recomputation:

    megatron     tensor within a node x pipeline x data, powers of two, no ZeRO
    intra_only   no pipeline; tensor over any number of devices, ZeRO 0, 1 and 3
    inter_only   a pipeline of single devices, of whole layers
    alpa         all of these together; Alpa's own stages may also differ in their meshes and cut layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from benchmarks.published_runs.cases import Degrees
from benchmarks.published_runs.models import GPTSizes

ALPA_GPT: dict[float, tuple[int, int, int]] = {  # billion parameters: layers, hidden, heads
    0.355: (24, 1024, 16),
    0.76: (24, 1536, 16),
    1.3: (24, 2048, 32),
    2.6: (32, 2560, 32),
    6.7: (32, 4096, 32),
    15: (48, 5120, 40),
    39: (48, 8192, 64),
}
"""benchmark/alpa/paper_manual_gpt_suite.py of github.com/alpa-projects/alpa, which trains 1024 samples of 1024 tokens a
step and always recomputes."""

NODE = 8
_MICRO_BATCHES = (1, 2, 4, 8, 16)  # samples, ascending: they need more and more memory


def _plans(
    gpus: int, model: GPTSizes, batch: int, tensors: Iterator[int], pipelines: Iterable[int], zeros: tuple[int, ...]
) -> Iterator[Degrees]:
    for tensor in tensors:
        for pipeline in pipelines:
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or not data or model.heads % tensor or pipeline > model.layers:
                continue
            for zero in zeros if data > 1 else (0,):
                degrees = {"tensor": tensor, "pipeline": pipeline, "data": data, "recompute": "full", "zero": zero}
                sizes = [n for n in _MICRO_BATCHES if batch % (data * n) == 0]
                yield from ({**degrees, "micro_batch": n} for n in sizes)


def _powers(most: int) -> Iterator[int]:
    return (1 << shift for shift in range(most.bit_length()) if 1 << shift <= most)


def _megatron(gpus: int, model: GPTSizes, batch: int) -> Iterator[Degrees]:
    return _plans(gpus, model, batch, _powers(min(gpus, NODE)), [*_powers(gpus)], (0,))


def _intra_only(gpus: int, model: GPTSizes, batch: int) -> Iterator[Degrees]:
    return _plans(gpus, model, batch, _powers(gpus), [1], (0, 1, 3))


def _inter_only(gpus: int, model: GPTSizes, batch: int) -> Iterator[Degrees]:
    return _plans(gpus, model, batch, _powers(1), [gpus], (0,))


def _alpa(gpus: int, model: GPTSizes, batch: int) -> Iterator[Degrees]:
    for plans in (_megatron, _intra_only, _inter_only):
        yield from plans(gpus, model, batch)


ALPA_PLANS: Mapping[str, Callable[[int, GPTSizes, int], Iterator[Degrees]]] = {
    "megatron": _megatron,
    "intra_only": _intra_only,
    "inter_only": _inter_only,
    "alpa": _alpa,
}
