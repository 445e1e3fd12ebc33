"""A pipelined call as one node of the caller's autograd graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.runtime.run import Run


class PipelinedCall(torch.autograd.Function):
    """The whole pipeline as one node of the caller's autograd graph."""

    @staticmethod
    def apply_to(
        run: Run, indices: tuple[int, ...], parameters: list[nn.Parameter], inputs: list[torch.Tensor]
    ) -> list[Any]:
        """Run all forwards; the flat results, tensors among them carrying this node."""
        tensors = iter(PipelinedCall.apply(run, indices, len(parameters), *parameters, *inputs))
        # The run must not hold what holds the run: nobody but the garbage collector could free that circle.
        results, run.results.values = run.results.values, []
        return [next(tensors) if isinstance(x, torch.Tensor) else x for x in results]

    @staticmethod
    def forward(ctx: Any, run: Run, indices: tuple[int, ...], n_parameters: int, *tensors: torch.Tensor) -> Any:
        results = run.forward()
        found = [(i, x) for i, x in enumerate(results) if isinstance(x, torch.Tensor)]
        ctx.run, ctx.indices = run, indices
        ctx.keys = [id(p) for p in tensors[:n_parameters]]
        ctx.places = [i for i, _ in found]
        ctx.mark_non_differentiable(*[x for i, x in found if not run.results.differentiable[i]])
        ctx.set_materialize_grads(False)
        return tuple(x for _, x in found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run: Run = ctx.run
        whole: list[torch.Tensor | None] = [None] * len(run.results.outputs)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            whole[place] = gradient
        run.backward(whole, torch_private.backward_keeps_graph())
        return _gradients(run, ctx.keys, ctx.indices)


class PipelinedTrainStep(torch.autograd.Function):
    """A training step whose gradients are already there: backward only hands them to the caller's engine, which
    accumulates them and runs the parameters' hooks as always."""

    @staticmethod
    def forward(ctx: Any, run: Run, indices: tuple[int, ...], n_parameters: int, *tensors: torch.Tensor) -> Any:
        loss = run.step()
        ctx.run, ctx.indices, ctx.keys = run, indices, [id(p) for p in tensors[:n_parameters]]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return _gradients(ctx.run, ctx.keys, ctx.indices)


def _gradients(run: Run, keys: list[int], indices: tuple[int, ...]) -> tuple[Any, ...]:
    found = run.executable.collect_gradients()
    return None, None, None, *(found.pop(key, None) for key in keys), *(run.input_gradients(i) for i in indices)
