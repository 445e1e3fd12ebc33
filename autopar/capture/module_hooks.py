"""The user's hooks on inner modules: skipped while a model is captured, and run once per micro-batch afterwards.

A captured graph has no module calls. So two operators mark each call of a module with user hooks; all tensors that the
module takes or returns pass through them:

```
    x -> enter 'encoder.0' -> linear -> relu -> leave 'encoder.0' -> ...       enter: forward pre-hooks
              \\                                   /                             leave: forward hooks
               `---- args, kwargs, backward ------'                              both: full backward hooks
```
The plan's stages keep both beside the module's own operators (`plan/assignment.py`). When a stage runs, the operators
run the hooks that the module has at that moment, with the micro-batch's tensors. In all other runs of the graph (to
observe or measure it) they return their tensors unchanged. Hooks that torch and transformers register themselves belong
to the model's computation (weight_norm, output capturing) and are traced like its code.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils.hooks import BackwardHook

from autopar.capture import torch_private
from autopar.capture.module_state import same_value
from autopar.errors import InputError, warn

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PART_OF_THE_MODEL = ("torch", "transformers")

_library = torch.library.Library("autopar", "DEF")
_library.define("module_call(Tensor[] tensors, SymInt[] sizes, str point) -> Tensor[]")
_library.impl("module_call", lambda tensors, sizes, point: [t.clone() for t in tensors], "CompositeExplicitAutograd")


@torch.library.register_fake("autopar::module_call", lib=_library)
def _module_call_fake(tensors: list[torch.Tensor], sizes: list[int], point: str) -> list[torch.Tensor]:
    return [torch.empty_like(t) for t in tensors]


class _Thread(threading.local):
    running = False


_thread = _Thread()


def is_hook_point(node: fx.Node) -> bool:
    """Whether `node` runs the hooks of a module."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == __name__


def is_entry(node: fx.Node) -> bool:
    """Whether `node` runs the hooks of a module before the module does."""
    return is_hook_point(node) and getattr(node.target, "__name__", "") == "enter_module"


@contextmanager
def running() -> Iterator[None]:
    """Inside, stages that run in this thread run the hooks of their modules."""
    before, _thread.running = _thread.running, True
    try:
        yield
    finally:
        _thread.running = before


def is_running() -> bool:
    """Whether this thread runs a stage for the user, rather than to observe or measure it."""
    return _thread.running


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has user hooks: hooks that are not part of the model's computation."""
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(tables) and any(_user_hooks(table) for table in tables)


def without_hooks(model: nn.Module) -> nn.Module:
    """Remove the user's hooks from `model`, a copy that is only run to measure times. Returns it."""
    for module in model.modules():
        for name in _TABLES:
            table = getattr(module, name)
            for key, _ in _user_hooks(table):
                del table[key]
    return model


def _user_hooks(table: dict[int, Callable[..., Any]]) -> list[tuple[int, Callable[..., Any]]]:
    return [(key, hook) for key, hook in table.items() if not _part_of_the_model(hook)]


def _part_of_the_model(hook: Any) -> bool:
    place = getattr(hook, "__module__", None) or type(hook).__module__
    return place.partition(".")[0] in _PART_OF_THE_MODEL


