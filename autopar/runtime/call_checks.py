"""What a pipelined module cannot do, refused in words before anything runs."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.errors import AutoparError, InputError
from autopar.runtime.step.workers import WorkerPool, WorkerThread

UNWRAP = "call pm.unwrap(), the model itself, for that"
IN_ONE_PROCESS = "do that in one process, as no rank has the whole model: save with autopar.save, and load it there"


class Pipelined:
    """Marks a module that is pipelined already."""


def check_model(model: nn.Module) -> None:
    """Raise InputError for modules that no capture sees into: pipelined ones and TorchScript."""
    if isinstance(model, Pipelined):
        raise InputError("the model is already pipelined; pass model.unwrap()")
    for path, module in model.named_modules():
        where = f"module '{path}'" if path else "the model"
        if isinstance(module, Pipelined):
            raise InputError(
                f"{where} is already pipelined, and pipelines do not nest; put its unwrap() there, and parallelize "
                "the whole model"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{where} is TorchScript ({module.original_name}), which has no Python code to capture; use the "
                "module that it was made from"
            )


def check_caller(process: int, workers: WorkerPool) -> None:
    """Raise AutoparError for a call that would wait for ever: in a process that was forked after the module was made in
    `process`, where its worker threads do not exist, and on one of these threads, which are busy with another call.
    """
    if os.getpid() != process:
        raise AutoparError(
            f"this process ({os.getpid()}) was forked from the one that made the pipelined module ({process}), and its "
            "worker threads stayed there; call autopar.parallelize here, or call the module in its own process only"
        )
    thread = threading.current_thread()
    if isinstance(thread, WorkerThread) and thread.pool() is workers:
        raise AutoparError(
            "the pipelined module is called by code that runs inside one of its own calls, such as a hook or a loss "
            "function: the call would wait for itself; call it before or after, or call pm.unwrap() there"
        )


def check_tensors(args: tuple[Any, ...], kwargs: dict[str, Any], instead: str) -> None:
    """Raise AutoparError for derivatives that a pipeline does not compute: those of torch.func, and forward-mode ones.

    The pipeline is one node of the autograd graph, whose backward is all that there is. `instead`: what to do.
    """
    if torch_private.inside_function_transform():
        raise AutoparError(
            "a pipelined module cannot be called inside torch.func.grad, vmap, jvp, jacrev and the like, because its "
            f"workers do not see what these transform; {instead}"
        )
    if torch_private.inside_forward_mode() and any(
        isinstance(leaf, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(leaf).tangent is not None
        for leaf in torch_private.tree_leaves((args, kwargs))
    ):
        raise AutoparError(f"a pipelined module has no forward-mode derivatives (torch.autograd.forward_ad); {instead}")


def check_parameters(model: nn.Module, instead: str) -> None:
    """Raise InputError if a parameter is replaced by a tensor that needs a gradient, as by torch.func.functional_call.

    The gradient would not reach the tensor: the pipeline accumulates those of the model's own parameters. `instead`:
    what to do.
    """
    if not torch.is_grad_enabled():
        return
    for path, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None and not isinstance(value, nn.Parameter) and value.requires_grad:
                raise InputError(
                    f"'{f'{path}.{name}'.lstrip('.')}' is replaced by a tensor that needs a gradient, as "
                    "torch.func.functional_call does, and a pipelined module has gradients of the model's own "
                    f"parameters only; {instead}, or call it under torch.no_grad()"
                )
