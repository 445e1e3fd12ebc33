"""What is proven holds: micro-batches of any sizes, put together as the proof says, give what the whole batch gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, Case, clip, clip_inputs
from torch import nn
from torch.nn import functional as F

from autopar.analysis.batch_proof import OutputCombination, Proof, prove
from autopar.analysis.node_values import close
from autopar.analysis.operators import compute_nodes, operator_name
from autopar.analysis.rules.table import bind, rule_name
from autopar.capture.program import Program, capture

BATCH, STEPS, WIDTH = 6, 5, 8


class Net(nn.Module):
    """Functions of (model, hidden, x) one after the other: x and hidden of shape (B, STEPS, WIDTH)."""

    def __init__(self, *tails: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm, self.table = nn.BatchNorm1d(WIDTH), nn.Embedding(9, WIDTH)
        self.tails = tails

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x)
        for tail in self.tails:
            hidden = tail(self, hidden, x)
        return hidden


def captured(*tails: Callable[..., Any]) -> Program:
    torch.manual_seed(0)
    return capture(Net(*tails).double().eval(), (torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64),), {})


def combined(output: OutputCombination | None) -> tuple[str, int | None] | None:
    return None if output is None else (output.combine, output.batch_dim)


def verdict(*tails: Callable[..., Any]) -> Proof:
    return prove(captured(*tails))


def assert_holds(program: Program, proof: Proof, leaves: list[Any], sizes: list[int]) -> None:
    """The outputs of micro-batches of these sizes, combined as the proof says, are those of the whole."""
    assert proof.verdict == "proven", proof.why
    inputs = zip(leaves, program.inputs, strict=True)
    split = [[x] * len(sizes) if i.batch_dim is None else x.split(sizes, i.batch_dim) for x, i in inputs]
    with torch.no_grad():
        parts = [program.graph_module(*part) for part in zip(*split, strict=True)]
        whole = program.graph_module(*leaves)
    for index, (expected, how) in enumerate(zip(whole, proof.outputs, strict=True)):
        pieces = [part[index] for part in parts]
        assert how is not None
        weights = [part[program.weights[index]] for part in parts] if index in program.weights else sizes
        total = sum(weights)
        found = {
            "cat": lambda p=pieces, d=how.batch_dim: torch.cat(p, d),
            "sum": lambda p=pieces: sum(p),
            "mean": lambda p=pieces, w=weights, t=total: sum(x * (n / t) for x, n in zip(p, w, strict=True)),
            "first": lambda p=pieces: p[0],
        }[how.combine]()
        if isinstance(expected, torch.Tensor):
            tolerance = 1e-9 if expected.dtype is torch.float64 else 1e-5
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, msg=lambda m, i=index: f"{i}: {m}"
            )
        else:
            assert found == expected


def folded(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = m.b(h.transpose(0, 1).reshape(-1, WIDTH))  # (steps batch) width
    return rows.view(STEPS, x.shape[0], WIDTH).transpose(0, 1)


def attention(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (y.reshape(x.shape[0], STEPS, 2, 4).transpose(1, 2) for y in (h, m.b(h), x))
    mask = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape[0], STEPS, WIDTH)


def picked(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    lengths = (x[:, :, 0] > 0).sum(1) % STEPS
    return h + h[torch.arange(x.shape[0]), lengths][:, None]


def written(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = h[:, :-1]
    y[:, 0] = m.b.bias
    return y


def masked(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, h, torch.full((x.shape[0], 1, 1), -1.0, dtype=x.dtype)).masked_fill(h > 2, 0.0)


def looked_up(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h + m.table(x.abs().long().clamp(max=8)[:, :, 0])


def written_means(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[:, 0] = h.mean((0, 1))
    return y + h


def related(m: Net, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = h.flatten(1)
    return ((rows @ rows.t()) @ rows).view_as(h)


ALONE: dict[str, Callable[..., Any]] = {
    "linear": lambda m, h, x: m.b(h),
    "pointwise": lambda m, h, x: F.gelu(h) * x.sigmoid() - 2 * h.tanh(),
    "layer norm": lambda m, h, x: m.norm(h),
    "batch norm": lambda m, h, x: m.batch_norm(h.transpose(1, 2)).transpose(1, 2),
    "attention": attention,
    "folded": folded,
    "rows": lambda m, h, x: m.b(h.reshape(-1, WIDTH)).view(x.shape[0], -1, WIDTH),
    "split heads": lambda m, h, x: h.reshape(-1, STEPS, 2, 4).permute(0, 2, 1, 3).flatten(0, 1).softmax(1)
                                    .view(-1, 2, STEPS, 4).transpose(1, 2).reshape(-1, STEPS, WIDTH),
    "steps mixed": lambda m, h, x: h.cumsum(1) + h.flip(1) + h.roll(1, 1) + h.sort(1).values - h.mean(1, keepdim=True),
    "two batches": lambda m, h, x: torch.stack(m.b(torch.cat([h, x])).chunk(2)).sum(0),
    "picked by sample": picked,
    "written in parts": written,
    "masked": masked,
    "looked up": looked_up,
    "gathered": lambda m, h, x: h.gather(1, x.argsort(1)),
    "products": lambda m, h, x: torch.einsum("bsh,bth->bst", h, x) @ h,
    "in place": lambda m, h, x: m.b(h).relu_().add_(1),
    "doubled": lambda m, h, x: h.repeat_interleave(2, 0).view(-1, 2, STEPS, WIDTH).sum(1),
    "repeated": lambda m, h, x: h.repeat(2, 1, 1).view(2, -1, STEPS, WIDTH).mean(0),
    "positions": lambda m, h, x: h + torch.arange(STEPS)[:, None].expand(x.shape[0], -1, 1),
    "added by number": lambda m, h, x: x.index_add(0, torch.arange(x.shape[0]), h),
    "typed like another": lambda m, h, x: h.type_as(x).view_as(x) + x.new_zeros(x.shape),
    "padded": lambda m, h, x: F.pad(h, (0, 0, 1, 1))[:, 1:-1],
}  # fmt: skip
MEETING: dict[str, Callable[..., Any]] = {
    "centred": lambda m, h, x: h - h.mean(0),
    "softmax over the batch": lambda m, h, x: h.softmax(0),
    "running sum over the batch": lambda m, h, x: h.cumsum(0),
    "reversed": lambda m, h, x: h + h.flip(0),
    "rolled": lambda m, h, x: h.roll(1, 0),
    "relative to the first": lambda m, h, x: h - h[:1],
    "relative to the first, selected": lambda m, h, x: h - h[0],
    "scaled by the largest": lambda m, h, x: h / h.abs().max(),
    "scaled by the norm": lambda m, h, x: h / h.norm(),
    "sorted": lambda m, h, x: h.sort(0).values,
    "similarities": related,
    "scaled by the batch": lambda m, h, x: h * x.shape[0],
    "numbered": lambda m, h, x: h + torch.arange(x.shape[0])[:, None, None],
    "all by one": lambda m, h, x: torch.where((x > 9).any(), h, x),
    "softmax over rows": lambda m, h, x: h.reshape(-1, WIDTH).softmax(0).reshape_as(h),
    "folded the other way": lambda m, h, x: h.reshape(STEPS, -1, WIDTH).softmax(1).reshape(-1, STEPS, WIDTH),
    "a mean written in parts": written_means,
    "rows by number": lambda m, h, x: h + h[torch.arange(x.shape[0]) - 1],
    "picked by all": lambda m, h, x: h[:, :, h.mean((0, 1)).argsort()],
    "a sum over the batch": lambda m, h, x: h + (h.flatten(1).t() @ x.flatten(1)).view(STEPS, WIDTH, -1)[:, :, 0],
}
HEADS: dict[str, tuple[Callable[..., Any], tuple[str, int | None] | None]] = {  # None: no way to combine
    "as it is": (lambda m, h, x: h, ("cat", 0)),
    "transposed": (lambda m, h, x: h.transpose(0, 1), ("cat", 1)),
    "rows": (lambda m, h, x: h.reshape(-1, WIDTH), ("cat", 0)),
    "mean of steps": (lambda m, h, x: h.mean(1), ("cat", 0)),
    "mean": (lambda m, h, x: h.mean(), ("mean", None)),
    "mean over the batch": (lambda m, h, x: m.b(h.mean(0)) * 2 + 1, ("mean", None)),
    "sum": (lambda m, h, x: -h.sum(), ("sum", None)),
    "sum over the batch": (lambda m, h, x: h.sum((0, 1)) / 3, ("sum", None)),
    "sum by samples": (lambda m, h, x: h.sum() / (2 * x.shape[0]), ("mean", None)),
    "mean loss": (lambda m, h, x: F.mse_loss(h, x), ("mean", None)),
    "sum loss": (lambda m, h, x: F.mse_loss(h, x, reduction="sum"), ("sum", None)),
    "a product over the batch": (lambda m, h, x: h.flatten(1).t() @ x.flatten(1), ("sum", None)),
    "parameter": (lambda m, h, x: m.b.weight * 2, ("first", None)),
    "count": (lambda m, h, x: (h > 0).sum(), ("sum", None)),
    "size": (lambda m, h, x: x.shape[0] * 2, ("sum", None)),
    "folded": (lambda m, h, x: h.transpose(0, 1).reshape(-1, WIDTH), None),
    "two batches": (lambda m, h, x: torch.cat([h, x]), None),
    "mean and one": (lambda m, h, x: (h.mean() ** 2).sqrt(), None),
    "sum and one": (lambda m, h, x: h.sum() + 1, None),
    "mean of counted": (lambda m, h, x: (h * (x > 0)).sum() / (x > 0).sum(), None),
    "variance": (lambda m, h, x: h.var(), None),
    "numbers": (lambda m, h, x: torch.arange(x.shape[0]), None),
    "size and one": (lambda m, h, x: x.shape[0] + 1, None),
}


@pytest.mark.parametrize("name", ALONE)
def test_samples_that_stay_alone_are_proven(name: str) -> None:
    program = captured(ALONE[name])
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    assert_holds(program, prove(program), [x], [1, 3, 2])


@pytest.mark.parametrize("name", MEETING)
def test_samples_that_meet_are_never_proven_and_really_meet(name: str) -> None:
    program = captured(MEETING[name])
    x = torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)
    x[0] += 10
    whole, part = program.graph_module(x)[0], program.graph_module(x[2:])[0]
    assert not close(whole[2:], part)
    assert prove(program).verdict in ("refuted", "open")


@pytest.mark.parametrize("name", HEADS)
def test_outputs_combine_as_the_proof_says_or_not_at_all(name: str) -> None:
    head, how = HEADS[name]
    program = captured(head)
    proof = prove(program)
    assert [combined(one) for one in proof.outputs] == [how]
    if how is None:
        assert proof.verdict == "refuted", proof.why
    else:
        assert_holds(program, proof, [torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)], [4, 1, 1])


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None, database=None)
@given(st.data())
def test_whatever_is_composed_is_proven_just_where_samples_stay_alone(data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.sampled_from(list(ALONE)), min_size=1, max_size=4))
    meets = data.draw(st.none() | st.sampled_from(list(MEETING)))
    head = data.draw(st.sampled_from([name for name, (_, how) in HEADS.items() if how is not None]))
    tails = [ALONE[name] for name in blocks]
    if meets is not None:
        tails.insert(data.draw(st.integers(0, len(tails))), MEETING[meets])
    program = captured(*tails, HEADS[head][0])
    proof = prove(program)
    if meets is None:
        assert proof.verdict == "proven", proof.why
    if proof.verdict == "proven":
        assert meets is None or head in ("parameter", "size"), f"{meets} goes unnoticed"
        sizes = data.draw(st.sampled_from([[3, 3], [1, 5], [2, 1, 3], [1] * BATCH]))
        assert_holds(program, proof, [torch.randn(BATCH, STEPS, WIDTH, dtype=torch.float64)], sizes)


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("centred", "sub.Tensor"),
        ("softmax over the batch", "softmax.int"),
        ("running sum over the batch", "cumsum.default"),
        ("reversed", "flip.default"),
        ("relative to the first, selected", "select.int"),
        ("similarities", "matmul.default"),
        ("numbered", "add.Tensor"),
    ],
)
def test_the_operator_where_samples_meet_is_named_with_its_line(name: str, operator: str) -> None:
    proof = verdict(MEETING[name])
    assert proof.verdict == "refuted"
    assert re.match(rf"aten\.{operator} in module '\(root\)' \(.*test_batch_proof\.py:\d+\) mixes samples", proof.why)


def test_a_division_by_what_all_samples_count_is_named() -> None:
    proof = verdict(lambda m, h, x: (h * (x > 0)).sum() / (x > 0).sum().clamp(1))
    assert proof.verdict == "refuted"
    assert re.match(r"aten\.div\.Tensor .* divides by a number computed from the values of the whole batch", proof.why)


class Labelled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.factor = nn.Linear(WIDTH, 5), factor

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = F.cross_entropy(self.a(x).view(-1, 5), labels.view(-1))
        return loss if self.factor == 1 else self.factor * loss


@pytest.mark.parametrize("factor", [1, 2])
def test_a_mean_over_targets_is_one_by_their_number_and_unknown_without_it(factor: float) -> None:
    labels = torch.randint(0, 5, (BATCH, STEPS))
    labels[0, :3] = -100
    x = torch.randn(BATCH, STEPS, WIDTH)
    program = capture(Labelled(factor), (x, labels), {})
    proof = prove(program)
    if factor == 1:
        assert_holds(program, proof, [x, labels], [1, 5])
    else:
        assert (proof.verdict, proof.outputs) == ("open", (None,))


def test_batch_norm_in_training_is_left_to_the_caller() -> None:
    model = Net(lambda m, h, x: m.batch_norm(h[:, 0])).train()
    assert prove(capture(model, (torch.randn(BATCH, STEPS, WIDTH),), {})).verdict == "proven"


def test_what_squeezes_a_batch_of_one_is_left_open() -> None:
    assert verdict(lambda m, h, x: h.squeeze()).verdict == "open"
    assert verdict(lambda m, h, x: h.squeeze(0)).verdict == "open"
    assert verdict(lambda m, h, x: h[:, :1].squeeze(1)).verdict == "proven"


def test_operators_without_a_rule_and_sizes_that_depend_on_values_are_left_open() -> None:
    proof = verdict(lambda m, h, x: torch.cdist(h, x))
    assert proof.verdict == "open"
    assert re.match(r"aten\.cdist.* has no rule", proof.why)
    assert "a number of entries that depends on values" in verdict(lambda m, h, x: h[h[:, 0, 0] > 0]).why


def test_an_unknown_operator_on_parameters_alone_is_known_to_be_the_same() -> None:
    assert verdict(lambda m, h, x: h @ torch.linalg.inv(m.b.weight)).verdict == "proven"


def test_without_symbolic_sizes_nothing_is_proven() -> None:
    program = captured(ALONE["linear"])
    for node in program.graph.nodes:
        node.meta.pop("val", None)
    assert prove(program).verdict == "open"
    single = capture(Net(ALONE["linear"]), (torch.randn(1, STEPS, WIDTH),), {})
    assert prove(single).verdict == "open"


class Experts(nn.Module):
    """Routes every token to its best expert, and brings the results back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, WIDTH)
        chosen = F.one_hot(self.gate(rows).argmax(-1), 3).t()
        result = torch.zeros_like(rows)
        for expert, mask in zip(self.experts, chosen, strict=True):
            place = mask.nonzero().squeeze(1)
            result.index_add_(0, place, expert(rows[place]))
        return result.view_as(x)


