"""Buffers that a forward assigns anew, as writes into the buffers that a model has.

    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)

A graph writes a buffer in place. torch.export turns assignments to buffers of the root into writes at the end of the
call, and drops those to buffers of inner modules. So they are recorded here, for all modules alike: when the call has
returned, by comparing what the modules hold with what they held before.

    mean -> clone -> mul -> add -> write into mean

The call reads a copy of what the buffer held before: as after an assignment, autograd and the code go on to find the
old value in the old tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.capture import torch_private
from autopar.capture.module_state import same_view
from autopar.errors import CaptureError, warn
from autopar.errors.names import with_article
from cost_models.graphs import storage_key

aten = torch.ops.aten

_library = torch.library.Library("autopar_buffers", "DEF")
_library.define("assign(Tensor(a!) buffer, Tensor value, str name) -> ()")
_ASSIGN = torch.ops.autopar_buffers.assign.default


@torch.library.register_fake("autopar_buffers::assign", lib=_library)
def _assign(buffer: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """In a graph that is being traced: from the next call on, `buffer` holds `value`."""


class BufferAssignmentError(CaptureError):
    """The forward assigns to a buffer what no write into it can keep."""


class _Place(NamedTuple):
    """Where a module holds a tensor."""

    path: str
    table: dict[str, Any]
    name: str
    before: torch.Tensor

    @property
    def now(self) -> Any:
        return self.table.get(self.name)


class HeldBuffers:
    """The buffers that some modules hold at one time, and the parameters that they may share memory with. `modules`:
    with their paths."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._places = [
            _Place(f"{path}.{name}".lstrip("."), table, name, tensor)
            for path, module in modules
            for table in (module._buffers, module._parameters)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def assigned(self) -> list[_Place]:
        """Where other buffers are now. (What is registered or removed, `registrations` refuses.)"""
        buffers = (p for p in self._places if not isinstance(p.before, nn.Parameter))
        return [p for p in buffers if p.now is not None and not same_view(p.now, p.before)]

    def besides(self, place: _Place) -> str:
        """The path of another place that shares memory with `place` and was not assigned the same; "" if none does."""
        sharing = self._by_memory[storage_key(place.before)]
        return next((p.path for p in sharing if p.before is not place.before or p.now is not place.now), "")

    @cached_property
    def _by_memory(self) -> Mapping[int, list[_Place]]:
        found = defaultdict[int, list[_Place]](list)
        for place in self._places:
            found[storage_key(place.before)].append(place)
        return found


class Assignments:
    """What the forward of a model assigns to buffers while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._with_history: set[str] = set()  # paths of buffers that got a value that requires grad

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, a call of the model ends with a node for each buffer that its code assigned, and leaves all buffers
        in their places. Raises BufferAssignmentError for a value that the buffer cannot hold."""
        before: list[HeldBuffers] = []

        def begin(*_: Any) -> None:
            torch_private.drop_buffer_hooks_of_export()
            self._with_history.clear()  # export may begin several calls
            before.append(HeldBuffers(self._model.named_modules()))

        def end(*_: Any) -> None:
            held = before.pop()
            assigned = [(place, place.now, held.besides(place)) for place in held.assigned()]
            recorded: set[int] = set()
            for place, new, sharing in assigned:
                if id(place.before) not in recorded:  # under a second name, it was assigned the same value
                    self._record(place, new, sharing)
                    recorded.add(id(place.before))
                place.table[place.name] = place.before

        handles = [self._model.register_forward_pre_hook(begin), self._model.register_forward_hook(end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, place: _Place, new: Any, sharing: str) -> None:
        path, old = place.path, place.before
        own = f"buffer '{path}' ({tuple(old.shape)}, {old.dtype})"
        why = _misfit(old, new)
        if why:
            raise BufferAssignmentError(
                f"forward assigns {why} to {own}, and a captured model keeps the shape and type of its buffers; "
                "register the buffer with the shape and type that forward gives it, or return the value instead"
            )
        if sharing:
            raise BufferAssignmentError(
                f"forward assigns to {own}, which shares its memory with '{sharing}': there, the old value would stay, "
                "but a captured model writes into that memory. Register a clone in one of the two places, or write "
                f"both by {place.name}.copy_(...)"
            )
        if new.requires_grad:
            self._with_history.add(path)
        _ASSIGN(old, new.detach(), path)

    def write(self, module: fx.GraphModule) -> None:
        """Turn the recorded nodes of a traced graph into writes at its end."""
        assignments = module.graph.find_nodes(op="call_function", target=_ASSIGN)
        for node in assignments:
            buffer, value, path = node.args
            readers = [user for user in buffer.users if user not in assignments]
            if readers:
                with module.graph.inserting_after(buffer):
                    copy = module.graph.call_function(aten.clone.default, (buffer,))
                copy.meta = {k: readers[0].meta[k] for k in ("nn_module_stack", "stack_trace") if k in readers[0].meta}
                copy.meta["val"] = buffer.meta["val"].clone()
                for reader in readers:
                    reader.replace_input_with(buffer, copy)
            if path in self._with_history:
                _cut_history(path, bool(readers))
            with module.graph.inserting_before(node):
                write = module.graph.call_function(aten.copy_.default, (buffer, value))
            value.meta |= self._origin(value.args[0], path)
            write.meta = {**value.meta, "val": buffer.meta["val"]}
            module.graph.erase_node(node)
        module.recompile()

    def _origin(self, assigned: fx.Node, path: str) -> dict[str, Any]:
        """The module that holds the buffer, and the line that computed what it gets."""
        owner = path.rpartition(".")[0]
        kind = type(self._model.get_submodule(owner))
        stack = {f"buffers of {owner}": (owner, f"{kind.__module__}.{kind.__qualname__}")}
        return {"nn_module_stack": stack, "stack_trace": assigned.meta.get("stack_trace", "")}


def _misfit(old: torch.Tensor, new: Any) -> str:
    """What is assigned, if a buffer like `old` cannot hold it."""
    if not isinstance(new, torch.Tensor):
        return with_article(type(new).__name__)
    if torch_private.symbols_in(new):
        return "a tensor whose size follows the inputs"
    if new.dtype == old.dtype and new.shape == old.shape:
        return ""
    return f"a tensor of shape {tuple(new.shape)} and type {new.dtype}"


def _cut_history(path: str, read: bool) -> None:
    """A value that requires grad lives on in the buffer, with all that it was computed from: later calls and losses
    could pass gradients back to this one. A graph keeps values alone."""
    what = f"forward assigns a value that requires grad to buffer '{path}'"
    if read:
        raise BufferAssignmentError(
            f"{what} and reads it in the next call, from where gradients would flow back into this one; assign "
            "value.detach(), or return the value and give it to the next call as an input"
        )
    warn(f"{what}, but a captured model keeps the value without its gradients; assign value.detach(), or return it")