@dataclass
class _Values:
    """The arguments or results of one call of a hooked module. Its tensors and sizes are values of the graph."""

    spec: torch_private.TreeSpec
    leaves: list[Any]  # None in the places of tensors and sizes
    tensors: list[int]  # places of tensors among the leaves
    sizes: list[int]  # places of symbolic sizes among the leaves

    @classmethod
    def taken_apart(cls, tree: Any) -> tuple[_Values, list[torch.Tensor], list[Any]]:
        leaves, spec = torch_private.tree_flatten(tree)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        sizes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt)]
        rest = [None if i in {*tensors, *sizes} else leaf for i, leaf in enumerate(leaves)]
        return cls(spec, rest, tensors, sizes), [leaves[i] for i in tensors], [leaves[i] for i in sizes]

    def together(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
        leaves = list(self.leaves)
        for place, value in [*zip(self.tensors, tensors, strict=True), *zip(self.sizes, sizes, strict=True)]:
            leaves[place] = value
        return torch_private.tree_unflatten(leaves, self.spec)

    def tensors_of(self, tree: Any, path: str) -> list[torch.Tensor]:
        """The tensors of `tree`, which a hook returned. Raises InputError unless it has the same structure."""
        leaves, spec = torch_private.tree_flatten(tree)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if spec != self.spec or tensors != self.tensors:
            raise InputError(
                f"a hook of module '{path}' changed the structure of what the module takes or returns; in a captured "
                "model a hook may change the values, but not their number or nesting"
            )
        return [leaves[i] for i in self.tensors]


@dataclass
class _Call:
    """One call of a hooked module in the model's code."""

    module: nn.Module
    path: str
    inputs: _Values | None = None
    outputs: _Values | None = None


class BackwardLink(BackwardHook):
    """Lets the full backward hooks of one call have the gradients of what the module returned and of what it took."""

    def __init__(self, call: _Call, hooks: Sequence[Callable[..., Any]], before: Sequence[Callable[..., Any]]) -> None:
        super().__init__(call.module, hooks, before)
        self.path = call.path


@dataclass
class Marks:
    """The calls of hooked modules that were marked while a model was traced."""

    paths: list[str]  # inner modules with user hooks
    calls: dict[str, _Call]  # by name: `path#number`


def hook_tables_without_users(module: nn.Module) -> dict[str, OrderedDict[int, Callable[..., Any]]]:
    """The tables of a module's hooks, by name, without those of the user."""
    tables = ((name, getattr(module, name)) for name in _TABLES)
    return {n: OrderedDict((k, h) for k, h in table.items() if _part_of_the_model(h)) for n, table in tables}


@contextmanager
def switched_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the user's hooks on `modules` are off."""
    hooked = [module for module in modules if has_hooks(module)]
    saved = [(module, {name: OrderedDict(getattr(module, name)) for name in _TABLES}) for module in hooked]
    try:
        for module in hooked:
            for name in _TABLES:
                table = getattr(module, name)
                for key, _ in _user_hooks(table):
                    del table[key]
        yield
    finally:
        for module, tables in saved:
            for name, table in tables.items():
                getattr(module, name).clear()
                getattr(module, name).update(table)


@contextmanager
def marked(model: nn.Module, inside: Collection[nn.Module] = ()) -> Iterator[Marks]:
    """Inside, the user's hooks are off, and calls of inner modules with user hooks are marked in the traced graph.

    `inside`: modules within opaque operators, which run their hooks themselves.
    """
    calls: dict[str, _Call] = {}
    hooked = [(path, module) for path, module in model.named_modules() if has_hooks(module)]
    # The root's hooks run on the whole batch, outside of the graph.
    marking = [(path, module) for path, module in hooked if path and module not in inside]
    marks: list[Any] = []
    with switched_off([module for _, module in hooked]):
        try:
            for path, module in marking:
                marks += _mark(path, module, calls)
            yield Marks([path for path, _ in marking], calls)
        finally:
            for mark in marks:
                mark.remove()


def _mark(path: str, module: nn.Module, calls: dict[str, _Call]) -> list[Any]:
    open_calls: list[str] = []  # a stack, because a module may call itself

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"{path}#{sum(call.path == path for call in calls.values())}"
        call = calls[name] = _Call(module, path)
        open_calls.append(name)
        call.inputs, tensors, sizes = _Values.taken_apart((args, kwargs))
        if not tensors:
            return None
        return call.inputs.together(torch.ops.autopar.module_call(tensors, sizes, f"enter {name}"), sizes)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        name = open_calls.pop()
        call = calls[name]
        call.outputs, tensors, sizes = _Values.taken_apart(output)
        if not tensors:
            return None
        return call.outputs.together(torch.ops.autopar.module_call(tensors, sizes, f"leave {name}"), sizes)

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]


