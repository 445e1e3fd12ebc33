"""Measuring takes the memory of the model and of one micro-batch."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.program import capture
from cost_models import parse_devices
from cost_models.graphs import storage_key
from cost_models.measuring import gradients, operator_times, timed_passes
from cost_models.measuring.gradients import give_gradients
from cost_models.memory.graph_bytes import measure_bytes

WIDTH, DEPTH, ROWS = 256, 6, 32
WEIGHT, VALUE = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH  # bytes


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self._known:
                storage, key = tensor.untyped_storage(), storage_key(tensor)
                if not any(r.alias_info for r in func._schema.returns):
                    self._known.add(key)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def model() -> nn.Sequential:
    return nn.Sequential(*itertools.chain(*((nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(DEPTH))))


@given(
    st.lists(st.sampled_from([(3, 4), (7,), (2, 3, 4, 5), (), (40, 3)]), min_size=1, max_size=6),
    st.integers(1, 400),
    st.booleans(),
)
def test_every_parameter_has_a_gradient_of_its_layout_and_large_models_share_the_memory(
    shapes: list[tuple[int, ...]], most: int, channels_last: bool
) -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    if channels_last:
        parameters = [
            nn.Parameter(p.detach().to(memory_format=torch.channels_last)) if p.dim() == 4 else p for p in parameters
        ]
    frozen = nn.Parameter(torch.randn(5), requires_grad=False)
    give_gradients([*parameters, frozen], most)
    assert frozen.grad is None
    for parameter in parameters:
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.stride()) == (parameter.shape, parameter.stride())
    nbytes = {storage_key(p.grad): p.grad.untyped_storage().nbytes() for p in parameters if p.grad is not None}
    assert sum(nbytes.values()) <= max(most, *(p.nbytes for p in parameters))
    if sum(p.nbytes for p in parameters) <= most:  # then each has its own
        for number, parameter in enumerate(parameters):
            assert parameter.grad is not None
            parameter.grad.fill_(number)
        assert all(bool((p.grad == number).all()) for number, p in enumerate(parameters) if p.grad is not None)


def test_measuring_holds_the_model_once_and_the_values_of_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients share room for two of the six layers, as those of a large model share less than the model takes."""
    monkeypatch.setattr(gradients.give_gradients, "__defaults__", (2 * WEIGHT,))
    living = Living()

    class Watched(timed_passes.GraphRunner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with living:
                super().__init__(*args, **kwargs)

        def plain_pass(self, loss: Any) -> tuple[float, float]:
            with living:
                return super().plain_pass(loss)

        def timed_pass(self, loss: Any) -> timed_passes.TimedPass:
            with living:
                return super().timed_pass(loss)

    monkeypatch.setattr(operator_times, "GraphRunner", Watched)
    x = torch.randn(ROWS, WIDTH)
    program = capture(model(), (x,), {})
    (device,) = parse_devices("cpu")
    for rows in (ROWS, ROWS // 2):
        operator_times.measure(program.graph_module, lambda n: [x[:n]], lambda n: None, rows, device, budget=0.01)
        assert living.now == 0  # nothing stays for the next size
    activations = 2 * DEPTH * VALUE
    # The model itself is not copied. A gradient of a weight lives until it was added to the others.
    assert activations <= living.most <= activations + 4 * VALUE + (2 + 1) * WEIGHT < DEPTH * WEIGHT + activations


def test_counting_bytes_keeps_no_values() -> None:
    x = torch.randn(ROWS, WIDTH)
    program = capture(model(), (x,), {})
    with Living() as living:
        counted = measure_bytes(program.graph_module, [x], ROWS, training=True)
    assert sum(nbytes for kept in counted.saved.values() for _, nbytes in kept) >= DEPTH * VALUE
    assert living.most <= 3 * VALUE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_on_a_gpu_takes_a_bounded_part_of_the_gradients() -> None:
    width, depth, rows = 1 << 12, 12, 256
    weight, value = 4 * width * width, 4 * rows * width
    module = nn.Sequential(*(nn.Linear(width, width, bias=False, device="cuda:0") for _ in range(depth)))
    x = torch.randn(rows, width, device="cuda:0")
    program = capture(module, (x,), {})
    (device,) = parse_devices("cuda:0")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    operator_times.measure(program.graph_module, lambda n: [x], lambda n: None, rows, device, budget=0.01)
    more = torch.cuda.max_memory_allocated() - before
    assert more <= gradients._GRADIENT_BYTES + 2 * weight + (depth + 4) * value + (128 << 20) < depth * weight
    assert torch.cuda.memory_allocated() - before <= 128 << 20  # workspaces of libraries
