"""Writes in place into an activation: a batch is split only if the parts then give what the whole batch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.analysis.batching import Batching, study
from autopar.capture.program import Program, capture

BATCH, STEPS, WIDTH = 8, 3, 4
Write = Callable[[torch.Tensor], Any]  # writes into a tensor of shape (samples, STEPS, WIDTH)


class Writer(nn.Module):
    """A linear layer, `write` into (a copy of) its result, and another linear layer on all of it."""

    def __init__(self, write: Write, *, copies: bool = False, views_first: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.write, self.copies, self.views_first = write, copies, views_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.a(x)
        if self.copies:
            z = z.clone()
        read = z.view(-1, WIDTH) if self.views_first else z
        self.write(z)
        return self.b(read).view(-1, STEPS, WIDTH)


def batching(model: nn.Module) -> tuple[Program, Batching]:
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    program = capture(model.double().eval(), (x,), {})
    return program, study(program, [x])


def assert_parts_give_the_whole(program: Program, model: nn.Module, sizes: list[int]) -> None:
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        parts = [program.graph_module(part)[0] for part in x.split(sizes)]
        torch.testing.assert_close(torch.cat(parts), model(x))


def fill_row(z: torch.Tensor) -> None:
    z[0] = 0


def fill_rows(z: torch.Tensor) -> None:
    z[:2] = 0


def fill_every_second(z: torch.Tensor) -> None:
    z[::2] = 0


def copy_row(z: torch.Tensor) -> None:
    z[1] = z[0]


def row_into_all(z: torch.Tensor) -> None:
    z[:, 0] = z[2, 0]


def under_no_grad(z: torch.Tensor) -> None:
    with torch.no_grad():
        z[0] = 0


def of_a_block(z: torch.Tensor) -> None:
    with torch.no_grad():
        same = z.view(-1, STEPS * WIDTH)
    same.detach()[0] = 0


SOME_SAMPLES: dict[str, Write] = {
    "the first": fill_row,
    "the last": lambda z: z[-1].add_(1),
    "a range": fill_rows,
    "all but the first": lambda z: z[1:].mul_(3),
    "every second": fill_every_second,
    "selected": lambda z: z.select(0, 0).fill_(1),
    "strided over samples": lambda z: z.view(-1)[::7].zero_(),
    "rows of a late sample": lambda z: z.view(-1)[70:].zero_(),
    "rows of late samples, strided": lambda z: z.view(-1)[60::12].zero_(),
    "one entry": lambda z: z.view(-1)[5].add_(1),
    "a part of the first": lambda z: z[0][1:].relu_(),
    "a half": lambda z: z.detach().chunk(2)[0].neg_(),
    "transposed": lambda z: z.transpose(0, 1).select(1, 2).zero_(),
    "from one to another": copy_row,
    "from one to all": row_into_all,
    "under no_grad": under_no_grad,
    "through a block's result": of_a_block,
    "an indexed row": lambda z: z.index_fill_(0, torch.tensor([0]), 1.0),
    "reversed": lambda z: z.copy_(z.flip(0)),
    "centred": lambda z: z.sub_(z.mean(0)),
}


def fill_step(z: torch.Tensor) -> None:
    z[:, 0] = 0


def add_step(z: torch.Tensor) -> None:
    z[:, -1] += z[:, 0]


def fill_mask(z: torch.Tensor) -> None:
    z[z > 0] = 0


def fill_sample_mask(z: torch.Tensor) -> None:
    z[z[:, 0, 0] > 0] = 0


def fill_folded(z: torch.Tensor) -> None:
    z.view(-1, STEPS * WIDTH)[:, 3] = 0


def constants(z: torch.Tensor) -> None:
    factors = torch.tensor([1.0, 2.0, 3.0], dtype=z.dtype)
    factors[0] = 5
    z.mul_(factors[:, None])


def own_table(z: torch.Tensor) -> None:
    table = torch.zeros(STEPS, WIDTH, dtype=z.dtype)
    table[0] = 1
    table[1:].add_(2)
    z[:] = z + table


OWN_SAMPLE: dict[str, Write] = {
    "a step": fill_step,
    "steps": lambda z: z[:, 1:].mul_(2),
    "a step from another": add_step,
    "folded": fill_folded,
    "every entry": lambda z: z.view(-1).relu_(),
    "the same entry of each": lambda z: z.view(-1)[1 :: STEPS * WIDTH].zero_(),
    "every second entry": lambda z: z.view(-1)[::2].mul_(2),
    "a mask": fill_mask,
    "a mask of samples": fill_sample_mask,
    "masked": lambda z: z.masked_fill_(z < 0, 2.0),
    "copied": lambda z: z[:, 0].copy_(z[:, 1].sin()),
    "transposed": lambda z: z.transpose(0, 1)[1].neg_(),
    "scattered": lambda z: z.scatter_(1, z.argmax(1, keepdim=True), 0.5),
    "a slice of a chunk": lambda z: z.detach().chunk(2, 2)[1][:, 1].zero_(),
    "constants of its own": constants,
    "a table of its own": own_table,
}


@pytest.mark.parametrize("views_first", [False, True])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("name", SOME_SAMPLES)
def test_a_batch_is_whole_where_some_of_its_samples_are_written(name: str, copies: bool, views_first: bool) -> None:
    if name == "under no_grad" and not copies:
        pytest.skip("torch refuses to change the result of a linear layer there")
    model = Writer(SOME_SAMPLES[name], copies=copies, views_first=views_first)
    program, found = batching(model)
    assert not found.splittable
    with pytest.raises(AssertionError, match="not close"):
        assert_parts_give_the_whole(program, model, [3, 5])


@pytest.mark.parametrize("views_first", [False, True])
@pytest.mark.parametrize("name", OWN_SAMPLE)
def test_a_batch_is_split_where_every_sample_is_written_alike(name: str, views_first: bool) -> None:
    model = Writer(OWN_SAMPLE[name], copies=True, views_first=views_first)
    program, found = batching(model)
    assert found.splittable, found.obstacle
    assert not found.unproven
    for sizes in ([3, 5], [1, 2, 5], [4, 4]):
        assert_parts_give_the_whole(program, model, sizes)


View = Callable[[torch.Tensor], torch.Tensor]
_VIEWS: dict[str, View] = {  # of tensors of any shape with at least one dimension
    "flat": lambda v: v.reshape(-1) if not v.is_contiguous() else v.view(-1),
    "transposed": lambda v: v.transpose(0, -1),
    "first": lambda v: v[:1],
    "last": lambda v: v[-1:],
    "rest": lambda v: v[1:],
    "every second": lambda v: v[::2],
    "every fourth": lambda v: v[1::4],
    "last entry": lambda v: v[..., -1:],
    "first entries": lambda v: v[..., :2],
    "one more": lambda v: v.unsqueeze(0),
    "detached": lambda v: v.detach(),
}
_WRITES: dict[str, Write] = {
    "fill": lambda v: v.fill_(2),
    "scale": lambda v: v.mul_(-3),
    "mask": lambda v: v.masked_fill_(v > 0, 1),
    "copy": lambda v: v.copy_(v.cos()),
    "put": lambda v: v.index_put_((v < 0,), torch.zeros((), dtype=v.dtype)),
    "set": lambda v: v.__setitem__((..., 0), 4.0),
}


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, database=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(list(_VIEWS)), max_size=3), st.sampled_from(list(_WRITES))),
        min_size=1,
        max_size=2,
    ),
    st.booleans(),
    st.sampled_from([[3, 5], [1, 7], [4, 4], [2, 1, 5]]),
)
def test_whatever_is_written_through_views_a_split_batch_gives_what_the_whole_gives(
    writes: list[tuple[list[str], str]], views_first: bool, sizes: list[int]
) -> None:
    def write(z: torch.Tensor) -> None:
        for views, name in writes:
            v = z
            for view in views:
                v = _VIEWS[view](v)
            _WRITES[name](v)

    model = Writer(write, copies=True, views_first=views_first)
    program, found = batching(model)
    if found.splittable:
        assert_parts_give_the_whole(program, model, sizes)
    elif not any(views for views, _ in writes):
        raise AssertionError(found.obstacle)


class Counter(nn.Module):
    """Writes a row of a buffer, and returns what it reads there."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.write = nn.Linear(WIDTH, WIDTH), write
        self.register_buffer("counts", torch.zeros(STEPS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.counts, torch.Tensor)
        return self.a(x) * self.write(self.counts)


def count(counts: torch.Tensor) -> torch.Tensor:
    counts[0] += 1
    return counts


def count_under_no_grad(counts: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return counts.add_(1)


@pytest.mark.parametrize("write", [count, count_under_no_grad, lambda counts: counts.select(0, 0).add_(1)])
def test_a_batch_is_whole_where_a_buffer_is_written_through_a_view_or_under_no_grad(write: Write) -> None:
    model = Counter(write)
    _, found = batching(model)
    assert "writes buffer 'counts', once for every batch" in found.obstacle


def test_batch_norms_under_no_grad_leave_a_batch_split() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(STEPS)), nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                hidden = self.body(self.body(x))
            return self.head(hidden)

    x = torch.randn(BATCH, STEPS, WIDTH)
    found = study(capture(Frozen().train(), (x,), {}), [x])
    assert found.splittable, found.obstacle
