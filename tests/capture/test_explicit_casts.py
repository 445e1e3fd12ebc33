"""Casts in the place of torch.autocast: an operator with them computes what it computes under autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_calls import Call, Sizes
from rule_examples import EXAMPLES
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.mode_blocks.casts import Casts, casts_of
from autopar.capture.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from cost_models.measuring.autocast import Autocast

SIZES = Sizes(4, 6, 8, 4)
UNKNOWN = {"bincount", "normal", "_grouped_mm"}  # no result, or another dtype, where tensors have no values
CALLS = [
    (f"{name}-{i}", made)
    for name, several in sorted(EXAMPLES.items())
    for i, made in enumerate(several)
    if "empty" not in name and name not in UNKNOWN
]
DTYPES = [
    pytest.param((torch.float32,), id="float32"),
    pytest.param((torch.bfloat16, torch.float32), id="bfloat16-float32", marks=pytest.mark.slow),
    pytest.param((torch.float32, torch.bfloat16), id="float32-bfloat16", marks=pytest.mark.slow),
]
BLOCKS = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu", "aten::gru_cell"}  # no casts replace autocast


def in_dtypes(made: Call, dtypes: tuple[torch.dtype, ...]) -> Call:
    """The call with its tensors in these dtypes, in turn."""
    following = itertools.cycle(dtypes)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(next(following))
        return leaf

    target, args, kwargs = made
    args, kwargs = tree_map(one, (args, kwargs))
    return target, args, kwargs


def without_values(tree: Any, mode: FakeTensorMode) -> Any:
    return tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def computed(
    target: Any, args: Any, kwargs: Any, casts: Casts | None, *, gradients: bool = True
) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Results and gradients, under autocast or with casts."""
    leaves, spec = tree_flatten((args, kwargs))
    own = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
    inputs = [x.requires_grad_(gradients) for x in own if isinstance(x, torch.Tensor) and x.is_floating_point()]
    read = [x.clone() if isinstance(x, torch.Tensor) else x for x in own]  # operators in place do not write leaves
    torch.manual_seed(0)
    if casts is None:
        args, kwargs = tree_unflatten(read, spec)
        with torch.autocast("cpu", torch.bfloat16):
            result = target(*args, **kwargs)
    else:
        args, kwargs = tree_unflatten(
            [x.to(casts.dtypes[i]) if i in casts.dtypes else x for i, x in enumerate(read)], spec
        )
        result = target(*args, **kwargs, **({} if casts.dtype is None else {"dtype": casts.dtype}))
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    trained = [x for x in results if x.requires_grad]
    if not trained:
        return results, []
    return results, list(torch.autograd.grad([x.double().sum() for x in trained], inputs, allow_unused=True))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("made", [made for _, made in CALLS], ids=[name for name, _ in CALLS])
def test_casts_compute_what_autocast_does(made: Callable[[Sizes], Call], dtypes: tuple[torch.dtype, ...]) -> None:
    torch.manual_seed(0)
    target, args, kwargs = in_dtypes(made(SIZES), dtypes)
    differentiable = True
    try:
        expected, gradients = computed(target, args, kwargs, None)
    except RuntimeError:
        differentiable = False
        try:
            expected, gradients = computed(target, args, kwargs, None, gradients=False)
        except RuntimeError as error:
            pytest.skip(f"torch has no such operator: {error}")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        result, casts = casts_of(target, *without_values((args, kwargs), mode), Autocast("cpu", torch.bfloat16))
    assert [x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor)] == [x.dtype for x in expected]
    if casts is None:
        assert target._schema.name in BLOCKS
        return
    found, own_gradients = computed(target, args, kwargs, casts, gradients=differentiable)
    for one, other in zip([*found, *own_gradients], [*expected, *gradients], strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
