"""A lowered plan on one rank: its own part of its own stages, and stand-ins for those of other ranks.

The tables of actions, the passes and the leaves are those of one process. Here an execution does the actions of one
slot, this rank's, and its mailbox is a wire (wire.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.program import Program
from autopar.lower.projection import project
from autopar.lower.rerun_groups import rerunning
from autopar.lower.stages import Lowered, StageProgram, replica
from autopar.runtime.ranks.gradients.apart_gradients import OwnGradientCheck
from autopar.runtime.ranks.gradients.reduction import GradientSums
from autopar.runtime.ranks.messages.execution_messages import ExecutionMessages
from autopar.runtime.ranks.messages.shapes import StageShapes
from autopar.runtime.ranks.messages.tables import messages
from autopar.runtime.ranks.messages.wire import Routes
from autopar.runtime.ranks.parameters.borrowed_buffers import Borrowed
from autopar.runtime.ranks.parameters.holders import StageGrid, with_sparse_gradients
from autopar.runtime.ranks.parameters.own import RankParameters
from autopar.runtime.ranks.world import World
from autopar.runtime.stages.device_tensors import DeviceBuffer, ParameterLeaf, move
from autopar.runtime.stages.executable import Executable
from autopar.runtime.stages.stage_replica import ReplicaAction, StagePlacement, StageReplica, Work
from autopar.schedule.clock import Action, Phase
from cost_models.hardware.devices import Device

TableKey = tuple[int, bool, bool]  # n_microbatches, training, only backwards


@dataclass(eq=False)
class RemoteWorker:
    """In the place of a worker thread: another rank's."""

    device: Device


