"""Prints two numbers for a training step: the bytes that are resident at its peak beyond those before it, as Linux
counts them, and as they are predicted."""

from __future__ import annotations

from pathlib import Path

import torch
from test_step_memory import bert

from autopar.capture.program import capture
from cost_models.memory.step_memory import step_memory


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    torch.set_num_threads(1)
    model, inputs = bert(batch=64)
    model.train()
    program = capture(model, (), inputs)
    bound = program.bind((), inputs)
    assert bound is not None
    counted = step_memory(program.graph_module, bound[0]).peak
    optimizer = torch.optim.AdamW(model.parameters())
    more = 0
    for _ in range(3):  # the first steps allocate optimizer states and caches of libraries
        optimizer.zero_grad()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak (man 5 proc)
        output = model(**inputs)
        output.loss.backward()
        optimizer.step()
        more = resident("VmHWM") - before
        del output
    inputs_bytes = sum(x.nbytes for x in inputs.values())
    print(more, counted.total - counted.parameters - counted.optimizer - counted.buffers - inputs_bytes)


if __name__ == "__main__":
    main()