@pytest.mark.slow
def test_routing_to_experts_is_left_open() -> None:
    assert prove(capture(Experts(), (torch.randn(BATCH, STEPS, WIDTH),), {})).verdict == "open"
    case = next(case for case in CASES if case.name == "mixtral")
    assert prove(capture(case.model(), (), case.inputs(5))).verdict == "open"


@pytest.mark.slow
def test_similarities_of_texts_and_images_are_refuted() -> None:
    proof = prove(capture(clip(), (), clip_inputs(4)))
    assert proof.verdict == "refuted"
    assert re.match(r"aten\.matmul\.default in module '\(root\)' \(.*modeling_clip\.py:\d+\)", proof.why)


def _without_rule(program: Program) -> set[str]:
    return {
        operator_name(n) for n in compute_nodes(program.graph) if rule_name(n) is not None and "val" in n.meta
        and isinstance(n.meta["val"], (torch.Tensor, tuple, list)) and bind(n) is None
    }  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "mixtral"], ids=lambda case: case.name)
def test_models_are_proven_and_all_their_operators_have_rules(case: Case) -> None:
    model = case.model()
    inputs = case.inputs(5)
    program = capture(model, (), inputs)
    assert _without_rule(program) == set()
    bound = program.bind((), inputs)
    assert bound is not None
    assert_holds(program, prove(program), bound[0], [2, 3])


def test_hooks_of_inner_modules_leave_a_proof_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    model[1].register_forward_hook(lambda *_: None)
    model[1][0].register_full_backward_hook(lambda *_: None)
    proof = prove(capture(model, (torch.randn(3, 4),), {}))
    assert proof.verdict == "proven"
    assert [combined(one) for one in proof.outputs] == [("cat", 0)]
