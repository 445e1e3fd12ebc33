"""What the model's code learns, while it is captured, of the call: of gradients, settings and layouts.

A capture runs in grad mode, as one graph serves calls with gradients and without. Code that asks must learn the state
of the call all the same:

    return logits if torch.is_grad_enabled() else logits.softmax(-1)

What was asked is kept with the program, which fits later calls that would get the same answers. (Of torch.autocast:
autocast_answers.py.)
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.capture.call_inputs import is_dense
from autopar.capture.calling_code import torch_calls


class Question(enum.Enum):
    """What code may ask."""

    GRAD_MODE = "is_grad_enabled"
    INFERENCE_MODE = "is_inference_mode_enabled"
    DETERMINISTIC = "are_deterministic_algorithms_enabled"
    GRADIENTS = "requires_grad, grad_fn or is_leaf of a tensor"
    LAYOUTS = "is_contiguous or stride of a tensor"
    TYPES = "dtype of a tensor"


CallAnswer = tuple[Question, Hashable]
TYPES_ASKED: CallAnswer = (Question.TYPES, None)

_FUNCTIONS = {one.value: one for one in (Question.GRAD_MODE, Question.INFERENCE_MODE, Question.DETERMINISTIC)}
_ASKS_TORCH = ("torch", "autopar")  # packages whose own code acts on the state that its thread is in
_REQUIRES_GRAD, _GRAD_FN, _IS_LEAF, _DTYPE = (
    getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "dtype")
)
_ASKED_OF_TENSORS: dict[Any, Question] = {
    **dict.fromkeys((_REQUIRES_GRAD, _GRAD_FN, _IS_LEAF), Question.GRADIENTS),
    **dict.fromkeys((torch.Tensor.is_contiguous, torch.Tensor.stride), Question.LAYOUTS),
    _DTYPE: Question.TYPES,
}
_WITHOUT_GRADIENT: dict[Any, Any] = {_REQUIRES_GRAD: False, _GRAD_FN: None, _IS_LEAF: True}


@dataclass(frozen=True)
class CallState:
    """The state of a call, in the thread that makes it. `leaves`: its flat inputs."""

    model: nn.Module
    leaves: Sequence[Any]

    def answer(self, question: Question) -> Hashable:
        """What tells one answer of the model's code from another."""
        if question is Question.GRADIENTS:
            trained = tuple(name for name, p in self.model.named_parameters() if p.requires_grad)
            return torch.is_grad_enabled(), trained, tuple(t.requires_grad for t in self._tensors())
        if question is Question.TYPES:
            return None  # the same for every call: a capture knows no autocast, which a warning says
        if question is Question.LAYOUTS:
            return tuple(map(_layout, [*self.model.parameters(), *self._tensors()]))
        known: bool = getattr(torch, question.value)()
        return known

    def holds(self, answers: Collection[CallAnswer]) -> bool:
        """Whether this call gives these answers."""
        return all(self.answer(question) == said for question, said in answers)

    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions by descending stride, less those of one element."""
    if not is_dense(tensor):
        return ()
    strides = tensor.stride()
    return tuple(sorted((d for d, n in enumerate(tensor.shape) if n != 1), key=lambda d: (-strides[d], d)))


class _Asked(TorchFunctionMode):
    """Notes what the model's code asks of tensors, and of torch's functions where `functions` are in their places."""

    def __init__(self, state: CallState) -> None:
        super().__init__()
        self.answers: dict[Question, Hashable] = {}
        self._grad = torch.is_grad_enabled()
        self._known = {one: state.answer(one) for one in Question}
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        question = _ASKED_OF_TENSORS.get(func) if getattr(func, "__hash__", None) is not None else None
        if question is None or torch_calls() or (question is Question.TYPES and args[0].grad_fn is None):
            return result
        self.answers[question] = self._known[question]
        if question is Question.GRADIENTS and not self._grad and args[0].grad_fn is not None:
            return _WITHOUT_GRADIENT[func]
        return result

    def answer(self, name: str, real: Callable[[], bool]) -> bool:
        """What a function of torch answers: `real`, where torch's own code asks."""
        asks = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if asks in _ASKS_TORCH or threading.get_ident() != self._thread:
            return real()
        question = _FUNCTIONS[name]
        if question is Question.GRAD_MODE and not real():
            return False  # inside of a block of the model's own
        self.answers[question] = self._known[question]
        return bool(self._known[question])


def types_asked() -> bool:
    """Whether the model's code has asked, in this capture for a call, for the dtype of what it computed."""
    asked = getattr(getattr(torch.is_grad_enabled, "func", None), "__self__", None)
    return isinstance(asked, _Asked) and Question.TYPES in asked.answers


@contextlib.contextmanager
def answered_for_call(state: CallState) -> Iterator[dict[Question, Hashable]]:
    """Inside, code of this thread that asks gets the answers of the call, and of the moment of entering.

    Torch's own code does not: its contexts and operators need the state that they are in. Yields what is asked.
    """
    asked = _Asked(state)
    before = {name: getattr(torch, name) for name in _FUNCTIONS}
    for name, real in before.items():
        setattr(torch, name, functools.partial(asked.answer, name, real))
    try:
        with asked:
            yield asked.answers
    finally:
        for name, real in before.items():
            setattr(torch, name, real)
