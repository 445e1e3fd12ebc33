"""The wire between ranks whose tensors travel over NCCL (exchanges.py says when, and why)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from autopar.runtime.ranks.messages.channels import ExchangeChannel, Pending
from autopar.runtime.ranks.messages.exchanges import START
from autopar.runtime.ranks.messages.tables import Message
from autopar.runtime.ranks.messages.wire import Posted, Wire


class ExchangeWire(Wire):
    """Rows of numbers travel one by one, over gloo. Tensors wait for the exchange between two actions."""

    _channel: ExchangeChannel

    def _prepare(self) -> None:
        self._receives = self._messages.receives.get(self._slot, {})
        # By place of an action, the messages that it has not sent yet.
        self._unsent = Counter(m.sent_by for m in self._messages.messages if m.source == self._slot)
        self._exchanged = START - 1  # place of the last action after which messages were exchanged
        self._next = _Exchange()

    def _post_send(self, tensor: torch.Tensor, target: int, message: Message, part: int) -> Pending:
        self._next.sends.append((tensor, target))
        return self._next

    def _after_send(self, message: Message) -> None:
        self._unsent[message.sent_by] -= 1
        if not self._unsent[message.sent_by]:
            self._exchange_until(message.sent_by)

    def _before_read(self, message: Message) -> None:
        self._exchange_until(message.read_by - 1)

    def _post_receives(self, message: Message, posted: Posted) -> None:
        """With the exchange that they are part of."""

    def _exchange_until(self, place: int) -> None:
        """Exchange what comes after the action at `place`, if anything does. After those since the last exchange there
        is nothing."""
        if self._exchanged >= place:
            return
        while self._exchanged < place:
            self._exchanged += 1
            for message in self._receives.get(self._exchanged, ()):
                self._receive(message)
        exchange, self._next = self._next, _Exchange()
        if exchange.sends or exchange.receives:
            exchange.pending = self._channel.exchange(exchange.sends, exchange.receives)

    def _receive(self, message: Message) -> None:
        source = self._routes.sender(message, self._rank)
        while message.address not in self._posted:
            self._post_next(source)
        posted = self._posted[message.address]
        for position in posted.packing.apart:
            tensor = posted.apart[position] = self._empty(posted, position)
            self._next.receives.append((tensor, source))
        posted.pending.append(self._next)


class _Exchange:
    """What is exchanged at once, and its end."""

    def __init__(self) -> None:
        self.sends: list[tuple[torch.Tensor, int]] = []  # with the other rank
        self.receives: list[tuple[torch.Tensor, int]] = []
        self.pending: Any = None  # once it has been posted; None again when the stream waits for its end

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
