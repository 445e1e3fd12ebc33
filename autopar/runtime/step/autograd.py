"""A pipelined call as one node of the caller's autograd graph.

```
   caller's graph:   inputs, parameters ──> PipelinedCall ──> outputs ──> the caller's loss
                                              forward:  Run.forward
                                              backward: Run.backward, then gradients of all parameters and inputs
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import AutoparError
from autopar.runtime.step.run import Run


def call(run: Run, leaves: Sequence[Any]) -> list[Any]:
    """Run all forwards on the flat inputs `leaves`. Tensors among the flat outputs have the call as their history."""
    parameters, inputs = _trained(run), _differentiable(leaves)
    if not run.call.state.grad or not (parameters or inputs):
        return run.forward()
    tensors = iter(PipelinedCall.apply(run, tuple(inputs), len(parameters), *parameters, *inputs.values()))
    # The outputs refer to the run by their history. If the run kept them, only the garbage collector could free both.
    results, run.tensors.outputs.values = run.tensors.outputs.values, []
    return [next(tensors) if isinstance(x, torch.Tensor) else x for x in results]


def step(run: Run, leaves: Sequence[Any]) -> torch.Tensor:
    """Run forwards and backwards. Returns the batch's loss. `leaves`: the flat inputs, then the flat targets.

    Its `backward` accumulates the gradients in `.grad`. A loss that requires no gradient has done so: without hooks and
    gradients of inputs, autograd's engine has nothing else to do, and takes 6 us a parameter for it.
    """
    parameters, inputs = _trained(run), _differentiable(leaves)
    if not inputs and not torch_private.have_gradient_hooks(parameters, besides=run.executable.own_hooks):
        with torch.no_grad():  # of what is not in the stages
            done = run.step()
            run.executable.accumulate_gradients(parameters)
        return done
    loss: torch.Tensor = PipelinedTrainStep.apply(run, tuple(inputs), len(parameters), *parameters, *inputs.values())
    return loss


def _trained(run: Run) -> list[nn.Parameter]:
    return [p for p in run.executable.parameters if p.requires_grad]


def _differentiable(leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Flat inputs that need a gradient, by index."""
    return {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad}


class PipelinedCall(torch.autograd.Function):
    """(2) The whole pipeline as one node of the caller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, indices: tuple[int, ...], n_parameters: int, *tensors: torch.Tensor) -> Any:
        """`tensors`: the parameters, then the flat inputs `indices`."""
        results = run.forward()
        outputs = [(i, x) for i, x in enumerate(results) if isinstance(x, torch.Tensor)]
        ctx.run, ctx.indices = run, indices
        # For second derivatives. Of others than leaves, torch keeps the values alone: `x += pm(x)` would make a cycle.
        ctx.leaves = [x for x in tensors if x.requires_grad and x.is_leaf]
        ctx.save_for_backward(*(x for x in tensors if x.requires_grad and not x.is_leaf))
        ctx.device = next((x.device for _, x in outputs if x.device.type == "cuda"), None)
        ctx.keys = [id(p) for p in tensors[:n_parameters]]
        ctx.places = [i for i, _ in outputs]
        ctx.mark_non_differentiable(*[x for i, x in outputs if not run.tensors.outputs.differentiable[i]])
        ctx.set_materialize_grads(False)
        return tuple(x for _, x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # of a backward with create_graph=True
            # Without their graph, which leads back to this node: the run that keeps them would never be freed.
            constants = [None if gradient is None else gradient.detach() for gradient in gradients]
            with torch.no_grad():
                first = PipelinedCall.first_derivatives(ctx, *constants)
            return _refusing_second_derivatives(first, [*ctx.leaves, *ctx.saved_tensors, *gradients], ctx.run.instead)
        return PipelinedCall.first_derivatives(ctx, *gradients)

    @staticmethod
    def first_derivatives(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        run: Run = ctx.run
        of_outputs: list[torch.Tensor | None] = [None] * len(run.call.outputs)
        for place, gradient in zip(ctx.places, gradients, strict=True):
            of_outputs[place] = gradient
        # Autograd calls this on a thread of its own, whose streams are the default ones.
        with run.lock, run.call.state.on_streams():
            run.backward(of_outputs, torch_private.backward_keeps_graph())
            return _gradients(run, ctx.keys, ctx.indices, ctx.device)


class PipelinedTrainStep(torch.autograd.Function):
    """A training step whose gradients are computed in the forward. The backward hands them to the caller's autograd
    engine, which accumulates them and runs the parameters' hooks."""

    @staticmethod
    def forward(ctx: Any, run: Run, indices: tuple[int, ...], n_parameters: int, *tensors: torch.Tensor) -> Any:
        """`tensors`: the parameters, then the flat inputs `indices`."""
        loss = run.step()
        ctx.gradients = _gradients(run, [id(p) for p in tensors[:n_parameters]], indices, loss.device)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, ()
        return gradients


class SecondDerivative(torch.autograd.Function):
    """Passes gradients on. Its backward, a second derivative, raises: without it, the gradients would count as
    constants, and what is computed from them (a gradient penalty) would train nothing."""

    @staticmethod
    def forward(ctx: Any, instead: str, n: int, *tensors: torch.Tensor) -> Any:
        """`tensors`: `n` gradients, then all that they depend on. `instead`: what to do, for the error."""
        ctx.instead = instead
        return tuple(gradient.view_as(gradient) for gradient in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AutoparError(
            "a pipelined module has no second derivatives (create_graph=True), as gradient penalties and Hessians need "
            f"them; {ctx.instead}"
        )


def _refusing_second_derivatives(
    gradients: tuple[Any, ...], sources: Sequence[torch.Tensor | None], instead: str
) -> tuple[Any, ...]:
    """The same gradients; a backward through them raises AutoparError. `sources`: what they depend on, so that a
    derivative for one of those is refused as well. `instead`: what to do."""
    places = [i for i, gradient in enumerate(gradients) if isinstance(gradient, torch.Tensor)]
    differentiable = [one for one in sources if one is not None and one.requires_grad]
    if not places:
        return gradients
    passed = SecondDerivative.apply(instead, len(places), *(gradients[i].detach() for i in places), *differentiable)
    by_place = dict(zip(places, passed, strict=True))
    return tuple(by_place.get(i, gradient) for i, gradient in enumerate(gradients))


def _gradients(run: Run, keys: list[int], indices: tuple[int, ...], device: torch.device | None) -> tuple[Any, ...]:
    """(13) Gradients for the arguments of `forward`: none for the first three, then for parameters and inputs.

    `device`: of the first output on a GPU, which autograd takes for that of all gradients.
    """
    collected = run.executable.collect_gradients()
    of_parameters = [collected.pop(key, None) for key in keys]
    of_inputs = [run.tensors.input_gradient(i) for i in indices]
    _hand_over([*of_parameters, *of_inputs], run.call.state.streams, device)
    return None, None, None, *of_parameters, *of_inputs


def _hand_over(
    gradients: Sequence[torch.Tensor | None], streams: Sequence[torch.cuda.Stream], device: torch.device | None
) -> None:
    """Let autograd accumulate gradients that were computed on `streams`.

    Before it accumulates those on other GPUs than `device`, newer versions of torch wait for the stream on `device`,
    older ones for the default stream of the GPU that has them.
    """
    producer = next((stream for stream in streams if stream.device == device), None)
    for stream in streams:
        if producer is not None and stream != producer:
            producer.wait_stream(stream)
        default = torch.cuda.default_stream(stream.device)
        if default != stream:
            default.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None and gradient.device == stream.device:
                    gradient.record_stream(default)
