"""What ranks run in tests: the plan of a case beside the plain model, and how far the two are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import bert, gpt2, llama, mixtral, resnet, t5, tokens
from random_states import with_states
from shardings import Attention, Convolutions, staged
from tied_models import SharedModules, Tied
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional
from transformers.models.bert import modeling_bert  # noqa: F401  once, before the ranks are forked
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401
from transformers.models.resnet import modeling_resnet  # noqa: F401
from transformers.models.t5 import modeling_t5  # noqa: F401

import autopar
from autopar import AutoparError, Plan
from autopar.capture.program import capture
from autopar.capture.torch_private import tree_leaves
from autopar.schedule.builders import INTERLEAVED


@dataclass(frozen=True)
class Difference:
    """How far a rank was from the plain model."""

    losses: list[float]  # of every step, on this rank
    loss_error: float  # largest, relative
    gradient_errors: dict[str, float]  # by parameter that the rank holds, relative to the largest entry
    parameter_errors: dict[str, float]  # after all steps
    buffer_errors: dict[str, float]
    output_error: float
    held: int  # bytes of this rank's parameters
    optimizer_bytes: int = 0


@dataclass(frozen=True)
class Job:
    """A model, its plan and how it is trained."""

    model: str
    plan: str
    schedule: str = "1f1b"
    n_microbatches: int = 4
    steps: int = 2
    call: str = "train_step"  # or "backward": pm(x), then loss.backward()
    options: dict[str, Any] = field(default_factory=dict)
    exact: bool = False  # compare with the same plan in one process, which must give the same bits
    autocast: torch.dtype | None = None  # around forwards and train_steps; the model is float32 then


class DropoutMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(torch.relu(self.a(x)), 0.3, self.training)
        x = functional.dropout(torch.relu(self.b(x)), 0.3, self.training)
        return self.c(x)


class Norms(nn.Module):
    """Batch norms without a scale, with another momentum, and one that runs twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(12, affine=False), nn.BatchNorm1d(12, momentum=0.3)
        self.twice = nn.BatchNorm1d(12)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.twice(self.a(x) + 3))
        return self.second(self.b(self.twice(2 * x)))


class Recurrent(nn.Module):
    """Its first half runs under an autocast of its own, where its LSTM stays one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.lstm, self.b = nn.Linear(12, 12), nn.LSTM(12, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x, _ = self.lstm(self.a(x))
        return self.b(x.float())


def averaging() -> nn.Module:
    """torch.export refuses it, so the graph calls its modules as a whole."""
    return nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=None), nn.ReLU(), nn.Linear(12, 5))


class Skips(nn.Module):
    """Stage 2 reads what stage 0 made; a frozen layer, and one whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.unused = nn.Linear(12, 12)
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu_(self.a(x))
        second = torch.tanh(self.b(first))
        return self.c(second + first.detach() * 0.5 + first) + 0.0 * self.unused(second).detach()


class Spare(nn.Module):
    """Parameters that no forward reads: two names of one, a frozen one, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.spare, self.again, self.frozen = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.again.weight = self.spare.weight
        self.frozen.requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Contrast(nn.Module):
    """Its end compares all samples, and reads the input, a scale and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.right = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.scale, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        left = self.left(x)
        scores = left @ self.right(left).T * self.scale.exp() + self.bias + x.mean()
        loss = functional.cross_entropy(scores, torch.arange(len(x))) + left.square().mean()
        return {"loss": loss, "left": left}


class Translator(nn.Module):
    """T5 whose decoder reads the first tokens of the encoder's text."""

    def __init__(self) -> None:
        super().__init__()
        self.t5 = t5()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.t5(input_ids=x, decoder_input_ids=x[:, :7], use_cache=False).logits


def without_cache(build: Callable[[], Any]) -> nn.Module:
    """A language model that keeps no keys and values for generating text."""
    model = build()
    model.config.use_cache = False
    found: nn.Module = model
    return found


