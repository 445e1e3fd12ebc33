"""What all ranks must agree on before they compute: the program, the plan, the weights, and every call."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autopar.capture import torch_private
from autopar.capture.call_inputs import flattened, leaf_names, passed_arguments
from autopar.capture.module_hooks import has_hooks
from autopar.errors import InputError
from autopar.runtime.ranks.due import Due
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.model_changes import ModelChanges
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.captures import CallArguments
from autopar.runtime.signatures.model_state import State

_SAME_MODEL = (
    "change the model alike on every rank, between the same calls: a hook that logs on one rank can be on all of them, "
    "and do nothing on the others"
)
_WHOLE = (
    "every rank must make the same calls with the whole batch: seed the data's order alike, and use no "
    "DistributedSampler (or give parallelize data='per-rank', and every rank its own samples)"
)
_PASSING = "how they pass arguments"

Facts = Mapping[str, tuple[str, str]]  # by name: value, what would be right


class Gathers(Protocol):
    """Ranks that exchange values."""

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


def compare(ranks: Gathers, facts: Facts) -> None:
    """Raise InputError on all ranks where a fact differs. Collective."""
    found = ranks.gathered(dict(facts))
    for name, (value, advice) in found[0].items():
        others = [rank for rank, theirs in enumerate(found) if theirs.get(name, ("", ""))[0] != value]
        if others:
            there = found[others[0]].get(name, ("nothing", ""))[0]
            raise on_all_ranks(
                InputError(f"ranks differ in {name}: {value} on rank 0, {there} on rank {listed(others)}; {advice}")
            )


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def weights_digest(model: nn.Module, without: Collection[str] = ()) -> str:
    """Of all values of parameters and buffers but those named."""
    crc = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in without:
            crc = content_of(tensor.detach(), crc)
    return f"{crc:08x}"


class CallKind(NamedTuple):
    """What a call is, beside its batch."""

    trains: bool  # train_step
    grad: bool  # mode of the thread
    training: bool  # mode of the model
    returns_outputs: bool
    accumulates: bool  # inside pm.accumulate()
    autocast: str  # the dtype of torch.autocast for the ranks' devices; "": off
    model: int  # checksum of what a capture depends on: modes and hooks of the modules, defaults of torch
    profiled: bool = False  # train_step(profile=True)
    is_known: bool = False  # whether it needs no new capture, which all ranks make at the same time

    def __str__(self) -> str:
        words = ["train_step" if self.trains else "a forward"]
        words += ["with gradients" if self.grad else "without gradients"]
        words += ["of the model in training mode" if self.training else "of the model in eval mode"]
        words += ["that returns outputs"] * self.returns_outputs + ["inside accumulate()"] * self.accumulates
        words += ["with profile=True"] * self.profiled
        words += [f"under autocast to {self.autocast}"] if self.autocast else ["without autocast"]
        return " ".join(words)


def checksum_of(state: State) -> int:
    """Without the identity of objects, which is another one on every rank."""
    places = [place for place, module in enumerate(state.modules) if id(module) in state.hooked] if state.hooked else []
    default = None if state.default_device is None else torch.device(state.default_device).type  # each has its own GPU
    facts = places, state.default_dtype, default
    return zlib.crc32(repr(facts).encode(), zlib.crc32(bytes(state.training)))


def _facts_of(model: nn.Module) -> list[tuple[str, str]]:
    """By name of the module, what its checksum depends on, in words."""
    found = [("torch", f"default dtype {torch.get_default_dtype()}, default device {torch.get_default_device().type}")]
    for name, module in model.named_modules():
        words = ["in training mode" if module.training else "in eval mode"]
        words += ["with hooks"] if module is not model and has_hooks(module) else []
        found.append((f"module '{name}'" if name else "the model", ", ".join(words)))
    return found


class CallLeaves:
    """The flat inputs and targets of a call."""

    def __init__(self, model: nn.Module, call: CallArguments) -> None:
        leaves, spec = flattened(call.args, call.kwargs)
        targets, target_spec = torch_private.tree_flatten(call.target)
        self.values: list[Any] = [*leaves, *targets]
        self.structure = f"{spec} {target_spec}"
        self._model, self._call, self._n_targets = model, call, len(targets)

    @cached_property
    def names(self) -> list[str]:
        """For messages; "" for the target of a call without one."""
        inputs = leaf_names(self._model, self._call.args, dict(sorted(self._call.kwargs.items())))
        n = self._n_targets
        targets = (
            [f"target {place}" for place in range(n)]
            if n > 1
            else ["the target" if self._call.target is not None else ""] * n
        )
        return [*(f"input '{name}'" for name in inputs), *targets]

    @property
    def passed(self) -> str:
        """How every argument is passed, for messages."""
        return ", ".join(passed_arguments(self._model, self._call.args, self._call.kwargs)) or "nothing"


class CallAgreement:
    """Compares every call of a module between the ranks: its kind and shapes always, its content now and then."""

    def __init__(self, world: World, model: nn.Module, changes: ModelChanges) -> None:
        """`changes`: of the model, which ranks agree on with every call."""
        self._world, self._model, self._changes = world, model, changes
        self._due = Due()

    def gathered_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank, once all agree on what they changed of the model. Raises InputError on all
        ranks where they do not."""
        n = len(numbers)
        found = self._world.announced("a call of the module", [*numbers, *self._changes.numbers()])
        self._changes.agree([theirs[n:] for theirs in found])
        return [theirs[:n] for theirs in found]

    def is_content_due(self, kind: CallKind, leaves: CallLeaves, signature: object | None = None) -> bool:
        """Whether this call's content is compared. Once for every call. `signature`: of the call, where it is known."""
        return self._due.now((kind.trains, kind.grad, kind.training, leaves.structure), signature)

    def check(self, kind: CallKind, call: CallArguments, split: int, signature: object | None) -> int:
        """Raise InputError on all ranks unless they make the same call with the same batch.

        `split`: what this rank knows of the call's loss. Returns it if all know the same, else 0. `signature`: of the
        call; None: it is captured now, and its content compared.
        """
        leaves = CallLeaves(self._model, call)
        shapes = zlib.crc32(repr([tuple(kind), leaves.structure, *map(described, leaves.values)]).encode())
        due, content = signature is None or self.is_content_due(kind, leaves, signature), 0
        if due:
            for leaf in leaves.values:
                content = content_of(leaf, content) if isinstance(leaf, torch.Tensor) else content
        found = self.gathered_numbers([shapes, content, split])
        if any(theirs[:2] != found[0][:2] for theirs in found):
            # Of all: whether the content is due depends on the capture, which may be new on some ranks alone.
            contents = [content_of(x, 0) if isinstance(x, torch.Tensor) else 0 for x in leaves.values]
            self.refuse(kind, leaves, list(map(described, leaves.values)), contents, _WHOLE)
        return split if all(theirs[2] == split for theirs in found) else 0

    def refuse(
        self, kind: CallKind, leaves: CallLeaves, shapes: Sequence[str], contents: Sequence[int], advice: str
    ) -> None:
        """Raise the InputError that names what differs. Collective.

        `shapes` and `contents`: of every leaf, its description and the checksum of its values (0: not compared).
        """
        rows = list(zip(leaves.names, shapes, contents, strict=True))
        found = self._world.gathered(_Call(str(kind), leaves.structure, leaves.passed, rows))
        facts = self._world.gathered(_facts_of(self._model))
        known = [theirs[0] for theirs in self._world.gathered_numbers([kind.is_known])]
        of_model = _difference_of_models(facts) if len({theirs.kind for theirs in found}) == 1 else ""
        if of_model:
            raise on_all_ranks(InputError(f"ranks differ in the model: {of_model}; {_SAME_MODEL}"))
        if not (difference := _difference(found)):
            self.refuse_new(known)
        if difference.startswith(_PASSING):
            advice = "pass the same arguments in the same way on every rank"
        raise on_all_ranks(InputError(f"ranks differ in {difference or 'the batch'}; {advice}"))

    @staticmethod
    def refuse_new(known: Sequence[int]) -> None:
        """Raise InputError if only some ranks know the call. `known`: by rank."""
        if len(set(known)) == 1:
            return
        new = [rank for rank, one in enumerate(known) if not one]
        raise on_all_ranks(
            InputError(
                f"ranks differ in the model or in the arguments: only rank {listed(new)} would capture the model anew "
                f"for this call, as after a module was replaced there, or for an object of another value; {_SAME_MODEL}"
            )
        )


