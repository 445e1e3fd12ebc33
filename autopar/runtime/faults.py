"""Telling where in a pipelined call an error came from."""

from __future__ import annotations

import linecache

from autopar.capture import describe, users_frames
from autopar.runtime.executable import Part
from autopar.schedule import Phase

_WAYS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT: "backward (inputs)",
    Phase.WEIGHT: "backward (parameters)",
}


def explain(error: Exception, part: Part, phase: Phase, microbatch: int) -> None:
    """Say which stage, micro-batch and line of the user's model an error came from."""
    note = f"in the {_WAYS[phase]} of stage {part.stage.index} ({part.worker.device.name}), micro-batch {microbatch}"
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
