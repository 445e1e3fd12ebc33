"""Runs the calls of one model on one rank: every rank makes the same calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.analysis.batch_proof import OutputCombination
from autopar.capture import torch_private, torch_private_ranks
from autopar.errors import AutoparError, InputError, PlanError
from autopar.runtime.ranks.agreement import CallAgreement, CallKind, checksum_of
from autopar.runtime.ranks.executable import RankExecutable
from autopar.runtime.ranks.gradients.output_gradients import OutputGradientAgreement
from autopar.runtime.ranks.one_message import on_all_ranks
from autopar.runtime.ranks.own_parameters import refused_in
from autopar.runtime.ranks.parameters.holders import sparse_problem
from autopar.runtime.ranks.run import RankRun
from autopar.runtime.ranks.shares import ShareAgreement, SharedCall
from autopar.runtime.ranks.signatures import RankSignatures
from autopar.runtime.ranks.world import World
from autopar.runtime.signatures.captures import BoundCall, CallArguments
from autopar.runtime.step.call_runner import CallRunner
from autopar.runtime.step.run import Run
from cost_models.hardware.devices import Device


class RankCalls(CallRunner):
    """Every call is compared between the ranks before it runs, so that none of them waits for another for ever."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        devices: Sequence[Device],
        signatures: RankSignatures,
        *,
        per_rank: bool = False,
    ) -> None:
        """`per_rank`: every rank passes samples of its own, which make the batch together."""
        super().__init__(model, devices, signatures)
        self._world, self._on_rank, self._rank_parameters = world, signatures, signatures.parameters
        self._agreement = CallAgreement(world, model, self._rank_parameters.changes)
        self._shares = ShareAgreement(world, model, signatures.settings.batch_dim, self._agreement)
        self._output_gradients = OutputGradientAgreement(world)
        self._per_rank = per_rank
        self._accumulates = False
        self._profiles = False  # the call is one of a profiled step
        self._has_gradients = False  # the call that runs, as all ranks have agreed
        self._shared: SharedCall | None = None  # the call that runs, where ranks share its batch
        # Of the call that runs: how its outputs combine, its samples, and how many more meshes had it filled up with.
        self._ways: Sequence[OutputCombination] = ()
        self._batch_size = self._filled_up = 0

    def prepare(self, call: CallArguments) -> BoundCall:
        with self._agreed_call(call, "prepare") as agreed:
            return super().prepare(agreed)

    def forward(self, call: CallArguments) -> Any:
        with self._agreed_call(call, "forward") as agreed:
            return self._outputs(agreed, self._own_outputs)

    def train_step(self, call: CallArguments) -> tuple[torch.Tensor, Any]:
        assert call.loss is not None
        with self._agreed_call(call, "train_step") as agreed:
            with refused_in(call.loss, self._rank_parameters):
                loss, outputs = super().train_step(agreed)
            if outputs is None or self._shared is None:
                return loss, outputs
            flat, spec = torch_private.tree_flatten(outputs)
            return loss, torch_private.tree_unflatten(self._own_outputs(flat, ()), spec)

    def unpipelined(self, what: str, why: str) -> AbstractContextManager[object]:
        raise InputError(
            f"{what} runs the model itself ({why}), and no rank has all of it; use one process for that (devices=)"
        )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, calls leave gradients of ranks apart; the first call after it adds them up."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Inside, calls are those of a profiled step, which all ranks profile."""
        self._profiles = True
        try:
            yield
        finally:
            self._profiles = False

    @contextmanager
    def _agreed_call(self, call: CallArguments, what: str) -> Iterator[CallArguments]:
        """The call that all ranks make, with the whole batch. `what`: its name, for the watcher."""
        with self._world.watcher.call(what), self._compared(call) as agreed:
            yield agreed

    @contextmanager
    def _compared(self, call: CallArguments) -> Iterator[CallArguments]:
        if self._rank_parameters.failed:
            raise AutoparError(
                "an earlier call failed on this rank, so that the ranks are out of step; end all and start again"
            )
        if torch_private_ranks.inside_ddp():
            raise InputError(
                "the pipelined module is wrapped in DistributedDataParallel, as Accelerate and transformers' Trainer "
                "do under torchrun. Its ranks are one model already: use autopar.integrations.PipelinedTrainer or "
                "for_ranks(accelerator), or call the module itself in a loop of your own"
            )
        state, device_type = self._on_rank.state(), self._world.device.type
        kind = CallKind(
            call.loss is not None,
            torch.is_grad_enabled(),
            self._model.training,
            call.return_outputs,
            self._accumulates,
            str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else "",
            checksum_of(state),
            self._profiles,
        )
        self._has_gradients = kind.grad
        raised = self._world.watcher.raised_calls
        raised.wait_for_others()
        if not self._per_rank:
            signature = self._on_rank.captured(call, state)
            split = self._on_rank.known_split(call, signature)
            kind = kind._replace(is_known=signature is not None)
            self._on_rank.agreed_split = self._agreement.check(kind, call, split, signature)
            raised.begin()
            with raised.together():
                yield call
            return
        self._shared = shared = self._shares.joined(kind, call)
        raised.begin()
        try:
            with raised.together():
                signature = self._on_rank.captured(shared.arguments, state)
                known = self._on_rank.knows(shared.arguments, signature)
                split = self._on_rank.known_split(shared.arguments, signature)
                found = self._world.gathered_numbers([signature is not None, known, split])
                CallAgreement.refuse_new([theirs[0] for theirs in found])
                self._on_rank.agreed_split = split if all(theirs[2] == split for theirs in found) else 0
                if not all(theirs[1] for theirs in found):
                    shared.complete(self._world)
                yield shared.arguments
        finally:
            self._shared = None

    def _run(self, bound: BoundCall, step: CallArguments | None = None) -> Run:
        if torch.is_grad_enabled() and self._shared is not None:
            _refuse_gradients(bound.leaves, "an input needs", "inputs")
            _refuse_gradients(self._shared.targets, "a target needs", "targets")
        if self._has_gradients:
            self._refuse_sparse_gradients(bound)
        self._batch_size = bound.batch_size
        bound, self._filled_up = self._filled(bound)
        shared, tail = self._shared, bound.signature.batching.tail
        trains = shared is not None and shared.arguments.loss is not None
        on_every_rank = (trains and step is None) or (tail is not None and tail.reads_inputs)
        if shared is not None and on_every_rank:  # the loss, or the end of the model, sees the whole batch
            shared.complete(self._world)
        elif shared is not None:
            shared.fetch(self._world, bound, self._sizes(bound), trains=trains)
        outputs = bound.signature.batching.outputs
        self._ways = outputs if tail is None else tail.combinations(outputs)
        run = super()._run(bound, step)
        if run.call.seed is not None:  # every rank draws what one process would draw, and that of rank 0 counts
            run.call = replace(run.call, seed=self._world.broadcast_number(run.call.seed, 0))
        shares = shared.shares if shared is not None and not trains else None
        agreement = None if self._per_rank else self._output_gradients
        return RankRun(run, self._rank_parameters, shares=shares, agreement=agreement, accumulates=self._accumulates)

    def _refuse_sparse_gradients(self, bound: BoundCall) -> None:
        """Raise PlanError, on all ranks, for parameters that are trained with sparse gradients. The plan may have been
        made for calls without gradients, and parameters may have been frozen then."""
        executable, frozen = bound.signature.executable, self._rank_parameters.changes.frozen.names
        assert isinstance(executable, RankExecutable)
        for number, names in enumerate(executable.sparse):
            for name in names:
                if name not in frozen:
                    raise on_all_ranks(
                        PlanError(
                            f"one process a device does not run this plan: stage {number} {sparse_problem(name)}; or "
                            "give devices="
                        )
                    )

    def _filled(self, bound: BoundCall) -> tuple[BoundCall, int]:
        """A batch that the meshes cannot divide, filled up with copies of its last sample. Returns how many.

        Raises InputError where the copies would change more than outputs of their own.
        """
        signature, n = bound.signature, bound.batch_size
        assert signature.lowered is not None
        multiple = signature.lowered.multiple
        if n % multiple == 0:
            return bound, 0
        more = -n % multiple
        outputs = signature.batching.outputs
        apart = signature.batching.tail is None and all(how.combine in ("cat", "first", "constant") for how in outputs)
        if torch.is_grad_enabled() or signature.program.training or not apart:
            raise on_all_ranks(
                InputError(
                    f"a batch of {n} samples cannot be cut over the meshes of this plan, whose shards stay on their "
                    f"ranks: give batches of a multiple of {multiple} samples (DataLoader(drop_last=True)); under "
                    "torch.no_grad(), a model in eval mode whose outputs are those of single samples takes any number"
                )
            )
        if self._shared is not None:
            self._shared.complete(self._world)
        leaves = [
            leaf if one.batch_dim is None else _with_copies(leaf, one.batch_dim, more)
            for leaf, one in zip(bound.leaves, signature.program.inputs, strict=True)
        ]
        return bound._replace(leaves=leaves, batch_size=n + more), more

    def _own_outputs(self, outputs: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
        """Those of this rank's samples; outputs that belong to no sample are the batch's, the same on all ranks."""
        if self._shared is None and not self._filled_up:
            return outputs
        return [self._own_part(place, value) for place, value in enumerate(outputs)]

    def _own_part(self, place: int, value: Any) -> Any:
        how, shared = self._ways[place], self._shared
        if how.combine == "cat":
            dim = how.batch_dim
            assert dim is not None
            if shared is None:
                factor = value.shape[dim] // (self._batch_size + self._filled_up)
                return value.narrow(dim, 0, factor * self._batch_size)
            shares = shared.shares
            factor = value.shape[dim] // (shares.total + self._filled_up)
            return value.narrow(dim, factor * shares.start, factor * shares.own)
        if shared is not None and shared.shares.total == 1 and isinstance(value, torch.Tensor):
            # A single sample does not show which outputs are its own: those with one entry where the inputs have it.
            dim = next((dim for dim in shared.input_dims if dim is not None), 0)
            if value.dim() > dim and value.shape[dim] == 1:
                return value.narrow(dim, 0, shared.shares.own)
        if how.combine == "mixed" and isinstance(value, torch.Tensor) and value.dim():
            raise InputError(
                f"output {place} of the model, of shape {tuple(value.shape)}, mixes the samples of all ranks, so that "
                "no part of it is this rank's own; call train_step, or use data='whole'"
            )
        return value


def _refuse_gradients(leaves: Sequence[Any], needs: str, what: str) -> None:
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
        raise on_all_ranks(
            InputError(
                f"{needs} a gradient, and with data='per-rank' a call's {what} are copies of all ranks' samples: "
                f"detach() the {what}, or use data='whole'"
            )
        )


def _with_copies(leaf: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
    return torch.cat([leaf, *[last] * more], dim)
