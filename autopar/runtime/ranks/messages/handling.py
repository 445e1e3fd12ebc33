"""What each end of a message takes besides the time of its link: Python, torch.distributed, and the threads of gloo.

```
   rank 0    send 0 | send 1 | ...      messages of one small tensor, over a wire as in a training step
   rank 1      receive 0 | receive 1 | ...
```
CPU time of the whole process counts: where ranks have a core each, a thread of gloo takes it from the rank that
computes.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from autopar.runtime.ranks.messages.execution_messages import ExecutionMessages
from autopar.runtime.ranks.messages.packing import SentTensor, Values
from autopar.runtime.ranks.messages.tables import Message
from autopar.runtime.ranks.messages.wire import Routes
from autopar.runtime.ranks.world import World
from autopar.runtime.step.mailbox import Address
from autopar.schedule.clock import Phase
from cost_models.hardware.devices import synchronize

_MESSAGES, _ROUNDS = 25, 9
_TENSOR = SentTensor((1024,), torch.float32)


def measured_handling(world: World) -> float:
    """Seconds of CPU time that this rank takes for a message that it sends or receives; 0 for all but the first two
    ranks. Collective."""
    world.connect_pairs({(0, 1)})
    taken = [_round(world) for _ in range(_ROUNDS)]
    return statistics.median(taken)


def _round(world: World) -> float:
    dist.barrier(world.control)
    if world.rank > 1:
        return 0.0
    addresses = [Address(Phase.FORWARD, 0, 1, i) for i in range(_MESSAGES)]
    messages = tuple(Message(i, address, 0, 1, i, i) for i, address in enumerate(addresses))
    values, tensor = Values({0: _TENSOR}), torch.zeros(_TENSOR.shape, dtype=_TENSOR.dtype, device=world.device)
    synchronize(world.device)
    start = time.process_time()
    known = ExecutionMessages(messages, 1 + len(values.specs))
    wire = world.new_wire(world.rank, Routes(((0,), (1,))), known, lambda address: values, {})
    for address in addresses:
        if world.rank == 0:
            wire.send(1, address, {0: tensor})
        else:
            wire.receive(1, address)
    wire.finish()
    return (time.process_time() - start) / _MESSAGES
