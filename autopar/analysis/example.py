"""The example call that a plan is made for: captured and studied without changing the model."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.analysis.batch_tail import studied
from autopar.analysis.batching import Batching
from autopar.analysis.buffer_writes import written_buffer
from autopar.analysis.few_collections import few_collections
from autopar.analysis.loss import study_loss
from autopar.analysis.loss_split import LossSplit
from autopar.analysis.loss_tensors import generators_in, gradients_aside, trained_tensors
from autopar.analysis.own_loss import own_loss, returns_own_loss
from autopar.analysis.sample_states import IGNORES, NUMBERS, SELECTS
from autopar.analysis.sequence_first import sequence_first_hint
from autopar.analysis.undivided_blocks import undivided_blocks
from autopar.capture import torch_private
from autopar.capture.autocast_answers import Answer, Asking, answered_as_now
from autopar.capture.call_answers import CallState, Question, answered_for_call
from autopar.capture.call_inputs import common_device, flattened, leaf_names
from autopar.capture.module_state import own_generators, torch_generators_restored
from autopar.capture.open_sizes import SymbolicProgram
from autopar.capture.program import OpenSize, Program, capture
from autopar.capture.thread_state import grad_mode, neutral_state
from autopar.errors import CaptureError, InputError, warn
from cost_models import Device
from cost_models.graphs import on_meta

log = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], torch.Tensor]  # (output, target) -> loss
# Beginnings of notes of plans:
LEFT_OUT = "predictions leave out the "
END_OF_MODEL = "the end of the model runs once on the whole batch: "
WHOLE_LOSS = "the loss runs once on the whole batch: "
ABOUT_WHOLE_BATCH = (LEFT_OUT, END_OF_MODEL, WHOLE_LOSS)


@dataclass(frozen=True)
class Example:
    """The captured program and the call that a plan is made for."""

    model: nn.Module
    program: Program
    batching: Batching
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]  # the flat inputs of the call
    training: bool
    loss: LossFunction | None
    target: Any
    loss_split: LossSplit | None = None  # how the losses of micro-batches make the loss of the batch

    @property
    def stage_loss(self) -> LossFunction | None:
        """The loss, if it runs in the last stage for every micro-batch."""
        return self.loss if self.loss_split is not None and self.loss_split.combine != "whole" else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What of the call a plan has to say: what sees the whole batch, and what cannot be divided."""
        return (*self._whole_batch_notes, *undivided_blocks(self.program))

    @property
    def _whole_batch_notes(self) -> tuple[str, ...]:
        """That the end of the model or the loss sees the whole batch, and why; and whether prices leave it out, because
        it failed on the example."""
        if self.batching.tail is not None:
            return (f"{END_OF_MODEL}{self.batching.tail.why}",)
        if self.loss is None or self.stage_loss is not None or self.loss_split is None:
            return ()
        if self.loss_split.error:
            why = "; ".join(text for text in (self.loss_split.why, self.loss_split.error) if text)
            return (f"{LEFT_OUT}loss, because it is not split into micro-batches: {why}",)
        return (f"{WHOLE_LOSS}{self.loss_split.why}",)

    @property
    def target_dims(self) -> tuple[int | None, ...]:
        """Of every flat target leaf, the dimension that counts samples; none without a loss."""
        return () if self.loss_split is None else self.loss_split.target_dims

    def untouched(self) -> AbstractContextManager[None]:
        """Inside, steps of the call leave the user's tensors as they are: the model's, those of the call, and what the
        loss trains besides (a temperature, a teacher). So do the random generators that model and loss hold."""
        given = torch_private.tree_leaves((self.args, self.kwargs, self.target))
        leaves = [x for x in given if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad]
        return untouched(self.model, [*leaves, *trained_tensors(self.loss).values()], generators_in(self.loss))


def resized(example: Example, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None) -> Example | None:
    """The example for a call that differs in the number of samples alone; None where that needs a capture of its own.

    It shares the captured graph, and what was studied of it.
    """
    bound = example.program.bind(args, kwargs)
    if bound is None or not example.batching.splittable or bound[1] < example.batching.least_rows:
        return None
    leaves, batch = bound
    program = replace(example.program, batch_size=batch)
    return replace(example, program=program, args=args, kwargs=kwargs, leaves=leaves, target=target)


def has_backward(model: nn.Module, program: Program, loss_fn: LossFunction | None) -> bool:
    """Whether a call made now would be followed by a backward."""
    trains = any(p.requires_grad for p in model.parameters())
    return trains and (loss_fn is not None or (program.training and torch.is_grad_enabled()))


