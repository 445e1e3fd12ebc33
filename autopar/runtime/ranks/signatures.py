"""The signatures of a model on one rank: agreed on by all ranks, and placed as far as this one runs them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.analysis.example import LossFunction
from autopar.analysis.loss_functions import name_of, title_of
from autopar.analysis.loss_split import LossSplit
from autopar.capture.call_inputs import flattened
from autopar.capture.module_state import named_tensors
from autopar.errors import InputError, PlanError
from autopar.lower.stages import Lowered
from autopar.plan.plan import Plan
from autopar.runtime.call_checks import IN_ONE_PROCESS
from autopar.runtime.initial_values.missing_values import is_hollow
from autopar.runtime.ranks.agreement import compare, digest, weights_digest
from autopar.runtime.ranks.executable import RankExecutable, RemoteWorker
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.parameters.borrowed_buffers import Borrowed
from autopar.runtime.ranks.parameters.holders import StageGrid, check_supported, grids
from autopar.runtime.ranks.parameters.own import RankParameters, hollow_stages
from autopar.runtime.ranks.same_plan import compare_plans
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.bound_signature import (
    BoundSignature,
    Lookup,
    RunSettings,
    check_follows_hints,
    lowered_by,
    whole_because,
)
from autopar.runtime.signatures.captures import BoundCall, CallArguments, Captures
from autopar.runtime.signatures.known import Decide, Signatures
from autopar.runtime.signatures.loss_splits import default_target_dims
from autopar.runtime.signatures.model_state import State
from autopar.runtime.stages.stage_replica import StagePlacement
from autopar.runtime.step.workers import Worker
from autopar.version import __version__
from cost_models.hardware.devices import Device

_SAME_SCRIPT = "run the same script with the same data on every rank"


class RankCaptures(Captures):
    """The captures of one model on one rank. All ranks capture at the same time, or all raise."""

    instead = IN_ONE_PROCESS

    def __init__(self, world: World, parameters: RankParameters, *args: Any) -> None:
        super().__init__(*args)
        self._world, self._rank_parameters = world, parameters

    def _captured(self, *args: Any) -> BoundSignature:
        def captured() -> BoundSignature:
            self._rank_parameters.check_known()
            if self._settings.verify and any(map(is_hollow, self._model.parameters())):
                self._settings = replace(self._settings, verify=False)
                self._warnings.not_verified()
            return super(RankCaptures, self)._captured(*args)

        signature: BoundSignature = self._world.outcome("capturing the model", captured)
        return signature


class RankSignatures(Signatures):
    """All signatures of one model on one rank. The first plan places the parameters; later calls follow it, too."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        devices: Sequence[Device],
        decide: Decide,
        user_plan: Plan | None,
        settings: RunSettings,
    ) -> None:
        """`decide(example)`: on all ranks at once, the same plan on all."""
        super().__init__(model, devices, decide, user_plan, settings)
        self.parameters = RankParameters(world, model)
        self._captures = RankCaptures(world, self.parameters, model, devices, settings, self.warnings)
        self._captures.state.without_attributes()  # frameworks keep some on one rank only, and ranks their own buffers
        self.to_be_filled: frozenset[str] = frozenset()  # tensors that have no values before they are placed
        self.after_placing: dict[int, Callable[[], None]] = {}  # what waits for that, by id of what it fills
        self.compares = True  # with the first plan, whether all ranks have the same program and weights
        self.agreed_split = 0  # of the call that runs: `known_split` of all ranks, if they have the same
        self._world = world
        self._rank_of = {device.name: rank for rank, device in enumerate(devices)}

    def bind(self, call: CallArguments) -> BoundCall:
        """Capture, plan and place for `call`, as far as that is not done yet. Collective where something is new."""
        with self.parameters.whole():
            bound = super().bind(call)
        with torch.inference_mode(False):
            while self.parameters.placed and self.after_placing:
                first = next(iter(self.after_placing))
                self.after_placing[first]()
                del self.after_placing[first]  # unless it failed: a later call must not go on without it
        return bound

    def state(self) -> State:
        """Of the model, as captures see it."""
        with self.parameters.whole():
            return self._captures.state.now()

    def captured(self, call: CallArguments, state: State) -> BoundSignature | None:
        """The signature that `bind` would find for a call in this state of the model; None: it would capture."""
        leaves, spec = flattened(call.args, call.kwargs)
        fits = (s for s in reversed(self._captures.known) if s.state == state)
        return next((s for s in fits if s.program.bind_flat(leaves, spec) is not None), None)

    def knows(self, call: CallArguments, signature: BoundSignature | None) -> bool:
        """Whether `bind` needs no values of the call's tensors: its `signature` is placed, and its loss studied."""
        if signature is None or signature.executable is None or signature.reused:
            return False
        if call.loss is None:
            return True
        return self._known_split(call, signature) is not None

    def known_split(self, call: CallArguments, signature: BoundSignature | None) -> int:
        """A number of how the call's loss splits, as far as that is known here; 0: it is to be studied, or no loss."""
        split = None if signature is None else self._known_split(call, signature)
        return 0 if split is None else _number_of(split)

    def _known_split(self, call: CallArguments, signature: BoundSignature) -> LossSplit | None:
        if signature.loss_splits is None or call.loss is None:
            return None
        dims = default_target_dims(self.settings.batch_dim)
        return signature.loss_splits.known(call.loss, call.target, call.target_dim, dims)

    def _loss_split(self, bound: BoundCall, call: CallArguments) -> LossSplit | None:
        """How the loss splits. Raises InputError on all ranks where they have other losses, or one alone cannot capture
        it."""
        split = super()._loss_split(bound, call)
        if split is None:
            return None
        own = _number_of(split)
        if own != self.agreed_split and self._world.differ(torch.tensor(own, dtype=torch.int64)):
            raise self._other_losses(split, call.loss) from split.failure
        return split

    def _other_losses(self, split: LossSplit, loss_fn: LossFunction | None) -> InputError:
        """For ranks whose losses differ. Collective."""
        why = "; ".join(text for text in (split.why, split.error) if text)
        reason = f"'{split.combine}'" + (f" ({why})" if why else "")
        failure = f"failed in loss_fn '{name_of(loss_fn)}' {split.error}" if split.failure is not None else ""
        found = self._world.gathered((reason, title_of(loss_fn), split.digest, failure))
        reasons, titles, digests, failures = zip(*found, strict=True)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
        if any(failures) and len(set(titles)) == 1:
            texts = "; ".join(f"rank {rank} {text}" for rank, text in enumerate(failures) if text)
            return on_all_ranks(InputError(f"{texts}, in an example call; other ranks did not; {_SAME_SCRIPT}"))
        if len(set(reasons)) > 1 or not other:
            texts = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons))
            difference = f"how the loss of micro-batches makes that of the batch: {texts}"
        elif titles[0] == titles[other]:
            difference = (
                f"what {titles[0]} computes: its code, or a number or tensor in it, is another one on rank {other}"
            )
        else:
            difference = f"the loss: {titles[0]} on rank 0, {titles[other]} on rank {other}"
        return on_all_ranks(InputError(f"ranks differ in {difference}; {_SAME_SCRIPT}"))

    def _place(self, signature: BoundSignature, plan: Plan, *, check_hints: bool) -> None:
        with torch.inference_mode(False):
            self._place_on_ranks(signature, plan, check_hints=check_hints)

    def _place_on_ranks(self, signature: BoundSignature, plan: Plan, *, check_hints: bool) -> None:
        program, batching = signature.program, signature.batching
        if self.compares:
            self._compare(signature, plan)
        stage_of = plan.assign(program, batching.storages)
        if check_hints:
            check_follows_hints(plan, signature, self._model, len(self._devices), stage_of)
        lowered = lowered_by(plan, signature, stage_of, self.settings)
        whole, stages = named_tensors(self._model), grids(plan, self._rank_of)
        check_supported(plan, lowered, stages, whole)
        borrowed: Sequence[Borrowed] = ()
        if self.parameters.placed:
            self.parameters.read_later(lowered, stages, whole)
            hollow_stages(lowered)
            borrowed = self.parameters.borrowed(lowered, stages, whole)
            _refuse_written(borrowed, lowered)
        else:
            self.parameters.place(plan, lowered, stages)
        executable = RankExecutable(
            program,
            lowered,
            self._placements(plan, stages),
            plan.schedule,
            Lookup(self._model),
            world=self._world,
            stages=stages,
            parameters=self.parameters,
            whole=whole,
            borrowed=borrowed,
            chunks=plan.chunks,
            compiled=self.settings.compile,
            watch_nan=self.settings.watch_nan,
        )
        signature.plan = plan
        signature.n_microbatches = 1 if whole_because(batching, self.settings) else plan.n_microbatches
        signature.lowered, signature.executable, signature.whole = lowered, executable, None

    def _compare(self, signature: BoundSignature, plan: Plan) -> None:
        facts = {
            "the version of torch": (torch.__version__, "install the same everywhere"),
            "the version of autopar": (__version__, "install the same everywhere"),
            "the captured program": (digest(_without_numbers(_graphs_of(signature))), _SAME_SCRIPT),
        }
        if not self.parameters.placed:
            same = "build the model from the same seed (torch.manual_seed) or the same checkpoint on every rank"
            trained = [name for name, p in self._model.named_parameters() if p.requires_grad]
            text = f"{len(trained)} ({digest(' '.join(trained))})"
            facts["the parameters that are trained"] = (text, "call requires_grad_() alike on every rank")
            facts["the model's weights"] = (weights_digest(self._model, self.to_be_filled), same)
        compare(self._world, facts)
        compare_plans(self._world, plan)

    def _placements(self, plan: Plan, stages: Sequence[StageGrid]) -> list[StagePlacement]:
        remote: dict[tuple[int, ...], RemoteWorker] = {}  # by the ranks of a slot: chunks share their slots

        def worker(group: tuple[int, ...]) -> Worker | RemoteWorker:
            if self._world.rank in group:
                return self.workers[self._devices[self._world.rank].name]
            return remote.setdefault(group, RemoteWorker(self._devices[group[0]]))

        device = self._world.device  # on each rank its own
        return [
            StagePlacement(
                workers=tuple(worker(group) for group in grid.ranks),  # type: ignore[misc]
                devices=tuple((device,) * len(group) for group in grid.ranks),
                recompute=stage.recompute,
                predicted_bytes=stage.peak_memory,
            )
            for stage, grid in zip(plan.stages, stages, strict=True)
        ]

    def _refusal(self, message: str) -> InputError:
        return on_all_ranks(super()._refusal(message))

    def _divisible(self, signature: BoundSignature, batch_size: int) -> BoundSignature:
        """The signature itself: `RankCalls` fills such a batch up, or refuses it."""
        return signature


def _refuse_written(borrowed: Sequence[Borrowed], lowered: Lowered) -> None:
    """Raise PlanError, on all ranks, where a stage would write a buffer that its ranks do not keep."""
    keepers = {one.name: one.keeper for one in borrowed}
    for stage in lowered.stages:
        for name in stage.written_buffers:
            if name in keepers:
                raise on_all_ranks(
                    PlanError(
                        f"stage {stage.index} writes the buffer '{name}', which a first call of another mode placed on "
                        f"rank {keepers[name]}: make the first call in the mode in which the model trains, with "
                        "pm.train()"
                    )
                )


def _number_of(split: LossSplit) -> int:
    """The same for equal splits on all ranks; never 0."""
    return zlib.crc32(repr((split.combine, split.target_dims, split.digest)).encode()) or 1


def _graphs_of(signature: BoundSignature) -> str:
    tail = signature.batching.tail
    return f"{signature.program.graph}{'' if tail is None else tail.graph.module.graph}"


def _without_numbers(graph: str) -> str:
    """A graph's text with the same GPU on all ranks: a model that was built on each rank's own has its number."""
    return re.sub(r"(cuda:|type='cuda', index=)\d+", r"\1", graph)
