"""Thread-local settings of torch: workers copy those of their caller; a capture runs under torch's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from autopar.capture import torch_private


@dataclass(frozen=True)
class CallerState:
    """Thread-local settings of torch that a fresh thread does not inherit."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device | None  # None: the CPU, as in a fresh thread
    saved_tensors_hooks: torch_private.SavedTensorsHooks | None
    checkpointed: bool  # the call is inside a torch.utils.checkpoint, whose hooks no worker has
    streams: tuple[torch.cuda.Stream, ...]  # one per GPU: the stream on which the caller queues kernels

    @classmethod
    def of_this_thread(cls, devices: Iterable[torch.device], *, training: bool = False) -> CallerState:
        """The settings of the current thread. `training`: record gradients in any grad mode of the caller."""
        device_types = {device.type for device in devices}
        default, hooks = torch.get_default_device(), torch_private.saved_tensors_hooks()
        checkpointed = hooks is not None and torch_private.of_checkpoint(hooks)
        return cls(
            training or torch.is_grad_enabled(),
            not training and torch.is_inference_mode_enabled(),
            tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(device_types)),
            torch.is_autocast_cache_enabled(),
            None if default.type == "cpu" else default,
            # A checkpoint's tell tensors apart by the order in which they are saved, which threads do not keep.
            (_as_it_is, _as_it_is) if checkpointed else hooks,
            checkpointed,
            tuple(torch.cuda.current_stream(d) for d in sorted(set(devices), key=str) if d.type == "cuda"),
        )

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Inside, this thread queues kernels on the caller's streams."""
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    @contextlib.contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Apply the settings in a worker's thread that uses `device`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.on_streams())
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            if self.saved_tensors_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache))
            yield

    def backward_without_autocast(self, *, of_step: bool) -> tuple[str, ...]:
        """The types of devices whose autocast is on in the call, and off in its backward: torch's engine takes over the
        state of the thread that calls backward(), which is this one. `of_step`: the call goes back itself, as a script
        does that leaves autocast first, which torch recommends."""
        on = [device_type for device_type, enabled, _ in self.autocast if enabled]
        return tuple(one for one in on if of_step or not torch.is_autocast_enabled(one))


@contextlib.contextmanager
def autocast_off(device_types: Iterable[str]) -> Iterator[None]:
    """Inside, there is no autocast for these types of devices."""
    with contextlib.ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def go_back(loss: torch.Tensor, *devices: torch.device) -> None:
    """`loss.backward()` of a training step, without the autocast that the step may run under."""
    on = [one for one in {"cpu", *(device.type for device in devices)} if torch.is_autocast_enabled(one)]
    if on:
        with autocast_off(on):
            loss.backward()
    else:
        loss.backward()


@contextlib.contextmanager
def grad_mode() -> Iterator[None]:
    """Inside, as in a training step with a loss, which records gradients in any grad mode of the caller."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def neutral_state(device_types: set[str]) -> Iterator[None]:
    """Apply torch's defaults: a capture must not depend on the context of the call that triggers it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch_private.saved_tensors_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        for device_type in sorted(device_types):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