def examine(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_types: set[str],
    *,
    batch_dim: int | dict[str, int | None] | None,
    verify: bool,
    strict: bool = False,
    device: torch.device | None = None,
) -> tuple[Program, Batching]:
    """Capture a call of `model`, less a tail, and study how its batch may be split. The model is unchanged afterwards.

    The capture uses the caller's default dtype and device, and takes all tensors to be on `device` (default: the
    model's). Test runs of the graph depend neither on them nor on other state of the calling thread. Raises
    CaptureError, InputError.
    """
    ahead = any(p.is_meta for p in model.parameters())  # nothing will run, so equal layers need one trace
    if any(not t.is_meta for t in [*model.parameters(), *model.buffers()]):
        _need_values(args, kwargs)
    with untouched(model), _answered(model, args, kwargs, device_types, device) as asked, neutral_state(device_types):
        program = capture(
            model, args, kwargs, batch_dim=batch_dim, trace_equal_layers_once=ahead, strict=strict, device=device
        )
    program = asked.kept_with(program)
    program, batching = study_call(model, program, args, kwargs, device_types, verify=verify)
    _check_chosen_dimensions(model, program, batching, args, kwargs)
    return program, batching


def _check_chosen_dimensions(
    model: nn.Module, program: Program, batching: Batching, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise InputError where `batch_dim` names another dimension than the first, along which the model has one size.

    Such a dimension counts no samples. On the first one, which is the default, it is a model for one batch size.
    """
    if batching.fixed and any(one.batch_dim for one in program.inputs):
        names = leaf_names(model, args, dict(sorted(kwargs.items())))
        pairs = zip(names, program.inputs, strict=True)
        dims = ", ".join(f"dimension {one.batch_dim} of '{name}'" for name, one in pairs if one.batch_dim is not None)
        raise InputError(
            f"batch_dim says that {dims} counts samples, but the model runs with no other size there: "
            f"{batching.fixed}; give the dimension that counts samples, or None in a dict for an input that has none"
        )


def _need_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise InputError for an input on the meta device, where the model is not."""
    given = {
        **{f"argument {place}": value for place, value in enumerate(args)},
        **{f"'{k}'": v for k, v in kwargs.items()},
    }
    for name, value in given.items():
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in torch_private.tree_leaves(value)):
            raise InputError(f"{name} is on the meta device and the model is not; give an example that has values")


def study_call(
    model: nn.Module,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_types: set[str],
    *,
    verify: bool,
) -> tuple[Program, Batching]:
    """The program of a captured call, less a tail, and how its batch may be split (`batch_tail.studied`). The model is
    unchanged afterwards. Raises CaptureError for a program that would lose gradients."""
    if program.unregistered:
        raise CaptureError(program.unregistered)
    bound = program.bind(args, kwargs)
    assert bound is not None, "a captured program takes the call that it was captured from"
    with untouched(model), neutral_state(device_types), torch.device("cpu"):
        program, batching = studied(program, bound[0], verify=verify)
    hint = ""
    if batching.obstacle.endswith((NUMBERS, IGNORES, SELECTS)):
        hint = "if that is a loss, return the outputs and give loss_fn=: then the loss alone runs on the whole batch"
    elif _may_have_another_batch_dim(program, batching):
        hint = sequence_first_hint(model, args, kwargs)
    return program, replace(batching, obstacle=f"{batching.obstacle}; {hint}") if hint else batching


def _may_have_another_batch_dim(program: Program, batching: Batching) -> bool:
    """Whether the batch may be splittable along another dimension than 0. A write into a buffer stays one."""
    first = all(one.batch_dim in (0, None) for one in program.inputs)
    return first and program.batch_size > 1 and batching.obstacle not in ("", written_buffer(program))


def capture_symbolic(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_types: set[str],
    *,
    batch_dim: int | dict[str, int | None] | None,
    open_sizes: frozenset[OpenSize],
    device: torch.device | None = None,
) -> SymbolicProgram | None:
    """Capture a call of `model` with symbols for `open_sizes`; None where no tracer can. The model is unchanged.
    `device`: as for `examine`."""
    with untouched(model), _answered(model, args, kwargs, device_types, device) as asked, neutral_state(device_types):
        try:
            program = capture(model, args, kwargs, batch_dim=batch_dim, open_sizes=open_sizes, device=device)
        except CaptureError as error:
            log.info("capture with symbolic sizes failed, so every size is captured by itself: %s", error)
            return None
    return SymbolicProgram.of(asked.kept_with(program), open_sizes)