class RankExecutable(Executable):
    """A program, split and placed, as far as one rank runs it."""

    own_hooks = (OwnGradientCheck,)

    def __init__(
        self,
        program: Program,
        lowered: Lowered,
        placements: Sequence[StagePlacement],
        schedule: str,
        lookup: Callable[[str], torch.Tensor],
        *,
        world: World,
        stages: Sequence[StageGrid],
        parameters: RankParameters,
        whole: Mapping[str, torch.Tensor],
        borrowed: Sequence[Borrowed] = (),
        chunks: int = 1,
        compiled: bool | str = False,
        watch_nan: bool = False,
    ) -> None:
        """`placements`: workers of other ranks are `RemoteWorker`s. `stages`: the ranks of every stage. `parameters`:
        placed. `whole`: the tensors that the model was built with, by name. `borrowed`: see `RankParameters.borrowed`;
        their values come with every call."""
        self.world, self.grids = world, tuple(stages)
        self._rank_parameters, self._whole = parameters, whole
        self._borrowed = tuple(borrowed)
        self._copies = {
            one.name: torch.zeros_like(whole[one.name], device=world.device)
            for one in borrowed
            if world.rank in one.readers
        }
        self._anchor = nn.Parameter(torch.zeros(()))  # for autograd: a rank may have no parameter at all
        self._messages: dict[TableKey, ExecutionMessages] = {}
        super().__init__(
            program, lowered, placements, schedule, lookup, chunks=chunks, compiled=compiled, watch_nan=watch_nan
        )
        self._buckets = parameters.buckets
        self.sums = self._new_sums()
        self.left_alone_parameters = parameters.left_alone(lowered, whole)
        self.slot = next((i for i, w in enumerate(self.workers) if not isinstance(w, RemoteWorker)), -1)
        slots: dict[int, tuple[int, ...]] = {}
        for row, grid in zip(self._replicas, self.grids, strict=True):
            slots |= {one.slot: group for one, group in zip(row, grid.ranks, strict=True)}
        self.routes = Routes(tuple(slots[slot] for slot in range(len(self.workers))))
        world.connect_pairs(self._pairs())
        first_names = parameters.changes.frozen.first_names
        # For every stage, the parameters whose gradients are sparse where they are trained, by their first names.
        self.sparse = [
            [first_names[id(whole[name])] for name in with_sparse_gradients(stage) if id(whole[name]) in first_names]
            for stage in lowered.stages
        ]
        self.shapes = StageShapes(lowered, self.whole_tensor, program.device)

    def owner(self, microbatch: int) -> int:
        """The rank whose outputs and loss of a micro-batch count."""
        return self.routes.ranks[self.replica(self.n_stages - 1, microbatch).slot][0]

    def computes_first(self, stage: int, microbatch: int) -> bool:
        """Whether this rank runs a stage for a micro-batch, as the first of its mesh."""
        return self.routes.ranks[self.replica(stage, microbatch).slot][0] == self.world.rank

    def _pairs(self) -> set[tuple[int, int]]:
        """Ranks that send each other messages, as (sender, receiver), whatever the number of micro-batches."""
        found = set()
        for stage, consumers in enumerate(self.consumers):
            for consumer in consumers:
                for i in range(math.lcm(len(self._replicas[stage]), len(self._replicas[consumer]))):
                    ends = self.replica(stage, i).slot, self.replica(consumer, i).slot
                    for source, target in (ends, ends[::-1]) if ends[0] != ends[1] else ():
                        receivers = self.routes.ranks[target]
                        found |= {(self.routes.sender_to(source, target, rank), rank) for rank in receivers}
        return found

    # -- actions ----------------------------------------------------------------------------------------------------

    def work(self, n_microbatches: int, *, training: bool, only_backward: bool, every_worker: bool) -> Work:
        """The actions of this rank's slot. None for a rank that the plan does not use."""
        if self.slot < 0:
            return Work((), by_one=False)
        actions = tuple(
            ReplicaAction(self.replica(action.stage, action.microbatch), action.phase, action.microbatch)
            for action in self._tables_of(n_microbatches, training, only_backward)[self.slot]
        )
        return Work(((self.workers[self.slot], actions),), by_one=True)

    def execution_messages(self, n_microbatches: int, training: bool, only_backward: bool) -> ExecutionMessages:
        """The messages of an execution, the same on all ranks."""
        key = (n_microbatches, training, only_backward)
        if key not in self._messages:
            sources = [stage.sources for stage in self.lowered.stages]
            found = messages(self._tables_of(*key), lambda s, i: self.replica(s, i).slot, self.consumers, sources)
            parts = 1 + max(map(len, self.reads.values()), default=0)
            self._messages[key] = ExecutionMessages(found, parts)
        return self._messages[key]

    def _tables_of(self, n_microbatches: int, training: bool, only_backward: bool) -> list[list[Action]]:
        tables = self.table(n_microbatches, training).actions
        return [[a for a in table if not (only_backward and a.phase is Phase.FORWARD)] for table in tables]

    # -- tensors ----------------------------------------------------------------------------------------------------

    def follow_parameters(self) -> None:
        """Call it before a call. Include the parameters that have become shared by all ranks since the last call."""
        if self._buckets is not self._rank_parameters.buckets:
            self._buckets = self._rank_parameters.buckets
            self.parameters = [*self._rank_parameters.parameters.values(), self._anchor]
            self._by_id = {id(p): p for p in self.parameters}
            self.sums.close()
            self.sums = self._new_sums()
            self.left_alone_parameters = self._rank_parameters.left_alone(self.lowered, self._whole)

    def _new_sums(self) -> GradientSums:
        leaves = ((one.stage.index, leaf) for one in self.replicas for leaf in one.leaves)
        return GradientSums(self._buckets, leaves, self.world.device, self.world.carrier)

    def refresh(self) -> None:
        """Bring the leaves up to date with this rank's parameters, and buffers with the model's. Collective."""
        self._rank_parameters.refresh()
        for one in self.replicas:
            for leaf in one.leaves:
                parameter = self._by_id[leaf.key]
                if leaf.tensor.requires_grad != parameter.requires_grad:
                    leaf.tensor.requires_grad_(parameter.requires_grad)
                current = self._rank_parameters.read(parameter)
                if leaf.tensor.data_ptr() != current.data_ptr():
                    leaf.tensor.data = current
        for name, keeper, _ in self._borrowed:
            self.world.broadcast(self._kept_or_copied(name), keeper)
        self._refresh_buffers()
        self._follow_moved_tensors()

    def collect_gradients(self) -> dict[int, torch.Tensor]:
        """Gradients by id of this rank's parameters, added up over all ranks that read them. Collective."""
        found = self._collected(for_autograd=True)
        return {key: self._rank_parameters.as_stored(key, gradient) for key, gradient in found.items()}

    def accumulate_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """As in one process, on what this rank stores: two DTensors would go through their dispatch, 20 us each."""
        found = self._collected(for_autograd=False)
        for parameter in parameters:
            gradient = found.get(id(parameter))
            if gradient is not None:
                self._rank_parameters.add_gradient(id(parameter), gradient)

    def _collected(self, *, for_autograd: bool) -> dict[int, torch.Tensor]:
        """What this rank stores of the gradients, by id of its parameters. Collective. `for_autograd`: autograd's
        engine gets them next."""
        found = self.sums.finish()
        self._holds_gradients = False
        if self.sums.apart:
            parameters = {key: self._by_id[key] for key in self.sums.apart_keys}
            self._rank_parameters.apart.add(parameters, found if for_autograd else {})
        for key in found.keys() & self.sums.frozen if self.sums.waited and not self.sums.apart else ():
            # Frozen while its gradient waited: autograd does not give it back.
            stored = self._rank_parameters.as_stored(key, found.pop(key))
            self._rank_parameters.parameters[key].grad = stored
        return found

    def share_buffers(self) -> None:
        """Have all replicas of a stage continue with the buffers that its first replica wrote. Collective."""
        for stage, grid in zip(self.lowered.stages, self.grids, strict=True):
            if len(grid.ranks) == 1 or not stage.written_buffers:
                continue
            for name in stage.written_buffers:
                here = self.world.rank in grid.all
                like = self.whole_tensor(name)
                tensor = self.tensor(name).data if here else torch.empty_like(like, device=self.world.device)
                for device in range(len(grid.ranks[0])):
                    self._share(tensor, grid, device)

    def _share(self, tensor: torch.Tensor, grid: StageGrid, device: int) -> None:
        """From the first replica's device to the same device of the others."""
        line = [group[device] for group in grid.ranks]
        mine = tensor if self.world.rank in line else torch.empty_like(tensor)
        self.world.broadcast(mine, line[0])

    # -- building ---------------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> torch.Tensor:
        return self._copies[name] if name in self._copies else super().tensor(name)

    def kept_buffer(self, name: str) -> torch.Tensor:
        """The model's buffer; where other ranks alone keep it, one whose values count nothing."""
        try:
            return self._lookup(name)
        except AttributeError:
            return torch.zeros_like(self.whole_tensor(name), device=self.world.device)

    def _kept_or_copied(self, name: str) -> torch.Tensor:
        """On this rank's device, as it travels."""
        copied = self._copies.get(name)
        return copied if copied is not None else self.kept_buffer(name).detach().to(self.world.device)

    def whole_tensor(self, name: str) -> torch.Tensor:
        """As the model was built with it; without values where it has been placed."""
        return self._whole[name] if name in self._whole else self._constants[name]

    def _move_tensors(self, placements: Sequence[StagePlacement]) -> list[nn.Parameter]:
        return [*self._rank_parameters.parameters.values(), self._anchor]

    def _replica(
        self, stage: StageProgram, placement: StagePlacement, number: int, captured: torch.device
    ) -> StageReplica:
        worker, grid = placement.workers[number], self.grids[stage.index]
        own = self.world.rank in grid.ranks[number]
        one = StageReplica(
            slot=self.workers.index(worker),
            stage=stage,
            worker=worker,
            module=stage.module,
            compute=_elsewhere,
            leaves=[],
            buffers=[],
            recompute=placement.recompute,
            predicted_bytes=placement.predicted_bytes,
            is_last=stage.index == len(self.lowered.stages) - 1,
        )
        if own:
            self._build(one, grid, captured)
        return one

    def _build(self, one: StageReplica, grid: StageGrid, captured: torch.device) -> None:
        """The rank's own code of a stage, over its own parts of the parameters."""
        device, stage = self.world.device, one.stage
        if grid.mesh:
            stage = project(stage, grid.device(self.world.rank), grid.mesh, self._rank_parameters.meshes.lines(grid))
        leaves: dict[int, ParameterLeaf] = {}
        tensors: dict[str, torch.Tensor] = {}
        for piece in stage.pieces:
            whole = self.whole_tensor(piece.name)
            if isinstance(whole, nn.Parameter):
                parameter = self._rank_parameters.of(whole)
                if id(parameter) not in leaves:
                    local = nn.Parameter(self._rank_parameters.read(parameter), parameter.requires_grad)
                    leaves[id(parameter)] = ParameterLeaf(id(parameter), local, piece, (0, 0))
                tensors[piece.attribute] = leaves[id(parameter)].tensor
            else:
                written = piece.name in stage.written_buffers
                own = replace(piece, first=True)  # every rank writes its own model's
                move(self.tensor(piece.name), device)  # a constant of the code: else it would be copied for every call
                buffer = DeviceBuffer.of(self.tensor(piece.name), own, device, written=written, first_replica=True)
                one.buffers.append(buffer)
                tensors[piece.attribute] = buffer.tensor
        module = replica(stage, tensors, [device], captured)
        if stage.reruns:
            module = rerunning(module, {p.attribute for p in stage.pieces if p.name in stage.written_buffers})
        one.stage, one.module, one.compute, one.leaves = stage, module, module.forward, list(leaves.values())
        self._code_of(one)


def _elsewhere(*_: Any) -> tuple[Any, ...]:
    raise AssertionError("another rank runs this stage")
