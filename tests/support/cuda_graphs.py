"""A stand-in for CUDA graphs on the CPU: a recording keeps its operators and their memory; a replay runs them again.

As on a GPU, nothing is computed while operators are recorded: what they wrote in tensors from outside is undone, and
their own results are NaN until the first replay. A replay reads and writes the very memory of the recording, changes no
tensor's version, and draws random numbers from the generators as they are then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Graph:
    """Instead of torch.cuda.CUDAGraph."""

    made: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.generators: list[torch.Generator] = []
        self.replays = 0
        Graph.made.append(self)

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.operators:
                inside = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
                for old, new in zip(tensors(results), tensors(function(*args, **kwargs)), strict=True):
                    if old.untyped_storage().data_ptr() not in inside:
                        old.copy_(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _aliases(tree: Any) -> Any:
    """The same memory, with versions of their own."""
    return tree_map(lambda x: x.data if isinstance(x, torch.Tensor) else x, tree)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self._own: set[int] = set()  # addresses of the recording's memory
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors from outside, and what they hold

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing\nmore text")
        generator = kwargs.get("generator")
        known = {own._cdata for own in self._graph.generators}  # every operator gets a new object of Python
        assert generator is None or generator._cdata in known, "a generator that the graph does not know"
        for x in tensors((args, kwargs)):  # any of them: not every schema tells what an operator writes
            address = x.untyped_storage().data_ptr()
            if address not in self._own:
                self._written.setdefault(address, (x.data, x.data.clone()))
        before = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        results = function(*args, **kwargs)
        self._own |= {x.untyped_storage().data_ptr() for x in tensors(results)} - before
        self._graph.operators.append((function, *_aliases((args, kwargs, results))))
        return results

    def undo(self) -> None:
        for _, _, _, results in self._graph.operators:
            for x in tensors(results):
                if x.untyped_storage().data_ptr() in self._own and x.is_floating_point():
                    x.fill_(float("nan"))
        for x, old in self._written.values():
            x.copy_(old)


@contextlib.contextmanager
def record(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """Instead of torch.cuda.graph."""
    assert capture_error_mode == "thread_local", "other workers go on while one records"
    assert stream is not None, "the default stream of recordings belongs to one device"
    assert not torch.is_autocast_cache_enabled(), "a recording must not read casts that autocast has kept"
    recorder = _Recorder(graph)
    with recorder:
        yield
    recorder.undo()


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """From here on, CPU devices can be recorded. Returns all recordings, in the order in which they are made."""
    Graph.made = []
    for name, instead in {
        "CUDAGraph": Graph,
        "graph": record,
        "Stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_stream": _Stream,
        "graph_pool_handle": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    monkeypatch.setattr("autopar.runtime.module.check_compile", lambda compile, devices: None)
    return Graph.made
