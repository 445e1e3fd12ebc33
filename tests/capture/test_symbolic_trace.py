"""torch.fx.symbolic_trace stands in for torch.export only where its graph loses nothing of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar import CaptureError
from autopar.capture.program import capture
from autopar.capture.symbolic_trace import symbolically_traced

WIDTH, SAMPLES = 6, 8
Forward = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A batch norm that torch.export refuses in training, so that symbolic_trace is tried."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n = nn.BatchNorm1d(WIDTH, momentum=None)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])
        self.register_buffer("m", torch.zeros(WIDTH))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """What all of them begin with."""
        y: torch.Tensor = self.n(self.a(x))
        return y


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x).relu())


def gated_without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x)
    with torch.no_grad():
        gate = h.sigmoid()
    return net.b(h * gate)


def under_autocast(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = h.float() @ net.b.weight.float()
    return net.b(h) + y.double()


def reads_a_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x) * (1 + net.m))


def counts_in_a_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.m.add_(1)
    return net.b(net.normalised(x) * net.m)


def averages_in_a_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x)
    with torch.no_grad():
        net.m.mul_(0.9).add_(h.amax(0), alpha=0.1)
    return net.b(h - net.m)


def penalises_its_parameters(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x)) + 0.1 * sum(p.pow(2).sum() for p in net.parameters())


def finds_a_parameter_by_name(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x) * dict(net.named_parameters())["scales.0"].exp())


def writes_data(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x)
    h.data.mul_(2)
    return net.b(h)


def writes_in_a_statement(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x) * 1
    h.mul_(2)
    return net.b(h)


def writes_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x) * 1
    y = h.view(-1).mul_(2)
    return net.b(h) + y.sum()


def reads_what_it_wrote(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x) * 1
    y = h.mul_(2)
    return net.b(y + h)


LOSING = (
    gated_without_gradient,
    under_autocast,
    counts_in_a_buffer,
    averages_in_a_buffer,
    penalises_its_parameters,
    finds_a_parameter_by_name,
    writes_data,
    writes_in_a_statement,
    writes_a_view,
    reads_what_it_wrote,
)
KEEPING = (plain, reads_a_buffer)
QUICK = (gated_without_gradient, counts_in_a_buffer, writes_in_a_statement, reads_a_buffer)  # in the default set


def draws_on_no_input(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x) + torch.randn(WIDTH))


def drops_of_a_buffer(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(net.normalised(x) + nn.functional.dropout(net.m + 1, 0.5))


def drops_by_function(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.b(nn.functional.dropout(net.normalised(x), 0.5))


def draws_by_method(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.normalised(x)
    return net.b(h * h.clone().bernoulli_(0.5))


def made(forward: Forward) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(forward).double(), torch.randn(SAMPLES, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("forward", LOSING, ids=lambda f: f.__name__)
def test_what_the_graph_would_lose_is_refused(forward: Forward) -> None:
    net, x = made(forward)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(CaptureError, match="would lose"):
        symbolically_traced(net, (x,), {})
    if forward not in (counts_in_a_buffer, averages_in_a_buffer):  # the capture around it puts contents back
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("forward", KEEPING, ids=lambda f: f.__name__)
def test_what_the_graph_shows_is_traced(forward: Forward) -> None:
    net, x = made(forward)
    symbolically_traced(net, (x,), {})
    assert not capture(net, (x,), {}).uncaptured


@pytest.mark.parametrize(
    "forward",
    [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow, id=f.__name__) for f in (*LOSING, *KEEPING)],
)
def test_models_train_as_they_do_alone(forward: Forward) -> None:
    net, x = made(forward)
    alone = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what runs uncaptured
        pm = autopar.parallelize(net, ["cpu", "cpu"], batch_norm="exact", tune=0)
        for _ in range(3):
            wanted, found = alone(x), pm(x)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
            for module, output in ((alone, wanted), (net, found)):
                module.zero_grad()
                output.pow(2).mean().backward()
            for own, other in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-9)
            for own, other in zip(net.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)
            with torch.no_grad():  # what the caller changes between calls
                for module in (net, alone):
                    module.m.add_(1)
                    module.scales[0].mul_(1.1)


@pytest.mark.parametrize(
    "forward", [draws_on_no_input, drops_of_a_buffer, drops_by_function, draws_by_method], ids=lambda f: f.__name__
)
def test_every_call_draws_new_numbers(forward: Forward) -> None:
    net, x = made(forward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pm = autopar.parallelize(net, ["cpu", "cpu"], tune=0)
        first, second = pm(x), pm(x)
    assert not torch.allclose(first, second)
