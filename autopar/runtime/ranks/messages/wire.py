"""The mailbox of a rank: messages between stages that are in different processes.

A message is a row of numbers, which hosts exchange, and the tensors whose shapes both ends have derived from the graph:

    forward     numbers: for each value 1 if its tensor requires a gradient, or the value itself, a number
    backward    numbers: for each value 1 if it has a gradient. One that has none travels as zeros, and is dropped.

Small tensors of the CPU travel in the row of their numbers (packing.py), the others by themselves.

Nothing moves before the receiver has posted its receive, so a rank posts them ahead, before it computes: from every
rank `AHEAD` beyond the last one it has read, which bounds the memory of what has arrived early. A send never blocks its
rank: a rank that waits, waits for a message that another one sends in an earlier action, as in one process, so that a
table that can run there does not deadlock here. Over NCCL both block, and more is needed (exchange_wire.py).
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch

from autopar.capture import torch_private
from autopar.capture.module_hooks import BackwardLink
from autopar.errors import AutoparError, InputError
from autopar.runtime.ranks.faults.failure import LostRankError, connection_error
from autopar.runtime.ranks.messages.channels import Channel, Pending
from autopar.runtime.ranks.messages.execution_messages import ExecutionMessages
from autopar.runtime.ranks.messages.packing import MOST_PACKED, Packing, SentTensor, Spec, Values
from autopar.runtime.ranks.messages.tables import Message
from autopar.runtime.step.error_context import PHASE_NAMES
from autopar.runtime.step.mailbox import Aborted, Address, Mailbox
from autopar.schedule.clock import Phase

_CPU = torch.device("cpu")

AHEAD = 2
"""Receives that a rank posts before it needs them. More hide more of the transfers and take more memory; two keep a
neighbour busy."""

ValuesOf = Callable[[Address], Values]  # what the forward message at an address carries
Trained = dict[tuple[int, int, int], tuple[int, ...]]
"""By (stage, later stage, micro-batch), the values sent forward that require a gradient."""


@dataclass(frozen=True)
class Routes:
    """Which ranks of a slot send to which ranks of another: all have the whole value, and every receiver one sender."""

    ranks: tuple[tuple[int, ...], ...]  # of every slot, in the order of its mesh

    def sender(self, message: Message, receiver: int) -> int:
        return self.sender_to(message.source, message.target, receiver)

    def sender_to(self, source: int, target: int, receiver: int) -> int:
        """The rank of slot `source` that sends to rank `receiver` of slot `target`."""
        sources, targets = self.ranks[source], self.ranks[target]
        return sources[targets.index(receiver) % len(sources)]

    def receivers(self, message: Message, sender: int) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks[message.target] if self.sender(message, rank) == sender)


@dataclass
class Posted:
    """A message whose receives have been posted."""

    packing: Packing
    row: torch.Tensor
    apart: dict[int, torch.Tensor]  # by position
    pending: list[Pending]  # of the row, and of the tensors apart


class _Sent(NamedTuple):
    """A part of a message whose send has been posted."""

    read_by: int  # place of the reading action in the receiver's table
    tensor: torch.Tensor  # which must live as long
    pending: Pending


class Wire(Mailbox):
    """The messages of one execution on one rank. Those between stages of the rank's own slot stay in memory."""

    def __init__(
        self,
        rank: int,
        slot: int,
        routes: Routes,
        messages: ExecutionMessages,
        channel: Channel,
        rows: Channel,
        values: ValuesOf,
        trained: Trained,
        *,
        device: torch.device = _CPU,
        most_packed: int = MOST_PACKED,
    ) -> None:
        """`channel`: for tensors, which are on `device`. `rows`: for rows of bytes, on the CPU. `trained`: of the call;
        grows. It outlives an execution: a backward may be one of its own. `most_packed`: see Packing.of; tensors of
        GPUs travel by themselves."""
        super().__init__(0)
        self._rank, self._slot, self._routes, self._device = rank, slot, routes, device
        self._channel, self._rows = channel, rows
        self._most_packed = most_packed if device.type == "cpu" else -1
        self._values, self._trained = values, trained
        self._messages = messages
        self._by_address, self._parts = messages.by_address, messages.parts
        self._local: dict[Address, Any] = {}
        incoming = messages.incoming(slot, lambda message: routes.sender(message, rank))
        self._incoming = {source: deque(waiting) for source, waiting in incoming.items()}  # not posted yet
        self._posted: dict[Address, Posted] = {}
        self._ahead: defaultdict[int, int] = defaultdict(int)  # by rank, posted and not read yet
        self._sends: defaultdict[int, deque[_Sent]] = defaultdict(deque)  # by rank
        self._aborted = False
        self._prepare()
        self._post_ahead()

    def send(self, slot: int, address: Address, message: Any) -> None:
        """Post the sends of a message for `slot`."""
        if slot == self._slot:
            self._local[address] = message
            return
        known = self._by_address[address]
        numbers, values = self._contents(address, message)
        packing = self._packing(address)
        tensors = {p: self._fitting(values.get(p), spec, address) for p, spec in packing.tensors.items()}
        row = packing.packed(numbers, tensors)
        self._post_ahead()  # what comes back for this one has a known shape from here on
        for target in self._routes.receivers(known, self._rank):
            sends = self._sends[target]
            sends.append(_Sent(known.read_by, row, self._rows.send(row, target, self._tag(known, 0))))
            for part, position in enumerate(packing.apart, start=1):
                pending = self._post_send(tensors[position], target, known, part)
                sends.append(_Sent(known.read_by, tensors[position], pending))
        self._after_send(known)

    def receive(self, slot: int, address: Address) -> Any:
        """Wait for a message. Raises Aborted after `abort`, LostRankError if its sender has failed."""
        if self._aborted:
            raise Aborted
        message = self._by_address.get(address)
        if message is None:
            return self._local.pop(address)
        source = self._routes.sender(message, self._rank)
        while address not in self._posted:
            self._post_next(source)
        self._before_read(message)
        posted = self._posted.pop(address)
        self._ahead[source] -= 1
        self._post_ahead()
        self._wait(posted.pending, source, address)
        self._release(source, message.sent_by)
        return self._opened(address, posted)

    def abort(self) -> None:
        """What is read from now on raises Aborted. A wait that has begun ends with its message, or with its sender."""
        self._aborted = True

    def finish(self) -> None:
        """After all actions: wait until everything sent has arrived."""
        for target, sends in self._sends.items():
            while sends:
                self._let_go(sends, target)

    # -- how tensors travel that go by themselves --------------------------------------------------------------------

    def _prepare(self) -> None:
        """Before anything is posted."""

    def _post_send(self, tensor: torch.Tensor, target: int, message: Message, part: int) -> Pending:
        return self._channel.send(tensor, target, self._tag(message, part))

    def _after_send(self, message: Message) -> None:
        """All parts of a message have been sent to all ranks that get it from here."""

    def _before_read(self, message: Message) -> None:
        """A message is about to be waited for."""

    def _post_receives(self, message: Message, posted: Posted) -> None:
        """The receive of the row has just been posted."""
        source = self._routes.sender(message, self._rank)
        for part, position in enumerate(posted.packing.apart, start=1):
            tensor = posted.apart[position] = self._empty(posted, position)
            posted.pending.append(self._channel.receive(tensor, source, self._tag(message, part)))

    # -- receives ---------------------------------------------------------------------------------------------------

    def _post_ahead(self) -> None:
        for source, waiting in self._incoming.items():
            while waiting and self._ahead[source] < AHEAD and self._is_known(waiting[0].address):
                self._post_next(source)

    def _is_known(self, address: Address) -> bool:
        """Whether the shapes are: those of gradients, once their values have been sent."""
        return address.direction is Phase.FORWARD or _forward(address) in self._trained

    def _post_next(self, source: int) -> None:
        message = self._incoming[source].popleft()
        packing = self._packing(message.address)
        row = packing.row()
        posted = Posted(packing, row, {}, [self._rows.receive(row, source, self._tag(message, 0))])
        self._posted[message.address] = posted
        self._ahead[source] += 1
        self._post_receives(message, posted)

    def _empty(self, posted: Posted, position: int) -> torch.Tensor:
        """For a tensor that comes by itself."""
        spec = posted.packing.tensors[position]
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)

    def _packing(self, address: Address) -> Packing:
        """Of a message: all values forward; backward the gradients of those that require one."""
        if address.direction is Phase.FORWARD:
            return self._values(address).packing(None, self._most_packed)
        forward = _forward(address)
        return self._values(Address(Phase.FORWARD, *forward)).packing(self._trained[forward], self._most_packed)

    def _specs(self, address: Address) -> Mapping[int, Spec]:
        """Of the values that a message carries, or whose gradients it carries."""
        return self._values(Address(Phase.FORWARD, *_forward(address))).specs

    def _opened(self, address: Address, posted: Posted) -> dict[int, Any]:
        """What has arrived, by position."""
        specs = self._specs(address)
        numbers = dict(zip(specs, posted.packing.numbers(posted.row), strict=True))
        tensors = posted.packing.unpacked(posted.row) | posted.apart
        if address.direction is Phase.BACKWARD:
            return {position: tensor for position, tensor in tensors.items() if numbers[position]}
        self._trained[_forward(address)] = tuple(p for p in posted.packing.tensors if numbers[p])
        found: dict[int, Any] = {}
        for position, spec in specs.items():
            if isinstance(spec, SentTensor):
                found[position] = tensors[position].requires_grad_(bool(numbers[position]))
            else:
                found[position] = _number(numbers[position], spec)
        return found

    # -- sends ------------------------------------------------------------------------------------------------------

    def _contents(self, address: Address, message: Any) -> tuple[list[int], Mapping[int, Any]]:
        """The numbers, and the values or gradients by position."""
        specs = self._specs(address)
        if address.direction is Phase.BACKWARD:
            return [int(message.get(position) is not None) for position in specs], message
        values = {position: message[position] for position in specs}
        for value in values.values():
            if isinstance(value, BackwardLink):
                raise InputError(
                    f"module '{value.path}' has a full backward hook, begins in stage {address.sender} and goes on in "
                    f"stage {address.receiver}, on another rank, and the hook needs gradients of both: give hooks to "
                    "the modules inside of it, or a plan that keeps it in one stage"
                )
        numbers = [int(x.requires_grad) if isinstance(x, torch.Tensor) else _bits(x) for x in values.values()]
        self._trained[_forward(address)] = tuple(
            p for p, x in values.items() if isinstance(x, torch.Tensor) and x.requires_grad
        )
        return numbers, values

    def _fitting(self, value: torch.Tensor | None, spec: SentTensor, address: Address) -> torch.Tensor:
        """A value as it travels. Raises AutoparError for another shape than derived, which its receiver expects."""
        if value is None:
            return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise AutoparError(
                f"stage {address.sender} made a tensor of shape {tuple(value.shape)} and {value.dtype} for stage "
                f"{address.receiver}, which expects {spec.shape} and {spec.dtype}: its shape depends on values, and "
                "stages in different processes need shapes that follow from those of the inputs"
            )
        if torch_private.is_fake(value):
            raise AutoparError(
                f"stage {address.sender} made a tensor without values for stage {address.receiver}: its code, or the "
                "loss, keeps a tensor from when it was captured"
            )
        return value.detach().to(self._device).contiguous()

    def _release(self, source: int, action: int) -> None:
        """Forget what a rank had read before it sent a message in its action number `action`."""
        sends = self._sends[source]
        while sends and sends[0].read_by <= action:
            self._let_go(sends, source)

    def _let_go(self, sends: deque[_Sent], target: int) -> None:
        """Of the first of what was sent to a rank. Its tensor must live until the wait has ended."""
        sent = sends.popleft()
        self._wait([sent.pending], target, None)

    def _tag(self, message: Message, part: int) -> int:
        return message.number * self._parts + part

    def _wait(self, pending: Sequence[Pending], other: int, address: Address | None) -> None:
        """Raises LostRankError."""
        try:
            for one in pending:
                one.wait()
        except RuntimeError as error:
            what = "its messages"
            if address is not None:
                kind = "outputs" if address.direction is Phase.FORWARD else "gradients"
                what = f"the {kind} of stage {address.sender} for micro-batch {address.microbatch}"
            action = None if address is None else (PHASE_NAMES[address.direction], address.sender, address.microbatch)
            why = f"rank {self._rank} waited for {what}: {connection_error(error)}"
            raise LostRankError(other, why, action) from error


def _forward(address: Address) -> tuple[int, int, int]:
    """(stage, later stage, micro-batch) of the values that a message carries, or whose gradients it carries."""
    ends = (address.sender, address.receiver)
    return (*(ends if address.direction is Phase.FORWARD else ends[::-1]), address.microbatch)


def _bits(number: Any) -> int:
    """A Python number in 64 bits; None as 0."""
    if number is None:
        return 0
    return int(struct.unpack("<q", struct.pack("<d", number))[0]) if isinstance(number, float) else int(number)


def _number(bits: int, kind: type) -> Any:
    if kind is NoneType:
        return None
    return struct.unpack("<d", struct.pack("<q", bits))[0] if kind is float else kind(bits)
