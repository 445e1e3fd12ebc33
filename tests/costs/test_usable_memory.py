"""Memory that plans may use: the same room is left on measured devices and on devices from data sheets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.analysis.batching import study
from autopar.capture.program import capture
from autopar.costs.estimated import Estimated
from autopar.costs.measured import Measured
from cost_models import Cluster, Device
from cost_models.memory.training_memory import usable_memory


@pytest.mark.parametrize(("kind", "device_type"), [("A100-80", "cuda"), ("cpu", "cpu")])
def test_measured_devices_leave_the_room_that_estimated_ones_leave(kind: str, device_type: str) -> None:
    x = torch.randn(4, 8)
    program = capture(nn.Linear(8, 8), (x,), {})
    batching = study(program, [x])
    spec = Cluster.preset(kind).node[0]
    at_hand = Device("one", torch.device(device_type), kind, int(spec.memory), threads=1)
    measured = Measured(program, batching, [x], [at_hand], training=True)
    estimated = Estimated(program, batching, [x], Cluster.preset(kind), training=True)
    expected = usable_memory(spec.memory, device_type)
    assert [source.devices[0].memory for source in (measured, estimated)] == [expected, expected]
    assert (expected < spec.memory) == (device_type == "cuda")