def join(graph: fx.Graph, marks: Marks) -> None:
    """Replace the marks in a captured graph by operators that run the hooks, in place.

    1. An `enter` mark becomes a call that returns the module's inputs, and a link for its backward hooks.
    2. The matching `leave` mark becomes a call that also takes these inputs and the link: forward hooks see them.

    Warns of modules whose hooks will not run, because the graph has no mark for them.
    """
    seen: set[str] = set()
    entered: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not torch.ops.autopar.module_call.default:
            continue
        tensors, sizes, point = node.args
        side, name = str(point).split(" ", 1)
        call = marks.calls[name]
        seen.add(call.path)
        if side == "enter":  # 1
            node.target, node.args = _entering(call), (list(tensors), list(sizes))
            entered[name] = node
            continue
        enter = entered.get(name)
        state: fx.Node | None = None
        inputs: tuple[list[fx.Node], list[Any]] = ([], [])
        if enter is not None:  # 2
            count = len(enter.args[0])  # type: ignore[arg-type]
            with graph.inserting_before(node):
                *taken, state = [graph.call_function(operator.getitem, (enter, i)) for i in range(count + 1)]
            for i, new in enumerate((*taken, state)):
                new.meta = {k: enter.meta[k] for k in ("nn_module_stack", "stack_trace") if k in enter.meta}
                if new is not state and "val" in enter.meta:
                    new.meta["val"] = enter.meta["val"][i]
            inputs = (taken, list(enter.args[1]))  # type: ignore[arg-type]
        node.target = _leaving(call)
        node.args = (list(tensors), list(sizes), *inputs, state)
    lost = [path for path in marks.paths if path not in seen]
    if lost:
        warn(
            f"hooks of '{lost[0]}'" + (f" and {len(lost) - 1} more modules" if lost[1:] else "") + " will not run: the "
            "captured graph has no call of the module with tensors"
        )


def _entering(call: _Call) -> Callable[..., Any]:
    """The function of an `enter` operator: runs forward pre-hooks and sets up backward hooks."""
    values, read = call.inputs, _read_by_forward(call.module)
    assert values is not None

    def enter_module(tensors: list[torch.Tensor], sizes: list[int]) -> list[Any]:
        """The tensors that the module takes, after its hooks; the last item links its full backward hooks, and is None
        without any, or without gradients."""
        module = call.module
        if not _thread.running:
            return [*tensors, None]
        args, kwargs = values.together(tensors, sizes)
        held = {name: value for name, value in vars(module).items() if name in read}
        for key, hook in _user_hooks(module._forward_pre_hooks):
            if key in module._forward_pre_hooks_with_kwargs:
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        _refuse_changed(call, held, {name: value for name, value in vars(module).items() if name in read})
        hooks = [hook for _, hook in _user_hooks(module._backward_hooks)]
        link = None
        if hooks and torch.is_grad_enabled():
            link = BackwardLink(call, hooks, [hook for _, hook in _user_hooks(module._backward_pre_hooks)])
            args = link.setup_input_hook(args)
        return [*values.tensors_of((args, kwargs), call.path), link]

    return enter_module


def _read_by_forward(module: nn.Module) -> frozenset[str]:
    """The names of attributes in the code of a module's forward."""
    code = getattr(type(module).forward, "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def _refuse_changed(call: _Call, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InputError for an attribute that a forward pre-hook has set: the captured forward has it as a constant."""
    changed = [name for name, value in now.items() if name not in before or not same_value(before[name], value)]
    if changed:
        raise InputError(
            f"a forward pre-hook of module '{call.path}' sets its attribute '{changed[0]}', which the module's forward "
            "reads: a captured model keeps the value that it had at the capture; compute it in forward, or use "
            "torch.nn.utils.parametrize"
        )


def _leaving(call: _Call) -> Callable[..., Any]:
    """The function of a `leave` operator: runs forward hooks and completes the set-up of backward hooks."""
    values = call.outputs
    assert values is not None

    def leave_module(
        tensors: list[torch.Tensor],
        sizes: list[int],
        taken: list[torch.Tensor],
        taken_sizes: list[int],
        link: BackwardLink | None,
    ) -> list[torch.Tensor]:
        """The tensors that the module returns, after its hooks."""
        module = call.module
        if not _thread.running:
            return tensors
        result = values.together(tensors, sizes)
        args, kwargs = call.inputs.together(taken, taken_sizes) if call.inputs is not None and taken else ((), {})
        for key, hook in _user_hooks(module._forward_hooks):
            with_kwargs = key in module._forward_hooks_with_kwargs
            changed = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
            if changed is not None:
                result = changed
        before = [hook for _, hook in _user_hooks(module._backward_pre_hooks)]
        if link is None and before:  # these need nothing from where the module begins
            link = BackwardLink(call, [], before)
        if link is not None:
            result = link.setup_output_hook(result)
        return values.tensors_of(result, call.path)

    return leave_module
