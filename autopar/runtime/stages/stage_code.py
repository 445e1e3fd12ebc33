"""The code of a stage: as it was captured, compiled by torch.compile, or recorded as CUDA graphs.

    compile=False       stage.forward                       every operator is called from Python (direct_calls.py)
    compile=True, name  torch.compile(stage.forward)        compiled at its first call with such inputs
    compile="graphs"    CUDA graphs (graphed_stage.py)      recorded at its first calls, then replayed

A stage that cannot be compiled or recorded runs as it was captured; `left_alone_because` says why.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture import torch_private
from autopar.capture.direct_calls import with_direct_calls
from autopar.capture.work_shown import shown_work
from autopar.errors import InputError
from autopar.lower.random_operators import keep_from_compiler, uses_global_generator
from autopar.lower.size_values import SizeSplit
from autopar.lower.stages import StageProgram
from cost_models.hardware.devices import Device

log = logging.getLogger(__name__)

GRAPHS = "graphs"  # the option compile=
_MOST_SIZES = 4  # sizes of micro-batches whose values a stage keeps

# torch compiles one function at a time. Calls that would have to be compiled meanwhile would run uncompiled.
_one_compiles = threading.RLock()


def check_compile(compile: bool | str, devices: Sequence[Device]) -> None:
    """Raise InputError where `devices` cannot run stages that way."""
    others = [device.name for device in devices if device.torch_device.type != "cuda"]
    if compile == GRAPHS and others:
        raise InputError(
            f"compile='{GRAPHS}' records kernels of GPUs, and {', '.join(others)} "
            f"{'are' if len(others) > 1 else 'is'} none; give compile=True, or only CUDA devices"
        )


def left_alone_because(stage: StageProgram, compile: bool | str, *, recompute: bool) -> str:
    """Why a stage is neither compiled nor recorded though `compile` asks for that; "" if nothing hinders it."""
    if not compile:
        return ""
    if stage.shards > 1:
        return f"its operators run on {stage.shards} devices, with collectives between them"
    if stage.uncaptured:
        return "it runs modules that are not captured as a graph"
    if stage.hooked:
        return "it runs hooks of modules, which a compiler would trace instead of calling them"
    if stage.reruns:
        return "layers that run again for their backward draw the random numbers of their first run"
    return _no_graphs_because(stage, recompute) if compile == GRAPHS else ""


def _no_graphs_because(stage: StageProgram, recompute: bool) -> str:
    if recompute:
        return "it is recomputed, so that its backward is no recording of its forward's tensors"
    if stage.deferred:
        return "its batch norms put statistics of micro-batches aside in Python"
    if any(uses_global_generator(node.target) for node in stage.module.graph.nodes):
        return "it draws random numbers from the global generator, which other stages share"
    return ""


def code_text(compile: bool | str, seconds: float, left_alone: Mapping[int, str]) -> str:
    """How the code of stages runs; "" where nothing is compiled. `seconds`: spent on compiling so far. `left_alone`: by
    stage, why it is not compiled."""
    if not compile:
        return ""
    done, but = "recorded as CUDA graphs" if compile == GRAPHS else "compiled", ", except:" if left_alone else ""
    first = f"compile={compile!r}: stages are {done} ({seconds:.1f} s so far){but}"
    return "\n".join([first, *(f"  stage {stage}: {why}" for stage, why in sorted(left_alone.items()))])


class KeptSizeValues:
    """The code of a stage as it was captured, which keeps what it computes from the sizes of its inputs alone.

    It keeps that for the last few sizes: a plan has one or two micro-batch sizes, for every length of its samples.
    """

    def __init__(self, split: SizeSplit) -> None:
        self._sizes, self._values = split.sizes, split.values.forward
        self.module = with_direct_calls(split.rest)
        self._code = self.module.forward
        self._known: OrderedDict[Any, tuple[torch.Tensor, ...]] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        sizes = [inputs[place].shape[dim] for place, dim in self._sizes]
        key = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), *sizes)
        values = self._known.get(key)
        if values is None:
            # Also in inference mode: later steps may save them for a backward.
            with torch.inference_mode(False), torch.no_grad():
                values = self._values(*sizes)
            self._known[key] = values
            if len(self._known) > _MOST_SIZES:
                self._known.popitem(last=False)
        return self._code(*values, *inputs)


class CompiledStage:
    """The code of a stage, compiled for every kind of inputs at the first call with such: their sizes and dtypes, the
    grad mode and autocast of the worker."""

    def __init__(self, module: fx.GraphModule, compile: bool | str, name: str) -> None:
        """`compile`: True, or the name of a backend. `name`: of the stage, for the log."""
        keep_from_compiler(module)
        self._backend = "inductor" if compile is True else str(compile)
        self._function = torch_private.compile_for_threads(module.forward, self._backend)
        self._name = name
        self._known: set[Any] = set()

    def __call__(self, *inputs: Any) -> Any:
        kind = kind_of(inputs)
        if kind in self._known:
            return self._function(*inputs)
        with _one_compiles, shown_work(f"compiling {self._name}"):
            before = torch_private.compile_seconds()
            outputs = self._function(*inputs)
        self._known.add(kind)
        log.info("compiled %s by %s in %.1f s", self._name, self._backend, torch_private.compile_seconds() - before)
        return outputs


def kind_of(inputs: Sequence[Any]) -> Any:
    """What compiled or recorded code depends on: inputs without the values of tensors, grad mode and autocast."""
    types = {"cpu", *(x.device.type for x in inputs if isinstance(x, torch.Tensor))}
    return (
        torch.is_grad_enabled(),
        tuple((t, torch.get_autocast_dtype(t)) for t in sorted(types) if torch.is_autocast_enabled(t)),
        *((x.shape, x.stride(), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs),
    )
