"""What the model's code learns of torch.autocast while it is captured.

A capture runs with autocast off (`thread_state.neutral_state`), because the graph runs under the autocast of every
call and makes its casts then. Code that asks whether autocast is on must learn the caller's state all the same:
transformers' rotary embeddings, for one, compute positions in a block without autocast only where it is on. What was
asked is kept with the program, which fits later calls that would get the same answers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

Answer = tuple[str, str, bool | torch.dtype]
"""The function of torch that was asked, the type of device it was asked about, and what it said."""

_STATES: dict[str, Callable[[str], bool | torch.dtype]] = {
    "is_autocast_enabled": torch.is_autocast_enabled,
    "get_autocast_dtype": torch.get_autocast_dtype,
}
_NOT_ANSWERED = ("torch", "autopar")  # packages whose own code acts on the state that its thread is in


@dataclass(frozen=True)
class Asking:
    """Whom questions concern: code that asks about the type of device on which a capture takes all tensors to be means
    the devices that its graph will run on."""

    home: str  # the type of device of the capture
    workers: tuple[str, ...]  # the types of the devices that stages run on, sorted

    @classmethod
    def of(cls, home: torch.device, device_types: Collection[str]) -> Asking:
        return cls(home.type, tuple(sorted(device_types)))

    def answer(self, question: str, device_type: str) -> bool | torch.dtype:
        """What the autocast of this thread is, for a question about `device_type`."""
        types = [device_type]
        if device_type == self.home:
            types = [one for one in self.workers if torch.amp.is_autocast_available(one)] or types
        on = next((one for one in types if torch.is_autocast_enabled(one)), types[0])
        return _STATES[question](on)

    def place(self, device_type: str) -> str | None:
        """The type of the stages' devices on which a block under autocast of `device_type` changes something. "" if it
        changes nothing on any, None if stages run on several types of devices."""
        workers = [one for one in self.workers if torch.amp.is_autocast_available(one)]
        if not workers:  # a plan is made ahead
            return device_type
        if device_type not in (self.home, *workers):
            return ""
        return workers[0] if len(workers) == 1 else None

    def holds(self, answers: Collection[Answer]) -> bool:
        """Whether this thread's autocast gives these answers."""
        return all(self.answer(question, device_type) == said for question, device_type, said in answers)


class _Answers:
    """Stands in for torch's functions in one thread, and notes what was asked."""

    def __init__(self, asking: Asking) -> None:
        self.asked: dict[Answer, None] = {}
        self.asking = asking
        self._thread = threading.get_ident()
        self._known = {
            (question, device_type): asking.answer(question, device_type)
            for question in _STATES
            for device_type in {"cpu", "cuda", asking.home, *asking.workers}
            if torch.amp.is_autocast_available(device_type)  # "meta" has none: torch refuses the question
        }

    def _for_block(self, device_type: str, dtype: torch.dtype | None) -> bool:
        if not self._noted("is_autocast_enabled", device_type):
            return True
        return dtype is not None and self._noted("get_autocast_dtype", device_type) == dtype

    def _noted(self, question: str, device_type: str) -> bool | torch.dtype:
        known = self._known[question, device_type]
        self.asked[question, device_type, known] = None
        return known

    def is_autocast_enabled(self, device_type: str = "cuda") -> bool | torch.dtype:
        return self._told("is_autocast_enabled", device_type)

    def is_autocast_cpu_enabled(self) -> bool | torch.dtype:
        return self._told("is_autocast_enabled", "cpu")

    def get_autocast_dtype(self, device_type: str) -> bool | torch.dtype:
        return self._told("get_autocast_dtype", device_type)

    def get_autocast_cpu_dtype(self) -> bool | torch.dtype:
        return self._told("get_autocast_dtype", "cpu")

    def get_autocast_gpu_dtype(self) -> bool | torch.dtype:
        return self._told("get_autocast_dtype", "cuda")

    def _told(self, question: str, device_type: str) -> bool | torch.dtype:
        asks = str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
        own = asks in _NOT_ANSWERED or threading.get_ident() != self._thread
        if own or (question, device_type) not in self._known:
            return _STATES[question](device_type)
        return self._noted(question, device_type)


_FUNCTIONS = tuple(name for name in vars(_Answers) if not name.startswith("_"))


def place_of_block(device_type: str) -> str | None:
    """`Asking.place` for the call that a model is captured for; None as well if it is captured for no call."""
    answers = getattr(torch.is_autocast_enabled, "__self__", None)
    return answers.asking.place(device_type) if isinstance(answers, _Answers) else None


def fits_caller(device_type: str, dtype: torch.dtype | None) -> bool:
    """Whether the call runs without autocast, or under the one that a block of its model sets. (None: off.) It counts
    as asked."""
    answers = getattr(torch.is_autocast_enabled, "__self__", None)
    return isinstance(answers, _Answers) and answers._for_block(device_type, dtype)


@contextlib.contextmanager
def answered_as_now(asking: Asking) -> Iterator[dict[Answer, None]]:
    """Inside, code of this thread that asks about autocast gets the answers of the moment of entering.

    Torch's own code does not: its contexts and operators need the state that they are in. Yields what is asked.
    """
    answers = _Answers(asking)
    before = {name: getattr(torch, name) for name in _FUNCTIONS}
    for name in _FUNCTIONS:
        setattr(torch, name, getattr(answers, name))
    try:
        yield answers.asked
    finally:
        for name, function in before.items():
            setattr(torch, name, function)
