"""Telling where in a pipelined call an error, a lack of memory or a NaN came from."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.program import describe, users_frames
from autopar.errors import NotANumberError
from autopar.runtime.executable import Part
from autopar.schedule.clock import Phase
from cost_models import available_memory

WAYS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward (inputs)",
    Phase.WEIGHT: "backward (parameters)",
}


def explain(error: Exception, part: Part, phase: Phase, microbatch: int) -> None:
    """Say which stage, micro-batch and line of the user's model an error came from."""
    note = f"in the {WAYS[phase]} of stage {part.stage.index} ({part.worker.device.name}), micro-batch {microbatch}"
    names = {node.name: node for node in part.stage.module.graph.nodes}
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        line = linecache.getline(code.co_filename, trace.tb_lineno).strip()
        node = names.get(line.partition(" ")[0])
        if node is not None and trace.tb_frame.f_locals.get("self") is part.module:
            note += f", at {describe(node)}"
            written = users_frames(node)
            if written:
                note += f"\nThe model's code:\n{written}"
        trace = trace.tb_next
    error.add_note(note)
    if _out_of_memory(error):
        error.add_note(_memory(part))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)  # what the CPU's allocator says
    )


def _memory(part: Part) -> str:
    device = part.worker.device
    known = part.predicted_bytes is not None
    predicted = f"was predicted to need {part.predicted_bytes:,} bytes" if known else "has a plan without predictions"
    available = f"{available_memory(device.torch_device):,} bytes are available now"
    advice = "give memory_limit=, more micro-batches, schedule='1f1b', or recompute the stage"
    return f"out of memory: {device.name} with stage {part.stage.index} {predicted}; {available}; {advice}"


def check_not_nan(values: Sequence[Any], part: Part, inputs: Sequence[Any] | None = None) -> None:
    """Raise NotANumberError if a value that leaves a part has a NaN. With `inputs`, those of the forward that made the
    values, the first operator that made one is named."""
    if not any(_has_nan(value) for value in values):
        return
    if inputs is None:
        raise NotANumberError(
            "the gradients that leave the stage have NaN; torch.autograd.detect_anomaly() finds where"
        )
    if any(_has_nan(value) for value in inputs):
        raise NotANumberError("the model's inputs have NaN")
    finder = _Finder(part.module)
    with torch.no_grad():
        finder.run(*inputs)
    where = describe(finder.found) if finder.found is not None else "an operator that did not do it again"
    raise NotANumberError(f"NaN first came out of {where}")


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


class _Finder(fx.Interpreter):
    """Runs a stage operator by operator up to the first NaN."""

    found: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self.found is None and n.op not in ("placeholder", "get_attr", "output") and _has_nan(value):
            self.found = n
        return value
