"""Groups of operators that run again for their backward: same numbers, same parameters, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from cost_models.memory.recomputation import recomputing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.tanh(x @ self.w)
        b = torch.sin(x)
        c = torch.exp(a * self.w.sum())
        return c + b, a


@pytest.mark.parametrize("groups", [[], [["tanh", "matmul"]], [["tanh", "mul", "exp", "sum_1"], ["sin"]]])
def test_a_graph_with_groups_that_run_again_computes_the_same(groups: list[list[str]]) -> None:
    plain = fx.symbolic_trace(Net())
    again = recomputing(fx.GraphModule(plain, plain.graph), groups)
    gradients = []
    for module in (plain, again):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        first, second = module(x)
        gradients.append(torch.autograd.grad((first * second).sum(), [x, *module.parameters()]))
    assert [id(p) for p in again.parameters()] == [id(plain.w)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["tanh"], ["tanh"]], "'tanh' is in two groups"),
        ([["x"]], "'x' is no operator"),
        ([["matmul", "exp"]], "'matmul' is read before"),
    ],
)
def test_groups_that_cannot_run_at_once_are_refused(groups: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recomputing(fx.symbolic_trace(Net()), groups)
