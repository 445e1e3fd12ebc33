"""Values that a buffer cannot keep are refused by the buffer's name, and captures leave the model as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assigned_buffers import USES, WIDTH, Assigning, Use, counted, observed
from torch import nn

from autopar.capture.program import capture
from autopar.errors import AutoparWarning, CaptureError

X = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def tables(model: nn.Module) -> list[Any]:
    return [
        (m, [*m._buffers.items()], {k: None if b is None else b.clone() for k, b in m._buffers.items()})
        for m in model.modules()
    ]


def assert_unchanged(model: nn.Module, before: list[Any]) -> None:
    for module, buffers, values in before:
        assert [*module._buffers] == [name for name, _ in buffers]
        for name, buffer in buffers:
            assert module._buffers[name] is buffer
            torch.testing.assert_close(buffer, values[name])


@pytest.mark.parametrize("use", USES)
def test_a_capture_leaves_buffers_as_they_were(use: Use) -> None:
    model = nn.Sequential(Assigning(use), Assigning(use))
    before = tables(model)
    capture(model, (X,), {})
    assert_unchanged(model, before)


@pytest.mark.parametrize("once", [False, True])
def test_each_of_equal_layers_writes_its_own_buffer(once: bool) -> None:
    model = nn.Sequential(*(Assigning(counted) for _ in range(3)))
    program = capture(model, (X,), {}, trace_equal_layers_once=once)
    writes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert [str(node.args[0].target) for node in writes] == ["0.count", "1.count", "2.count"]


def assign(name: str, value: Callable[[Any, torch.Tensor], Any], *, by_table: bool = False) -> Use:
    def use(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.linear(x) + m.mean.sum()
        new = value(m, y)
        if by_table:
            m._buffers[name] = new
        else:
            setattr(m, name, new)
        return y

    return use


REFUSED: dict[str, tuple[Use, str]] = {
    "longer": (
        assign("mean", lambda m, y: torch.cat([m.mean, m.mean])),
        r"a tensor of shape \(12,\) .* to buffer '1\.mean' \(\(6,\), torch\.float32\).*register the buffer with",
    ),
    "broadcast": (assign("mean", lambda m, y: m.mean.sum()), r"a tensor of shape \(\) .* to buffer '1\.mean'"),
    "a fraction": (assign("count", lambda m, y: m.count + 0.5), r"type torch\.float32 to buffer '1\.count' .*int64"),
    "of all samples": (assign("mean", lambda m, y: y.detach()), r"whose size follows the inputs to buffer '1\.mean'"),
    "of as many samples": (assign("square", lambda m, y: y.detach()), r"to buffer '1\.square'"),
    "a number": (assign("count", lambda m, y: 3, by_table=True), r"an int to buffer '1\.count'"),
    "with its history": (assign("mean", lambda m, y: y.mean(0)), r"requires grad to buffer '1\.mean' and reads it"),
    "removed": (assign("mean", lambda m, y: None), r"removes buffer '1\.mean'"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_buffer_cannot_keep_is_refused_by_name_and_changes_nothing(name: str, strict: bool) -> None:
    use, message = REFUSED[name]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Assigning(use))
    model[1].register_buffer("square", torch.zeros(len(X), WIDTH))
    before = tables(model)
    with pytest.raises(CaptureError, match=message):
        capture(model, (X,), {}, strict=strict)
    assert_unchanged(model, before)


@pytest.mark.parametrize("shared", ["the tensor", "its memory", "a parameter"])
def test_a_buffer_that_shares_memory_is_refused_with_both_names(shared: str) -> None:
    model = nn.Sequential(Assigning(observed), Assigning(lambda m, x: m.linear(x) * m.mean))
    mean = model[0].mean
    if shared == "a parameter":
        model[0].mean = model[1].linear.bias.detach()
    else:
        model[1].mean = mean if shared == "the tensor" else mean[:]
    other = "1.linear.bias" if shared == "a parameter" else "1.mean"
    before = tables(model)
    with pytest.raises(
        CaptureError, match=re.escape(f"'0.mean' ((6,), torch.float32), which shares its memory with '{other}'")
    ):
        capture(model, (X,), {})
    assert_unchanged(model, before)


def test_one_value_for_all_names_of_a_buffer_is_written_once() -> None:
    def both(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.mean = m.other = m.mean + 1
        y: torch.Tensor = m.linear(x) * m.other
        return y

    model = nn.Sequential(Assigning(both))
    model[0].other = model[0].mean
    wanted, buffer = model[0].mean + 1, model[0].mean
    program = capture(model, (X,), {})
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)) == 1
    found = program.graph_module(X)[0]
    torch.testing.assert_close(buffer, wanted)
    torch.testing.assert_close(found, model[0].linear(X) * wanted)


def test_a_value_with_its_history_that_no_call_reads_is_warned_of() -> None:
    def use(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.linear(x)
        m.mean = y.mean(0)
        return y

    model = nn.Sequential(Assigning(use))
    with pytest.warns(AutoparWarning, match=r"requires grad to buffer '0\.mean', but a captured model keeps the value"):
        program = capture(model, (X,), {})
    program.graph_module(X)
    torch.testing.assert_close(model[0].mean, model[0].linear(X).mean(0))
    assert not model[0].mean.requires_grad


def test_a_cast_to_the_type_that_a_module_has_writes_nothing() -> None:
    def cast(m: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = m.to(torch.float32).linear(x) * m.mean
        return y

    program = capture(nn.Sequential(Assigning(cast)), (X,), {})
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)


def test_a_model_that_assigns_a_buffer_is_refused_where_symbolic_trace_would_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(torch.export, "export", refuse)
    model = nn.Sequential(Assigning(counted))
    before = tables(model)
    with pytest.raises(CaptureError, match="not today"):
        capture(model, (X,), {}, strict=True)
    assert_unchanged(model, before)
