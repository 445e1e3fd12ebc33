"""Fused random operators draw from a device's default generator: reproducible, one thread at a time, put back after.

The CPU is used in place of a GPU where numbers matter: its default generator takes on another state like that of a GPU.
Fake tensors on `cuda:0` and `cuda:1`, with generators that write down what happens, show what a GPU would be asked.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import RandomLayer, gradients
from test_random_operators import CASES, assert_reproducible, make, steps
from test_sharded_execution import assert_devices_draw_alike
from test_sharded_execution import (
    test_random_numbers_come_again_with_the_seed_and_when_a_stage_recomputes as random_numbers_come_again,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Plan
from autopar.capture.program import capture
from autopar.lower import random_operators
from autopar.lower.random_operators import (
    drawn_apart,
    dropout,
    from_global_generator,
    scaled_dot_product_attention,
    seeded,
)
from autopar.plan.recompute import RECOMPUTE
from cost_models.kernels.device_kernels import DeviceKernels, device_type_of

aten = torch.ops.aten


class LendingGenerator:
    """The CPU's default generator, which takes on the state of another one as that of a GPU does."""

    def __init__(self) -> None:
        self.other: torch.Generator | None = None

    def graphsafe_get_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def graphsafe_set_state(self, state: torch.Generator | torch.Tensor) -> None:
        if self.other is not None:  # that of a GPU shares its state
            self.other.set_state(torch.get_rng_state())
        self.other = state if isinstance(state, torch.Generator) else None
        torch.default_generator.set_state(state.get_state() if isinstance(state, torch.Generator) else state)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and attention of CPU tensors run as those of a GPU do."""
    lending = LendingGenerator()
    monkeypatch.setattr(random_operators, "_FUSED", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(random_operators, "_default_generator", lambda device: lending)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("replicated", [False, True], ids=["stages", "replicas"])
@pytest.mark.parametrize("name", ["dropout", "attention", "other kinds"])
def test_the_same_seed_gives_the_same_bits_whatever_threads_do(name: str, replicated: bool) -> None:
    assert name in CASES
    pm, inputs = make(name, replicated)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert_reproducible(pm, inputs)
    finally:
        sys.setswitchinterval(switching)
    pm.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("how", ["loss.backward", "train_step"])
def test_a_step_takes_one_number_from_the_callers_generator(how: str) -> None:
    pm, inputs = make("attention")
    steps(pm, inputs, 1, how)  # two steps
    found = torch.get_rng_state()
    torch.manual_seed(1)
    for _ in range(2):
        torch.randint(1 << 62, ())
    assert torch.equal(found, torch.get_rng_state())
    pm.close()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[RandomLayer() for _ in range(4)])


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("modes", [(mode, other) for mode in RECOMPUTE for other in ("none", mode)], ids="+".join)
def test_a_forward_that_runs_again_draws_the_same_numbers(modes: tuple[str, str], schedule: str) -> None:
    model = layers()
    recompute = dict(enumerate(modes))
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, schedule=schedule, recompute=recompute)
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    output = pm(torch.randn(4, 2, 5, 8))
    output.sum().backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None
        found = (model.get_parameter(name).detach() * gradient).sum()
        torch.testing.assert_close(found, output.detach().sum(), rtol=1e-4, atol=1e-4)
    pm.close()


@pytest.mark.usefixtures("fused")
def test_devices_with_the_same_part_draw_the_same_numbers_and_others_different_ones() -> None:
    x = torch.ones(64, 64)
    found = []
    for part in (0, 0, 1):
        with seeded(7):
            found.append(drawn_apart(3, part, aten.dropout.default, x, 0.5, True))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert abs(found[2].mean().item() - 1) < 0.1


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_sharded_stages_draw_again_with_the_seed_and_when_they_recompute(mesh: tuple[int, ...]) -> None:
    random_numbers_come_again(mesh)
    assert_devices_draw_alike(torch.ones(64, 64))


@pytest.mark.usefixtures("fused")
def test_operators_of_one_micro_batch_draw_different_numbers() -> None:
    x = torch.ones(64, 64)
    with seeded(7):
        first, second = dropout(x, 0.5), dropout(x, 0.5)
        with seeded(8):
            inner = dropout(x, 0.5)
        third = dropout(x, 0.5)
    assert not any(torch.equal(a, b) for a, b in ((first, second), (second, third), (inner, third), (first, third)))
    with seeded(7):
        assert torch.equal(dropout(x, 0.5), first)
        assert torch.equal(dropout(x, 0.5), second)
        assert torch.equal(dropout(x, 0.5), third), "what ran inside took none of its numbers"


@pytest.mark.usefixtures("fused")
def test_draws_of_many_threads_are_those_of_one() -> None:
    x = torch.ones(32, 32)

    def draws(seed: int) -> list[torch.Tensor]:
        with seeded(seed):
            return [dropout(x, 0.5) for _ in range(20)]

    torch.manual_seed(0)
    before, wanted = torch.get_rng_state(), [draws(seed) for seed in range(8)]
    found: dict[int, list[torch.Tensor]] = {}
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda s=seed: found.setdefault(s, draws(s))) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    for seed, tensors in enumerate(wanted):
        assert all(torch.equal(a, b) for a, b in zip(found[seed], tensors, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("fused")
def test_a_failing_operator_gives_the_generator_back() -> None:
    before = torch.get_rng_state()
    with seeded(7), pytest.raises(RuntimeError):
        scaled_dot_product_attention(torch.ones(2, 3), torch.ones(4, 5), torch.ones(6, 7), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(7):
        dropout(torch.ones(3), 0.5)  # the lock is free


@pytest.mark.slow
def test_a_stage_that_draws_nothing_leaves_the_global_generators_alone_where_its_layers_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saving and setting them would disturb another worker that draws."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a worker sets a global generator")

    model = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)])
    plan = Plan.from_split({"0": 0, "2": 1}, n_microbatches=2, recompute={0: "full", 1: "selective"})
    pm = autopar.parallelize(model, ["cpu", "cpu"], plan=plan, cache=False)
    x = torch.randn(4, 5, 8)
    pm(x).sum().backward()
    monkeypatch.setattr(torch, "set_rng_state", refuse)
    monkeypatch.setattr(torch.random, "set_rng_state", refuse)
    pm(x).sum().backward()
    pm.close()


# -- what a GPU is asked ----------------------------------------------------------------------------------------------

Event = tuple[Any, ...]


class OwnGenerator:
    """Of a thread, for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seeds = device, list[int]()

    def manual_seed(self, seed: int) -> None:
        self.seeds.append(seed)