class _Call(NamedTuple):
    """A rank's call, as the others compare it."""

    kind: str
    structure: str
    passed: str  # its arguments, in words
    leaves: list[tuple[str, str, int]]  # name, description, checksum of the content


def _difference(found: Sequence[_Call]) -> str:
    """What differs from rank 0 first, and on which ranks; "" if nothing does. `found`: by rank."""

    def others(values: Sequence[Any]) -> list[int]:
        return [rank for rank, value in enumerate(values) if value != values[0]]

    kinds = [one.kind for one in found]
    if ranks := others(kinds):
        return f"the call: {kinds[0]} on rank 0, {kinds[ranks[0]]} on rank {listed(ranks)}"
    names = [[name for name, _, _ in one.leaves] for one in found]
    if others(names) == [] and (ranks := others([one.structure for one in found])):
        return f"{_PASSING}: {found[0].passed} on rank 0, {found[ranks[0]].passed} on rank {listed(ranks)}"
    if ranks := others([(one.structure, mine) for one, mine in zip(found, names, strict=True)]):
        mine, theirs = names[0], names[ranks[0]]
        return (
            f"the arguments of the call: {', '.join(filter(None, mine)) or 'none'} on rank 0, "
            f"{', '.join(filter(None, theirs)) or 'none'} on rank {listed(ranks)}"
        )
    for place, (name, shape, _) in enumerate(found[0].leaves):
        if ranks := others([one.leaves[place][1] for one in found]):
            return f"{name}: {shape} on rank 0, {found[ranks[0]].leaves[place][1]} on rank {listed(ranks)}"
    for place, (name, shape, _) in enumerate(found[0].leaves):
        if ranks := others([one.leaves[place][2] for one in found]):
            return f"the content of {name} ({shape}): rank {listed(ranks)} from rank 0"
    return ""


def _difference_of_models(facts: Sequence[list[tuple[str, str]]]) -> str:
    """The first of the facts of modules that differs from rank 0, and on which ranks."""
    ranks = [rank for rank, theirs in enumerate(facts) if theirs != facts[0]]
    if not ranks:
        return ""
    here, there = dict(facts[0]), dict(facts[ranks[0]])
    name = next((one for one in here | there if here.get(one) != there.get(one)), "")
    if not name:
        return "the order of its modules"
    return f"{name}: {here.get(name, 'missing')} on rank 0, {there.get(name, 'missing')} on rank {listed(ranks)}"


def described(leaf: Any) -> str:
    """Shape and dtype of a tensor, and whether it requires a gradient; a number, or the type of anything else."""
    if isinstance(leaf, torch.Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}{' that requires a gradient' * leaf.requires_grad}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def content_of(tensor: torch.Tensor, before: int) -> int:
    """A checksum of the values, going on from `before`."""
    whole = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(whole.view(torch.uint8).numpy().data, before) if whole.numel() else before
