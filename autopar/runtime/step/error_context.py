"""Where in a pipelined call an error, a lack of memory or a NaN came from, as notes on the exception."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from autopar.analysis.batch_tail import Tail
from autopar.capture.node_names import describe, described_with_code
from autopar.errors import InputError, NotANumberError
from autopar.runtime.stages.stage_replica import StageReplica
from autopar.schedule.clock import Phase
from cost_models import available_memory

PHASE_NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward (inputs)",
    Phase.WEIGHT: "backward (parameters)",
}


def in_words(error: Exception) -> Exception:
    """What to raise in the place of an error of an action: the error itself, or InputError where torch's own does not
    say what is wrong with the user's code."""
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in str(error):
        return InputError(
            "the loss function (or the model) reads a tensor that was computed before the call from others that "
            "require a gradient, and every micro-batch would go back through that computation: compute it inside the "
            "loss function, detach() it, or pass it as the target"
        )
    return error


def add_context(error: Exception, replica: StageReplica, phase: Phase, microbatch: int) -> None:
    """Add the stage, the micro-batch and the line of the user's model that an error came from."""
    stage = f"stage {replica.stage.index} ({replica.worker.device.name})"
    place = _operator_of(error, replica.stage.module.graph, (replica.module, replica.code))
    error.add_note(f"in the {PHASE_NAMES[phase]} of {stage}, micro-batch {microbatch}{place}")
    if _out_of_memory(error):
        error.add_note(_memory_note(replica))
    elif _is_asynchronous(error):
        error.add_note(_ASYNCHRONOUS)


def run_tail(tail: Tail, outputs: Sequence[Any], inputs: Sequence[Any], *, watch_nan: bool) -> list[Any]:
    """`tail(outputs, inputs)`. Errors name the line of the user's model, and a NaN its operator with `watch_nan`."""
    try:
        found = tail(outputs, inputs)
    except Exception as error:
        place, _ = tail.placed(outputs, inputs)
        code = getattr(tail.graph.code(place), "__self__", None)
        error.add_note(f"in the {_END_OF_MODEL}{_operator_of(error, tail.graph.module.graph, (code,))}")
        raise
    if watch_nan and any(map(_has_nan, found)):
        place, values = tail.placed(outputs, inputs)
        if not any(map(_has_nan, values)):
            _raise_for_nan(tail.graph.on(place), values, f" in the {_END_OF_MODEL}")
    return found


_END_OF_MODEL = "end of the model, which runs on the whole batch"


def _operator_of(error: Exception, graph: fx.Graph, modules: Sequence[Any]) -> str:
    """`, at ` with the operator of `graph` and the user's lines, if the code of one of `modules` raised the error."""
    names = {node.name: node for node in graph.nodes}
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
        node = names.get(line.partition(" ")[0])
        if node is not None and trace.tb_frame.f_locals.get("self") in modules:
            found += f", at {described_with_code(node)}"
        trace = trace.tb_next
    return found


_ASYNCHRONOUS = (
    "a GPU reports an error of a kernel at a later call: the operator, the micro-batch and the stage named above may "
    "not be the culprits; run again with the environment variable CUDA_LAUNCH_BLOCKING=1, and the error names them"
)


def _is_asynchronous(error: Exception) -> bool:
    """Whether the error may come from a kernel that was queued before the call that raised it."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return False
    named = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in named)
    )


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)  # what the CPU's allocator says
    )


def _memory_note(replica: StageReplica) -> str:
    device = replica.worker.device
    known = replica.predicted_bytes is not None
    predicted = (
        f"was predicted to need {replica.predicted_bytes:,} bytes" if known else "has a plan without predictions"
    )
    available = f"{available_memory(device.torch_device):,} bytes are available now"
    advice = "give memory_limit=, more micro-batches, schedule='1f1b', or recompute the stage"
    return f"out of memory: {device.name} with stage {replica.stage.index} {predicted}; {available}; {advice}"


def check_not_nan(values: Sequence[Any], replica: StageReplica, inputs: Sequence[Any] | None = None) -> None:
    """Raise NotANumberError if a value that leaves a stage has a NaN.

    `inputs`: of the forward that computed the values. With them, the error names the first operator that made a NaN.
    """
    if not any(_has_nan(value) for value in values):
        return
    if inputs is None:
        raise NotANumberError(
            "the gradients that leave the stage have NaN; "
            "run the step under torch.autograd.detect_anomaly() to find the operator"
        )
    if any(_has_nan(value) for value in inputs):
        raise NotANumberError("the model's inputs have NaN")
    _raise_for_nan(replica.module, inputs)


def _raise_for_nan(module: fx.GraphModule, inputs: Sequence[Any], where: str = "") -> NoReturn:
    """Raise NotANumberError, which names the first operator of a graph that made a NaN. `where`: the graph is."""
    finder = _NanFinder(module)
    with torch.no_grad():
        finder.run(*inputs)
    first = describe(finder.first) if finder.first is not None else "an operator that made none when it ran again"
    raise NotANumberError(f"NaN first came out of {first}{where}")


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


class _NanFinder(fx.Interpreter):
    """Runs a stage operator by operator up to the first NaN."""

    first: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.first is None and n.op not in ("placeholder", "get_attr", "output") and _has_nan(value):
            self.first = n
        return value