class RecordingGenerator:
    """The default generator of a GPU: writes down what is asked of it."""

    def __init__(self, index: int, log: list[Event]) -> None:
        self.index, self.log, self.state = index, log, object()

    def graphsafe_get_state(self) -> object:
        self.log.append(("save", self.index))
        return self.state

    def graphsafe_set_state(self, state: object) -> None:
        assert random_operators._locks[torch.device("cuda", self.index)].locked()
        if isinstance(state, OwnGenerator):
            assert state.device == torch.device("cuda", self.index)
            self.log.append(("lend", self.index, state.seeds))
        else:
            assert state is self.state, "another state than the saved one"
            self.log.append(("restore", self.index))


class Launches(TorchDispatchMode):
    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags or func is aten.native_dropout.default:
            devices = {t.device for t in (result if isinstance(result, tuple) else (result,))}
            self.log.extend(("draw", device.index, func) for device in devices if device.type == "cuda")
        return result


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """Two fake GPUs, and what they are asked to do."""
    log: list[Event] = []
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(RecordingGenerator(i, log) for i in range(2)))
    monkeypatch.setattr(random_operators._current, "generators", {})
    real = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: (real if device.type == "cpu" else OwnGenerator)(device))
    with FakeTensorMode(), Launches(log):
        yield log


def asked(log: list[Event]) -> list[str]:
    return [f"{event[0]} {event[1]}" for event in log]


