"""The bytes of operators on each device of a mesh, by the strategies that were chosen for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from autopar.costs.operator_cost import OperatorCost
from autopar.costs.sends import Sent
from autopar.costs.shard_costs import ShardCosts
from autopar.planner.inter_op.scattering import Scattering
from autopar.planner.inter_op.split_program import SavedPlace, SplitProgram
from autopar.planner.intra_op.sharding_task import GraphFacts
from autopar.planner.intra_op.strategy_search import KeptShard, Sharding
from autopar.sharding.layouts import Placements, parts
from autopar.sharding.stage_sharding import Stored
from autopar.sharding.strategy_costs import Place, kept_layout, kept_share
from cost_models import Cluster


def operators_on_mesh(
    program: SplitProgram, facts: GraphFacts, solution: Sharding, kind: str, cluster: Cluster, n_microbatches: int
) -> dict[str, OperatorCost]:
    """The costs of all operators, with the bytes of each device of the mesh.

    While an operator runs, the device also holds the parameters that the operator gathers, with their gradients. For
    other parameters it holds the micro-batch's gradient besides the sum over micro-batches. Neither depends on the size
    of a micro-batch, so the bytes "of the whole batch" are `n_microbatches` times these bytes.
    """
    weights, keeping = _weights(program, solution, kind), _Keeping(program, facts, solution)
    scattering = Scattering(solution.mesh, cluster, n_microbatches)
    cut = {n: parts(s.outputs[0], solution.mesh.shape) if s.outputs else 1 for n, s in solution.strategies.items()}
    alike: dict[tuple[str, float, float, float], dict[str, Any]] = {}  # shared by equal layers

    def result(representative: str, whole: OperatorCost) -> dict[str, Any]:
        """Bytes of an operator's result on a device, and while it runs, as fields of `OperatorCost`."""
        n_parts, made = cut[representative], solution.strategies[representative].outputs
        sent = scattering.of(made[0], whole.output_bytes / n_parts) if made else Sent(whole.output_bytes)
        gathered = solution.gathered.get(representative, 0.0) * n_microbatches
        return {
            "output_bytes": whole.output_bytes / n_parts,
            "gradient_bytes": whole.gradient_bytes / n_parts,
            "allocated_bytes": whole.allocated_bytes / n_parts + gathered,
            "copies": sent.copies,
            "gather": sent.gather,
        }

    found: dict[str, OperatorCost] = {}
    for node, whole in program.costs.operators.items():
        representative = program.kept[node]
        if representative not in solution.strategies:
            found[node] = whole
            continue
        key = representative, whole.output_bytes, whole.gradient_bytes, whole.allocated_bytes
        if key not in alike:
            alike[key] = result(representative, whole)
        n_parts = cut[representative]
        changes: dict[str, Any] = {
            "results": {(storage, 1 / n_parts, None): n / n_parts for storage, n in whole.results.items()}
        }
        if whole.saved:
            changes |= keeping.of(node)
        if whole.parameters:
            represented = program.represented[node]
            read = {
                storage: weight._replace(**weights.get(represented.get(storage), {}))
                for storage, weight in whole.parameters.items()
            }
            changes["parameters"] = read
            if n_microbatches > 1 and program.costs.training and not solution.gathered.get(representative):
                fresh = sum(weight.fresh_gradient for weight in read.values()) * n_microbatches
                changes["allocated_bytes"] = alike[key]["allocated_bytes"] + fresh
        found[node] = whole.with_bytes(**{**alike[key], **changes})
    return found


def _weights(program: SplitProgram, solution: Sharding, kind: str) -> dict[str | None, dict[str, Any]]:
    """By storage: what the solution says of a parameter on devices of a kind, as fields of `Weight`."""
    shards = program.costs.shards
    whole = shards is not None and shards.holds_whole_parameters(kind)  # the first device, which has most
    mesh = solution.mesh.shape
    once: dict[str, float] = defaultdict(float)
    for collective in solution.collectives:
        if collective.shared:
            once[collective.tensor] += collective.seconds / collective.times
    return {
        program.storages[name]: ({} if whole else _stored_parts(stored, mesh, shards)) | {"once": once[name]}
        for name, stored in solution.stored.items()
        if name in program.storages
    }


def _stored_parts(stored: Stored, mesh: Sequence[int], shards: ShardCosts | None) -> dict[str, int]:
    """As fields of `Weight`. `shards`: of devices at hand."""
    read, state = parts(stored.layout, mesh), parts(stored.state, mesh)
    return {
        "parts": read,
        "state_parts": state,
        "beside": 0 if shards is None else shards.beside(read, state),
        "gradient_parts": parts(stored.state if stored.scattered else stored.layout, mesh),
    }


class _Keeping:
    """What each device keeps of operators' tensors for the backward. Equal layers keep equal shares."""

    def __init__(self, program: SplitProgram, facts: GraphFacts, solution: Sharding) -> None:
        self._program, self._facts, self._solution = program, facts, solution
        self._known: dict[SavedPlace, _Share] = {}

    def of(self, node: str) -> dict[str, Any]:
        """As fields of `OperatorCost`. Operators that keep one tensor in the same layout share its storage; a
        redistributed copy has its own."""
        whole: OperatorCost = self._program.costs.operators[node]
        saved: dict[Hashable, float] = {}
        within: dict[Hashable, float] = {}
        regathered = 0.0
        for (storage, nbytes), place in zip(whole.saved.items(), self._program.saved_places[node], strict=True):
            if place not in self._known:
                self._known[place] = self._share(*place)
            share, moved, shard = self._known[place]
            within[storage, share, moved] = nbytes * share
            if shard is not None:
                regathered += nbytes * share
                share = 1 / parts(shard.layout, self._solution.mesh.shape)
                moved = None if shard.made else shard.layout
            saved[storage, share, moved] = nbytes * share
        kept: dict[str, Any] = {
            "saved": saved,
            "regathered_bytes": regathered,
            "saved_within": within if regathered else None,
        }
        if whole.rebuilt:
            kept["rebuilt"] = frozenset(key for key in saved if isinstance(key, tuple) and key[0] in whole.rebuilt)
        return kept

    def _share(self, representative: str, of_node: Place, maker: str | None) -> _Share:
        strategies = self._solution.strategies
        strategy, ruled = strategies[representative], self._facts.with_rule(self._facts.node(representative))
        place = ruled.place(of_node)
        layout, share = kept_layout(strategy, place), kept_share(strategy, place, self._solution.mesh.shape)
        made = strategies[maker].outputs if maker is not None and maker in strategies else ()
        shard = None
        if maker is not None and layout is not None:
            shard = self._solution.kept.get((maker, representative, layout))
        return _Share(share, layout if len(made) == 1 and made[0] != layout else None, shard)


class _Share(NamedTuple):
    """The part of a tensor that an operator reads, or makes, and keeps."""

    share: float
    moved: Placements | None  # its layout if that is not the one in which its maker made it
    shard: KeptShard | None  # what is kept in its place
