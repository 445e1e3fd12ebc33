"""The model's parameters on one rank: what its stages read, as DTensors under their original names, and nothing else.

```
   the model's tables before      embed.weight, h.0.weight, h.1.weight, head.weight     whole, on every rank
   rank 0 afterwards              embed.weight, h.0.weight                              DTensors on the mesh of stage 0
   rank 1 afterwards              h.1.weight, head.weight                               DTensors on the mesh of stage 1
```
A mesh has one device where a stage is not sharded: optimizers take lists of DTensors, or of plain tensors, not both.
A parameter that no stage reads stays whole on every rank, as a DTensor on the mesh of the rank's other parameters. It
stays so if a later call reads it (later_reads.py).

Captures need the whole model's shapes. While a call is bound to its program (`whole`), the tables have the parameters
that the model was built with again, but hollow: a single NaN in memory, which every entry of the tensor reads.

An optimizer that was made before the parameters were placed has the old ones. It gets the new ones then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import compress
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autopar.capture import torch_private, torch_private_ranks
from autopar.capture.module_state import named_tensors
from autopar.errors import InputError
from autopar.lower.stages import Lowered
from autopar.plan.plan import Plan
from autopar.runtime.initial_values.missing_values import follow, hollow, is_hollow
from autopar.runtime.ranks.gradients.apart_gradients import ApartGradients
from autopar.runtime.ranks.gradients.buckets import Bucket, buckets_of
from autopar.runtime.ranks.gradients.gathered import GatheredValues
from autopar.runtime.ranks.parameters.borrowed_buffers import Borrowed, borrowed_buffers
from autopar.runtime.ranks.parameters.frozen_parameters import FrozenParameters
from autopar.runtime.ranks.parameters.holders import Holding, StageGrid, holdings
from autopar.runtime.ranks.parameters.later_buffers import LaterBuffers
from autopar.runtime.ranks.parameters.later_reads import check_held, newly_read
from autopar.runtime.ranks.parameters.meshes import StageMeshes
from autopar.runtime.ranks.parameters.model_changes import ModelChanges
from autopar.runtime.ranks.parameters.model_tables import ModelTables, check_plain
from autopar.runtime.ranks.parameters.optimizer_watch import OptimizerWatch
from autopar.runtime.ranks.parameters.optimizers import check_works
from autopar.runtime.ranks.parameters.part_guard import PartGuard
from autopar.runtime.ranks.parameters.step_agreement import StepAgreement
from autopar.runtime.ranks.world import World, current
from autopar.runtime.stages.device_tensors import move
from autopar.sharding.layouts import placements

_of_this_process: WeakSet[RankParameters] = WeakSet()


def known_by(tensors: Sequence[torch.Tensor]) -> list[RankParameters]:
    """The ranks' parameters that some of `tensors` are of, or were before they were placed. None in one process.

    Without any tensor, as where a rank has nothing of a layer: those of any model on ranks.
    """
    placed = [one for one in _of_this_process if one.placed]
    if not tensors:
        return [one for one in placed if one.world is current()]
    return [one for one in placed if any(map(one.has, tensors))]


class RankParameters:
    """What this rank holds of the model, once a plan has placed it."""

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world, self._model = world, model
        _of_this_process.add(self)
        self.meshes = StageMeshes(world)
        self._tables = ModelTables()
        self.changes = ModelChanges(world, self._tables)
        self._new: dict[int, torch.Tensor | None] = {}  # by id of the tensor that the model was built with
        self._holdings: dict[int, dict[int, Holding]] = {}
        self._everywhere: set[int] = set()  # ids of parameters that no stage of the first call reads
        self._later_buffers = LaterBuffers()
        self._gathered = GatheredValues(world.carrier)
        self.buckets: tuple[Bucket, ...] = ()  # of parameters that other ranks read, too
        self.parameters: dict[int, nn.Parameter] = {}  # by id: read by stages of this rank, or shared by all ranks
        self._old: dict[int, int] = {}  # by id of this rank's parameter, that of the tensor before
        self.apart = ApartGradients(world)
        self._watch = OptimizerWatch(world, self)
        self.owns_stages = True  # False: the captured program, and so its stages, have another model's parameters
        self.failed = False  # a call failed here, so that the ranks may be out of step

    @property
    def world(self) -> World:
        return self._world

    @property
    def placed(self) -> bool:
        return bool(self._tables)

    # -- placing ----------------------------------------------------------------------------------------------------

    def place(self, plan: Plan, lowered: Lowered, stages: Sequence[StageGrid]) -> None:
        """Keep what this rank's stages read, and free the rest. All ranks place at the same time.

        Raises InputError for gradients that it would lose, PlanError for tied weights that stages cut differently.
        """
        tensors = named_tensors(self._model)
        grown = next((name for name, t in tensors.items() if t.grad is not None), None)
        if grown is not None:
            raise InputError(
                f"'{grown}' has a gradient from before; call model.zero_grad() before the first pipelined call"
            )
        self._holdings = holdings(plan, lowered, stages, tensors)
        self.meshes.make(plan, stages)
        every = [h for by_rank in self._holdings.values() for h in by_rank.values()]
        trained = [self._holdings.get(id(t), {}) for t in tensors.values() if isinstance(t, nn.Parameter)]
        shared = (len(h.together) > 1 and len(h.row) == 1 for by_rank in trained for h in by_rank.values())
        self.apart.is_shared = any(shared)
        groups = self._world.groups([ranks for h in every for ranks in (h.row, h.together)])
        for key, tensor in {id(t): t for t in tensors.values()}.items():
            self._new[key] = self._kept(tensor, stages)
        self._free(lowered, tensors.values())
        self.buckets = buckets_of(self._world.rank, self._holdings, self._new, groups)
        self._gathered.follow(self.buckets)
        own = {key: new for key, new in self._new.items() if new is not None}
        names = {id(p): name for name, p in self._model.named_parameters()}
        frozen = {id(p) for p in self._model.parameters() if not p.requires_grad}
        self.changes.placed(
            FrozenParameters(names, self._holdings, own, frozen),
            StepAgreement(self._world, names, self._holdings, own),
        )
        self._tables.place(self._model, self._new)
        self._guard = PartGuard(self._tables.lacking)
        self._guard.put_on(self._model)
        self._watch.placed(self)

    def _kept(self, tensor: torch.Tensor, stages: Sequence[StageGrid]) -> torch.Tensor | None:
        """What replaces a parameter or buffer on this rank. Every rank keeps those that no stage reads."""
        held = self._holdings.get(id(tensor))
        if held is None:
            if not isinstance(tensor, nn.Parameter):
                return tensor
            self._everywhere.add(id(tensor))
            return self._kept_whole(tensor)
        mine = held.get(self._world.rank)
        if mine is None:
            return None
        device = self._world.device
        if not isinstance(tensor, nn.Parameter):
            move(tensor, device)
            return tensor
        grid, piece = stages[mine.stage], mine.piece
        mesh = self.meshes.of(grid)
        layout = placements(grid.ordered(mine.layout)) if grid.mesh else (Replicate(),)
        layout = (Replicate(),) * (mesh.ndim - len(layout)) + tuple(layout)
        if piece.whole and not is_hollow(tensor):
            read = tensor.detach().to(device)
        else:
            taken = piece.taken(tensor.detach())
            read = torch.empty_like(taken, device=device, memory_format=torch.contiguous_format).copy_(taken)
        local = mine.taken(read).clone() if len(mine.row) > 1 else read
        new = self._made(tensor, local, mesh, layout)
        self.parameters[id(new)] = new
        if len(mine.row) > 1:
            self._gathered.add(id(new), read)
        return new

    def _kept_whole(self, tensor: torch.Tensor) -> nn.Parameter:
        local = tensor.detach().to(self._world.device)
        if is_hollow(tensor):
            local = local.clone(memory_format=torch.contiguous_format)
        mesh = self.meshes.own
        return self._made(tensor, local, mesh, (Replicate(),) * mesh.ndim)

    def _made(
        self, tensor: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, layout: Sequence[Placement]
    ) -> nn.Parameter:
        """A parameter that replaces `tensor`. This rank stores `local`, its part."""
        whole = DTensor.from_local(local, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride())
        new = nn.Parameter(whole, tensor.requires_grad)
        torch_private.keep_hooks_and_attributes(tensor, new)
        self._old[id(new)] = id(tensor)
        return new

    def _free(self, lowered: Lowered, tensors: Iterable[torch.Tensor]) -> None:
        """Give the memory of parameters back that this rank keeps elsewhere, or not at all."""
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter):
                tensor.data = hollow(tensor.shape, tensor.dtype)
        if self.owns_stages:
            hollow_stages(lowered)

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model has all the parameters that it was built with, those that were placed without values."""
        return self._tables.whole()

    def check_known(self) -> None:
        """Call it inside `whole`. Raises InputError for parameters that were added after the placing. Before the
        placing, raises InputError for a model that another plan has placed."""
        if self._tables:
            self._tables.check_known(self._model)
        else:
            check_plain(self._model)

    def check_data(self) -> None:
        """Raise InputError for values that were assigned to a parameter's `.data`: the parameter does not have them."""
        if (problem := self._tables.lost_data()) != "":
            raise InputError(problem)

    # -- use --------------------------------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> nn.Parameter:
        """This rank's parameter that replaces one of the original model."""
        new = self._new[id(tensor)]
        assert isinstance(new, nn.Parameter), "`read_later` checks that ranks hold what their stages read"
        return new

    def read_later(self, lowered: Lowered, stages: Sequence[StageGrid], whole: Mapping[str, torch.Tensor]) -> None:
        """Prepare what the stages of a later call read, and give up buffers that other ranks write from now on.

        Collective.

        `whole`: the tensors of the original model, by name. Raises PlanError on all ranks if a rank does not have a
        piece that it needs.
        """
        for key, ranks in self._later_buffers.settle(lowered, stages, whole, self._holdings).items():
            if self._world.rank not in ranks:
                self._new[key] = None
                self._guard.lacks(self._tables.drop(key))
        check_held(lowered, stages, whole, self._holdings, self._everywhere)
        found = newly_read(lowered, stages, whole, self._holdings, self._everywhere, self._world.size)
        if not found:
            return
        self._holdings |= found
        groups = self._world.groups([tuple(range(self._world.size))])
        self.buckets = (*self.buckets, *buckets_of(self._world.rank, found, self._new, groups))
        self.parameters |= {id(new): new for key in found if isinstance(new := self._new[key], nn.Parameter)}
        self.apart.is_shared |= self._world.size > 1
        if self.changes.steps is not None:
            self.changes.steps.add_shared_by_all([self.parameters[id(self._new[key])] for key in found])

    def left_alone(self, lowered: Lowered, whole: Mapping[str, torch.Tensor]) -> frozenset[int]:
        """Ids of this rank's parameters that all ranks share but none of these stages reads."""
        read = {id(whole[piece.name]) for stage in lowered.stages for piece in stage.pieces if piece.name in whole}
        return frozenset(id(self._new[key]) for key in self._everywhere - read if key in self._holdings)

    def borrowed(
        self, lowered: Lowered, stages: Sequence[StageGrid], whole: Mapping[str, torch.Tensor]
    ) -> list[Borrowed]:
        """The buffers that stages read on ranks that do not keep them. Collective; the same on all ranks."""
        return borrowed_buffers(self._world, self._tables.kept, lowered, stages, whole)

    def refresh(self) -> None:
        """Gather the parts of parameters that have changed on some rank. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            self._gathered.refresh(lambda key: _own_part(self.parameters[key]))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step with this rank's parameters."""
        self._gathered.stepped(id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        if self.changes.steps is not None:
            self.changes.steps.stepped(optimizer)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank's stages read of one of its parameters; it shares the memory, where the rank stores that."""
        gathered = self._gathered.get(id(parameter))
        return _own_part(parameter) if gathered is None else gathered

    def as_stored(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of what the rank stores of a parameter, as autograd adds it to the parameter's."""
        like = self.parameters[key]
        assert isinstance(like, DTensor)
        return torch_private_ranks.part_like(gradient, like)

    def add_gradient(self, key: int, gradient: torch.Tensor) -> None:
        """Add a gradient of what the rank stores of a parameter to the parameter's `.grad`, as autograd does."""
        parameter = self.parameters[key]
        before, like = parameter.grad, parameter
        assert isinstance(like, DTensor)
        if before is None:
            parameter.grad = self.as_stored(key, gradient)
        elif isinstance(before, DTensor) and before.placements == like.placements:
            torch_private_ranks.part_of(before).add_(gradient)
        else:  # the user's own
            before.add_(self.as_stored(key, gradient))

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer that has parameters from before the placing this rank's instead.

        Raises InputError if it has made steps with them.
        """
        follow(optimizer)
        for group in optimizer.param_groups:
            old = [p for p in group["params"] if id(p) in self._new and self._new[id(p)] is not p]
            if not old:
                continue
            if self.changes.steps is not None:
                self.changes.steps.whole.is_made_before(optimizer)
            self._restart(optimizer, old)
            if any(optimizer.state.get(p) for p in old):
                raise InputError(
                    "the optimizer has states of parameters that have since been placed on ranks; make it anew from "
                    "pm.parameters() after the first call, or give parallelize example_args= and make it then"
                )
            present = [self._new.get(id(p), p) is not None for p in group["params"]]
            if "param_names" in group:
                group["param_names"] = list(compress(group["param_names"], present))
            # In place: LBFGS keeps the list.
            group["params"][:] = [self._new.get(id(p), p) for p in compress(group["params"], present)]

    def check_works(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise InputError for an optimizer that cannot step this rank's parameters."""
        check_works(optimizer, self._names, len(self.meshes))

    def _restart(self, optimizer: torch.optim.Optimizer, old: Sequence[torch.Tensor]) -> None:
        """Have this rank's parameters begin with what those from before have of no step: Adagrad's first sums, and the
        counters that L-BFGS keeps with its first parameter."""
        for p in old:
            new, state = self._new[id(p)], optimizer.state.get(p)
            if not state:
                continue
            if not any(isinstance(value, torch.Tensor) for value in state.values()):
                del optimizer.state[p]
                if new is not None:
                    optimizer.state[new] = state
            elif isinstance(optimizer, torch.optim.Adagrad) and not state["step"]:
                del optimizer.state[p]
                if new is not None:
                    start = state["sum"].flatten()[0].item() if p.numel() else 0.0
                    optimizer.state[new] = {"step": state["step"], "sum": torch.full_like(new.detach(), start)}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is this model's, from before or after the placing."""
        return id(tensor) in self._new or id(tensor) in self._old

    def is_elsewhere(self, module: object, name: str | None) -> bool:
        """Whether a module of this model had a tensor of this name, which other ranks hold now."""
        return self._tables.lacks(module, name)

    def has_any(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has parameters of this model, from before or after the placing."""
        own = {id(p) for p in self._model.parameters()} if not self.placed else ()
        return any(id(p) in own or self.has(p) for group in optimizer.param_groups for p in group["params"])

    def present(self, given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's parameters in the places of `given`, which may be from before the placing; each once."""
        found = {id(p): p for p in (self._new.get(id(g), g) for g in given) if p is not None}
        return list(found.values())

    def is_everywhere(self, parameter: torch.Tensor) -> bool:
        """Whether this is a parameter that every rank has whole, because no stage of the first call reads it."""
        return self._old.get(id(parameter)) in self._everywhere

    def is_first_holder(self, parameter: torch.Tensor) -> bool:
        """Whether this rank's stage is the first of those that hold a parameter: several do if it is tied."""
        by_rank = self._holdings[self._old[id(parameter)]]
        return by_rank[self._world.rank].stage == min(held.stage for held in by_rank.values())

    def is_first_of_its_sum(self, key: int) -> bool:
        """Whether this rank is the first of those that add up their gradients of its parameter with the id `key`."""
        return self._holdings[self._old[key]][self._world.rank].together[0] == self._world.rank

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's parameters, once placed."""
        return list(self._model.named_parameters())

    @property
    def is_complete(self) -> bool:
        """Whether this rank has a part of every parameter."""
        return self._tables.is_complete

    @cached_property
    def _names(self) -> dict[int, str]:
        """By id of this rank's parameters."""
        return {id(p): name for name, p in self._model.named_parameters()}


def _own_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank stores of one of its parameters, without history; it shares the parameter's memory."""
    assert isinstance(parameter, DTensor)
    return torch_private_ranks.part_of(parameter)


def hollow_stages(lowered: Lowered) -> None:
    """Free what the stages' own modules hold of parameters: pieces of sharded ones are views of whole ones."""
    for stage in lowered.stages:
        for parameter in stage.module.parameters():
            if parameter.untyped_storage().nbytes() > parameter.element_size():
                parameter.data = hollow(parameter.shape, parameter.dtype)