ONE_DRAW = "save lend draw restore"
CALLS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "dropout": (lambda: dropout(torch.empty(4, 8, device="cuda:1"), 0.5), [1]),
    "attention": (
        lambda: scaled_dot_product_attention(*[torch.empty(2, 4, 8, 8, device="cuda:0")] * 3, None, 0.1),
        [0],
    ),
    "a tensor": (lambda: _other(aten.rand_like.default, torch.empty(3, device="cuda:1")), [1]),
    "a new tensor": (lambda: _other(aten.rand.default, [3], device=torch.device("cuda:1")), [1]),
    "a shard": (lambda: drawn_apart(0, 1, aten.dropout.default, torch.empty(4, 8, device="cuda:1"), 0.5, True), [1]),
    "the CPU": (lambda: _other(aten.rand_like.default, torch.empty(3)), []),
}


def _other(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Seeds are real numbers: only the operator itself runs on fake tensors."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with unset_fake_temporarily():

        def on_fake_tensors(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return operator(*args, **kwargs)

        return from_global_generator(on_fake_tensors, *args, **kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_the_generator_of_its_own_gpu_has_the_micro_batchs_state_for_an_operator_and_then_its_own(
    name: str, gpus: list[Event]
) -> None:
    call, indices = CALLS[name]
    with seeded(7):
        call()
    assert asked(gpus) == [f"{what} {index}" for index in indices for what in ONE_DRAW.split()]
    assert not any(lock.locked() for lock in random_operators._locks.values())
    for _, _, seeds in (event for event in gpus if event[0] == "lend"):
        assert len(seeds) == 1, "seeded once for the micro-batch"
        assert name == "a shard" or seeds == [7]


def test_dropout_and_attention_are_one_operator_on_a_gpu(gpus: list[Event]) -> None:
    """Four kernels and a mask of the size of the scores, on a CPU."""
    x = torch.empty(4, 8, device="cuda:0")
    with seeded(7):
        dropout(x, 0.5)
    assert [event[2] for event in gpus if event[0] == "draw"] == [aten.native_dropout.default]


def test_nothing_is_drawn_at_the_ends_of_dropouts_range_and_in_evaluation(gpus: list[Event]) -> None:
    x = torch.empty(4, 8, device="cuda:0")
    with seeded(7):
        dropout(x, 0.0), dropout(x, 1.0), dropout(x, 0.5, False)
    assert not gpus


def test_a_stage_called_by_hand_draws_from_the_callers_generator(gpus: list[Event]) -> None:
    dropout(torch.empty(4, 8, device="cuda:0"), 0.5)
    from_global_generator(aten.rand.default, [3], device=torch.device("cuda:1"))
    assert asked(gpus) == ["draw 0", "draw 1"]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.drop(self.a(x))
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2) + torch.rand(x.shape[-1], device=x.device)


def test_a_stage_on_a_gpu_asks_torch_for_its_own_attention_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that the stage's graph calls with tensors on a GPU are those of the model."""
    program = capture(Dropping(), (torch.randn(4, 2, 5, 8),), {})
    graph, module = program.graph, program.graph_module
    assert random_operators.lower_random(graph, module)
    called: list[tuple[Any, torch.device]] = []
    monkeypatch.setattr(random_operators, "_fused", lambda operator, x, *rest, **options: called.append(operator) or x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 2, 5, 8, device="cuda:0")
        for node in graph.nodes:
            if node.target is random_operators.dropout:
                node.target(x, *node.args[1:])
            if node.target is random_operators.scaled_dot_product_attention:
                node.target(x, x, x, *node.args[3:], **node.kwargs)
    assert called == [aten.dropout.default, aten.scaled_dot_product_attention.default]


def _saved_bytes(run: Callable[[], torch.Tensor]) -> int:
    """What a forward keeps for its backward."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(saved.values())


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_rehearsed_stage_keeps_what_the_device_keeps(device_type: str) -> None:
    """On meta tensors: a byte an element of a dropout on a GPU, and no scores of an attention."""
    x = torch.empty(4, 8, 512, 16, device="meta", requires_grad=True)
    with DeviceKernels(device_type):
        mask = _saved_bytes(lambda: dropout(x, 0.5))
        scores = _saved_bytes(lambda: scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    each = x.numel()
    assert mask == (each if device_type == "cuda" else 4 * each)
    assert (scores < 4 * 8 * 512 * 512) == (device_type == "cuda")
    assert device_type_of(x) == "meta"