class _Learned(NamedTuple):
    """What the model's code learned of the call."""

    autocast: dict[Answer, None]
    of_call: dict[Question, Hashable]

    def kept_with(self, program: Program) -> Program:
        return replace(program, autocast=tuple(self.autocast), learned=tuple(self.of_call.items()))


@contextmanager
def _answered(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device_types: set[str], device: torch.device | None
) -> Iterator[_Learned]:
    """`device`: where the capture takes all tensors to be; None: where they are."""
    leaves, _ = flattened(args, kwargs)
    home = device or common_device(model, leaves)
    with (
        answered_as_now(Asking.of(home, device_types)) as autocast,
        answered_for_call(CallState(model, leaves)) as of_call,
    ):
        yield _Learned(autocast, of_call)


def without_values(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    """The call on the meta device, if a tensor has no values (on the meta device, or from a FakeTensorMode).

    Then returns a copy of the model and its inputs on the meta device; any other call is returned unchanged.
    """
    tensors = [*model.parameters(), *model.buffers()]
    given = [x for x in torch_private.tree_leaves((args, kwargs, target)) if isinstance(x, torch.Tensor)]
    if not any(t.is_meta or torch_private.is_fake(t) for t in [*tensors, *given]):
        return model, args, kwargs, target
    if not all(t.is_meta and not torch_private.is_fake(t) for t in tensors):
        own = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
        model = copy.deepcopy(model, {id(t): on_meta(t) for t in [*tensors, *own]})
    args, kwargs, target = torch_private.tree_map(on_meta, (args, kwargs, target))
    return model, args, kwargs, target


def ordinary(tree: Any) -> Any:
    """`tree` with copies of the tensors that were created in inference mode. A tracer cannot record operators on those,
    and a later plan for training could not be measured with them."""
    with torch.inference_mode(False):
        return torch_private.tree_map(
            lambda x: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x, tree
        )


def under_default_device(loss: LossFunction | None) -> LossFunction | None:
    """`loss` for other threads, which do not inherit this thread's default device."""
    device = torch.get_default_device()
    if loss is None or device.type == "cpu":
        return loss

    return functools.partial(_under, device, loss)


def _under(device: torch.device, loss: LossFunction, output: Any, target: Any) -> torch.Tensor:
    with device:
        return loss(output, target)


@contextmanager
def untouched(
    model: nn.Module, others: Iterable[torch.Tensor] = (), generators: Iterable[torch.Generator] = ()
) -> Iterator[None]:
    """Restore gradients and random states on leaving: of the CPU, of GPUs, of the model's own generators and of those
    in `generators`. Inside, `others` have no gradients from before."""
    gradients = [(p, p.grad) for p in model.parameters()]
    own = [generator for _, generator in own_generators(model.modules())]
    with torch_generators_restored([*own, *generators]), gradients_aside(others):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def capture_example(
    model: nn.Module,
    devices: Sequence[Device],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    batch_dim: int | dict[str, int | None] | None = None,
    verify: bool = False,
    strict: bool = False,
) -> Example:
    """Capture a call of `model` for these devices. The model is unchanged. Raises CaptureError, InputError."""
    types = {device.torch_device.type for device in devices}
    with nullcontext() if loss_fn is None else grad_mode():
        program, batching = examine(model, args, kwargs, types, batch_dim=batch_dim, verify=verify, strict=strict)
    leaves, _ = program.bind(args, kwargs) or ([], 0)
    training = has_backward(model, program, loss_fn)
    loss = under_default_device(loss_fn)
    split = None
    if loss_fn is not None:
        dims = (batch_dim, 0) if isinstance(batch_dim, int) else (0,)
        split = study_loss(loss_fn, program, batching, target, default_dims=dims)
    return Example(model, program, batching, args, kwargs, leaves, training, loss, target, split)


@few_collections()
def example_ahead(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    batch_dim: int | dict[str, int | None] | None = None,
    verify: bool = False,
    strict: bool = False,
) -> Example:
    """Capture a call of `model` for devices that are not here; parameters need no values.

    Nothing says how the model will be called there. In training mode, one that returns its own loss (`own_loss`) is
    taken to be trained by `train_step`, so that the loss runs in the last stage.
    """
    model, args, kwargs, target = without_values(model, args, kwargs, target)
    example = capture_example(
        model, (), args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, verify=verify, strict=strict
    )
    for note in example.notes:
        if note.startswith(LEFT_OUT):
            warn(note)
    if loss_fn is not None or not example.training or not returns_own_loss(example.program, example.batching.tail):
        return example
    split = study_loss(own_loss, example.program, example.batching, None, default_dims=(0,))
    return replace(example, loss=own_loss, loss_split=split)
