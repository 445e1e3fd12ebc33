"""What a stage computes from sizes alone is taken out of its graph, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import gpt2, llama, t5, tokens
from torch import fx, nn

import autopar
from autopar import Plan
from autopar.analysis.operators import compute_nodes
from autopar.capture.program import capture
from autopar.lower.size_values import split_by_sizes, values_of_sizes
from autopar.runtime.stages.stage_code import KeptSizeValues


class Attends(nn.Module):
    """Masks by position; what happens to the mask besides, a test says."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.scale = nn.Linear(6, 6)
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        at = torch.arange(6).expand(x.shape[0], 6).clone()
        mask = torch.where(at % 2 == 0, 1.0, 0.5)
        y = self.scale(x) * mask
        return y if self.use is None else (y, self.use(mask, y))


def graph_of(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    return capture(model, args, {}).graph_module


def runs_alike(module: fx.GraphModule, *flat: torch.Tensor) -> None:
    split = split_by_sizes(module)
    assert split is not None
    kept = KeptSizeValues(split)
    for rows in (2, 4, 2):
        own = [x[:rows] for x in flat]
        expected, found = module(*own), kept(*own)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama])
def test_positions_and_masks_of_language_models_leave_the_graph(build: Callable[[], nn.Module]) -> None:
    module = graph_of(build().train(), tokens(4))
    split = split_by_sizes(module)
    assert split is not None
    assert len(compute_nodes(split.rest.graph)) < len(compute_nodes(module.graph))
    runs_alike(module, tokens(4))


def test_nothing_is_taken_out_that_depends_on_values() -> None:
    module = graph_of(Attends(), torch.randn(4, 6))
    own = values_of_sizes(module)
    assert {"arange", "where"} <= {str(node.target).split(".")[1] for node in own}
    assert not any(node.meta["val"].requires_grad for node in own)
    split = split_by_sizes(module)
    assert split is not None
    assert len(split.sizes) == 1
    assert [n for n in split.rest.graph.nodes if "arange" in str(n.target)] == []
    runs_alike(module, torch.randn(4, 6))
    assert split_by_sizes(graph_of(nn.Linear(6, 6), torch.randn(4, 6))) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda mask, y: mask,  # the caller may write it
        lambda mask, y: mask[:, 1:],
        lambda mask, y: mask.add_(1) + y,
        lambda mask, y: mask[:, :2].mul_(3) + y[:, :2],
        lambda mask, y: torch.rand(mask.shape[0]) + y[:, 0],
    ],
    ids=["returned", "a view returned", "written", "a view written", "random"],
)
def test_what_is_written_random_or_returned_is_computed_anew(use: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    module = graph_of(Attends(use), torch.randn(4, 6))
    named = {node.name for node in values_of_sizes(module)}
    assert not {name for name in named if name.startswith(("add_", "mul_", "rand"))}
    assert ("where" in named) == ("rand" in {node.name for node in module.graph.nodes}), "the mask itself is exposed"
    split = split_by_sizes(module)
    code = module if split is None else KeptSizeValues(split)
    for _ in range(2):
        x = torch.randn(4, 6)
        torch.manual_seed(0)
        expected = module(x)
        torch.manual_seed(0)
        found = code(x)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        found[1].zero_()  # the caller's own


def test_kept_values_serve_inference_and_training_in_any_order() -> None:
    model = Attends()
    pm = autopar.parallelize(model, ["cpu"], plan=Plan.from_split({"": 0}, n_microbatches=2))
    x = torch.randn(4, 6)
    with torch.inference_mode():
        inferred = pm(x)
    pm(x).sum().backward()
    expected = torch.autograd.grad(model(x).sum(), [model.scale.weight])[0]
    torch.testing.assert_close(model.scale.weight.grad, expected)
    torch.testing.assert_close(inferred, model(x).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(pm(x), model(x))


def test_another_default_dtype_has_values_of_its_own() -> None:
    split = split_by_sizes(graph_of(Attends(), torch.randn(4, 6)))
    assert split is not None
    kept, x = KeptSizeValues(split), torch.randn(4, 6)
    kept(x)
    torch.set_default_dtype(torch.float64)
    try:
        kept(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(kept._known) == 2


def test_values_of_a_few_sizes_are_kept() -> None:
    split = split_by_sizes(graph_of(Attends(), torch.randn(4, 6)))
    assert split is not None
    kept = KeptSizeValues(split)
    for rows in (2, 3, 4, 5, 6, 7, 2):
        kept(torch.randn(rows, 6))
    assert 1 <= len(kept._known) <= 4


@pytest.mark.slow
def test_an_encoder_and_decoder_keep_theirs() -> None:
    model = t5().train()
    module = capture(model, (), {"input_ids": tokens(4), "decoder_input_ids": tokens(4)}).graph_module
    runs_alike(module, tokens(4), tokens(4))