def resnet50() -> nn.Module:
    """ResNet-50's bottlenecks and strides, one block a stage, narrow; running statistics stay as they are."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="bottleneck", num_labels=4
    )
    model = transformers.ResNetForImageClassification(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    found: nn.Module = model.eval()
    return found


def encoder() -> nn.Module:
    """BERT with the biases of its keys frozen: they add one number to all scores of a query, so that their gradients
    are rounding alone, which AdamW turns into steps as long as any others."""
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("key.bias"))
    return model


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(12, 12), nn.Tanh())))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(8, 12)),
    "mlp with dropout": (DropoutMlp, lambda: torch.randn(8, 12)),
    "norms": (Norms, lambda: torch.randn(8, 12)),
    "skips": (Skips, lambda: torch.randn(8, 12)),
    "spare": (Spare, lambda: torch.randn(8, 12)),
    "cnn": (Convolutions, lambda: torch.randn(8, 3, 8, 8)),
    "frozen cnn": (lambda: Convolutions().eval(), lambda: torch.randn(8, 3, 8, 8)),
    "attention": (Attention, lambda: torch.randn(8, 12, 24)),
    "gpt2": (gpt2, lambda: tokens(8)),
    "bert": (encoder, lambda: tokens(8)),
    "tied": (lambda: Tied(64, 16), lambda: tokens(8)),
    "shared": (SharedModules, lambda: torch.randn(8, 12)),
    "resnet": (resnet, lambda: torch.randn(8, 3, 16, 16)),
    "resnet50": (resnet50, lambda: torch.randn(8, 3, 32, 32)),
    "llama": (lambda: without_cache(llama), lambda: tokens(8)),
    "mixtral": (lambda: without_cache(mixtral), lambda: tokens(8)),
    "t5": (Translator, lambda: tokens(8)),
    "contrast": (Contrast, lambda: torch.randn(8, 12)),
    "recurrent": (Recurrent, lambda: torch.randn(8, 4, 12)),
    "averaging": (averaging, lambda: torch.randn(8, 12)),
}
SINGLE_PRECISION = {"mixtral", "recurrent"}  # grouped matrix products and autocast know no double precision
SPLITS: dict[str, dict[int, dict[str, int]]] = {
    "mlp": {
        2: {str(i): i // 6 for i in range(12)},
        3: {str(i): i // 4 for i in range(12)},
        4: {str(i): i // 3 for i in range(12)},
        6: {str(i): i // 2 for i in range(12)},
    },
    "mlp with dropout": {2: {"a": 0, "b": 1, "c": 1}, 3: {"a": 0, "b": 1, "c": 2}},
    "skips": {3: {"a": 0, "b": 1, "unused": 1, "c": 2}},
    "spare": {2: {"a": 0, "b": 1}},
    "norms": {2: {"a": 0, "twice": 0, "first": 0, "b": 1}, 3: {"a": 0, "twice": 1, "first": 1, "b": 2}},
    "cnn": {2: {"conv1": 0, "norm1": 0, "conv2": 1}},
    "gpt2": {
        2: {"transformer.wte": 0, "transformer.h.1": 0, "transformer.h.2": 1, "lm_head": 1},
        3: {"transformer.wte": 0, "transformer.h.1": 1, "transformer.h.2": 2, "lm_head": 2},
    },
    "bert": {
        2: {"bert.embeddings": 0, "bert.encoder.layer.1": 1},
        3: {"bert.encoder.layer.0": 0, "bert.encoder.layer.1": 1, "classifier": 2},
    },
    "contrast": {2: {"left": 0, "right": 1}},
    "recurrent": {2: {"a": 0, "lstm": 0, "b": 1}},
    "tied": {2: {"embed": 0, "mix": 0, "head": 1}},
    "shared": {2: {"entry": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "layers.4": 1, "exit": 1}},
    "resnet50": {
        2: {"resnet.embedder": 0, "resnet.encoder.stages.2": 1},
        3: {"resnet.embedder": 0, "resnet.encoder.stages.1": 1, "resnet.encoder.stages.3": 2},
    },
    **{
        name: {
            2: {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1},
            3: {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 2},
        }
        for name in ("llama", "mixtral")
    },
    "t5": {
        2: {"t5.encoder": 0, "t5.decoder": 1},
        3: {"t5.encoder": 0, "t5.decoder.block.0": 1, "t5.decoder.block.1": 2},
    },
    "resnet": {3: {"resnet.embedder": 0, "resnet.encoder.stages.0": 1, "resnet.encoder.stages.1": 2, "classifier": 2}},
}


def loss_of(model: str, output: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the output and the batch, which is its own target."""
    found = output.logits if hasattr(output, "logits") else output
    if model in ("gpt2", "llama", "mixtral"):
        return functional.cross_entropy(found[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    if model == "t5":
        return functional.cross_entropy(found.flatten(0, 1), x[:, 1 : 1 + found.shape[1]].flatten())
    return torch.stack([leaf.square().mean() for leaf in tree_leaves(found)]).sum()


def plan_of(job: Job, model: nn.Module, x: torch.Tensor, n: int) -> Plan | None:
    """`chain`: a stage a rank; `chunks v`; `replicas a,b`: of the stages; `hand ..`: degrees; `shards ..`: of random
    strategies; `states .. seed s`: and of random states (ZeRO); `searched`: none, so that the search makes one.

    On ranks, rank 0 makes those that need the model's graph."""
    kind, _, rest = job.plan.partition(" ")
    made: dict[str, Any] = {"n_microbatches": job.n_microbatches, "schedule": job.schedule}
    if kind == "searched":
        return None
    if kind == "chain":
        modes = {0: rest, 1: rest} if rest else {}
        return Plan.from_split(SPLITS[job.model][n], recompute=modes, **made)
    if kind == "chunks":
        made["schedule"] = job.schedule if job.schedule in INTERLEAVED else "interleaved-1f1b"
        return Plan.from_split(SPLITS[job.model][n * int(rest)], **made)
    if kind == "replicas":
        counts = [int(c) for c in rest.split(",")]
        names = iter(f"cpu:{i}" for i in range(n))
        if len(counts) == 1:
            return Plan.from_split({"": 0}, devices=[[next(names) for _ in range(counts[0])]], **made)
        devices = [[next(names) for _ in range(count)] for count in counts]
        return Plan.from_split(SPLITS[job.model][len(counts)], devices=devices, **made)
    if kind == "hand":
        degrees = {name: int(value) for name, value in (pair.split("=") for pair in rest.split())}
        by_hand: dict[str, Any] = {"example_args": (x,), "schedule": job.schedule, **degrees}
        return of_rank_0(lambda: Plan.by_hand(model, ["cpu"] * n, **by_hand))
    rest, _, seed = rest.partition(" seed ")
    meshes: list[tuple[int, ...] | None] = []
    replicas = []
    for text in rest.split():  # 2x2, or 1, or 2*2: two replicas of a mesh of 2
        shape, _, times = text.partition("*")
        sizes = tuple(int(i) for i in shape.split("x"))
        meshes.append(sizes if math.prod(sizes) > 1 else None)
        replicas.append(int(times or 1))
    split = {"": 0} if len(meshes) == 1 else SPLITS[job.model][len(meshes)]

    def with_shards() -> Plan:
        plan = staged(capture(model, (x,), {}), split, meshes, replicas, schedule=job.schedule)
        return with_states(plan, model, int(seed)) if kind == "states" else plan

    return of_rank_0(with_shards)


def of_rank_0(make: Callable[[], Plan]) -> Plan:
    """The plan that `make` returns on rank 0, or its error, on all ranks: to make one takes as long as to train by it.
    Without ranks, it is made here."""
    if not dist.is_initialized():
        return make()
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make().to_json()]
        except AutoparError as error:
            made = [error]
    dist.broadcast_object_list(made, 0)
    if isinstance(made[0], AutoparError):
        raise made[0]
    return Plan.from_json(made[0])


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank has of a whole tensor."""
    for place, count, one in zip(
        like.device_mesh.get_coordinate(), like.device_mesh.shape, like.placements, strict=True
    ):
        if isinstance(one, Shard):
            whole = whole.chunk(count, one.dim)[place]
    return whole


def relative(found: torch.Tensor | None, wanted: torch.Tensor | None, scale: float) -> float:
    if found is None or wanted is None:
        return 0.0 if found is wanted else math.inf
    return ((found - wanted).abs().max() / max(scale, 1e-30)).item() if wanted.numel() else 0.0


def trained(job: Job) -> Difference:
    """Train by the plan and in one process, in turn, from the same weights and the same random numbers."""
    n = dist.get_world_size()
    torch.manual_seed(3)
    build, inputs = MODELS[job.model]
    model, x = build(), inputs()
    if job.model not in SINGLE_PRECISION and job.autocast is None:
        model = model.double()
    model.train(job.model not in ("frozen cnn", "resnet50"))
    x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
    original = copy.deepcopy(model)
    plan = plan_of(job, copy.deepcopy(model), x, n)
    alone = autopar.parallelize(original, ["cpu"] * n, plan=plan) if needs_threads(job) else original
    options = {"n_microbatches": job.n_microbatches} if plan is None else {}
    pm = autopar.parallelize(model, plan=plan, **options, **job.options)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)  # from before the parameters are placed
    theirs = torch.optim.AdamW(original.parameters(), lr=1e-3)
    losses, loss_error, gradient_errors, output_error = [], 0.0, {}, 0.0
    for step in range(job.steps):
        ours.zero_grad()
        theirs.zero_grad()
        torch.manual_seed(step)
        loss, output = stepped(job, pm, x)
        torch.manual_seed(step)
        wanted, expected = stepped(job, alone, x)
        losses.append(loss.item())
        loss_error = max(loss_error, relative(loss, wanted, wanted.abs().item()))
        for a, b in zip(tree_leaves(output), tree_leaves(expected), strict=True):
            output_error = max(output_error, relative(a.detach(), b.detach(), b.abs().max().item()))
        if step == 0:
            largest = max(p.grad.abs().max().item() for p in original.parameters() if p.grad is not None)
            for name, p in pm.named_parameters():
                gradient, whole = p.grad, original.get_parameter(name).grad
                mine = None if whole is None else part_of(whole, p)
                gradient_errors[name] = relative(None if gradient is None else gradient.to_local(), mine, largest)
        ours.step()
        theirs.step()
    after = {name: p.detach() for name, p in pm.named_parameters()}
    states = [t.to_local() for state in ours.state.values() for t in state.values() if hasattr(t, "to_local")]
    return Difference(
        losses,
        loss_error,
        gradient_errors,
        {
            name: relative(p.to_local(), part_of(w := original.get_parameter(name).detach(), p), w.abs().max().item())
            for name, p in after.items()
        },
        {
            name: relative(b.double(), (w := original.get_buffer(name)).double(), w.abs().max().item())
            for name, b in pm.named_buffers()
        },
        output_error,
        sum(p.to_local().nbytes for p in after.values()),
        sum(t.nbytes for t in states),
    )


def needs_threads(job: Job) -> bool:
    """Whether the plan changes the numbers: the same plan in one process is then what ranks must equal."""
    return job.exact or job.model in ("mlp with dropout", "cnn", "resnet")


def stepped(job: Job, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """One step's loss and outputs, with gradients."""

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_of(job.model, output, target)

    with torch.autocast("cpu", job.autocast, enabled=job.autocast is not None):
        if job.call == "train_step" and isinstance(model, autopar.PipelinedModule):
            return model.train_step(x, target=x, loss_fn=loss_fn), ()
        output = model(x)
        loss = loss_fn(output, x)
    loss.backward()
    found = output.logits if hasattr(output, "logits") else output
    return loss.detach(), () if job.call == "train_step" else found
