"""What one search looks at: its devices, cuts, schedules and numbers of micro-batches, and the partition problems."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.costs.cost_graph import CostGraph, StageConfiguration
from autopar.costs.device_group import DeviceGroup
from autopar.costs.sends import Lanes, estimated_sends
from autopar.plan.recompute import Recompute
from autopar.planner.inter_op.atom_times import AtomTimes, CoreSeconds, atom_times
from autopar.planner.inter_op.atoms import make_atoms, with_configurations
from autopar.planner.inter_op.config import Config, MeshChoices, Used
from autopar.planner.inter_op.cut_selection import cuts_worth_looking_at, most_cuts
from autopar.planner.inter_op.cuts import AtomGraph
from autopar.planner.inter_op.device_kind import DeviceKind
from autopar.planner.inter_op.device_pools import kind_of_pool, nodes_of, pools_of, with_places_apart
from autopar.planner.inter_op.kind_times import accumulation_of, by_kind, captured_of, launches_of, overlapping_of
from autopar.planner.inter_op.memory_formula import resident_bytes
from autopar.planner.inter_op.mesh_places import counts_exactly, devices_by_node
from autopar.planner.inter_op.optimizer_seconds import stepped
from autopar.planner.inter_op.problem import Problem
from autopar.planner.inter_op.refused_stages import RefusedStage
from autopar.planner.inter_op.search_budget import AHEAD, AHEAD_COARSE, COARSE, EXACT, EXACT_STATES
from autopar.planner.inter_op.search_counts import (
    FEW_DEVICES,
    MANY_DEVICES,
    copies_of_pipeline,
    counts_in_cluster,
    halved_counts,
    microbatch_counts_ahead,
    searched_schedules,
)
from autopar.planner.inter_op.space import Space
from autopar.planner.inter_op.stage_bytes import Shared
from autopar.planner.inter_op.stage_seconds import KnownSeconds
from autopar.planner.search_options import SearchOptions
from autopar.schedule.builders import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED
from autopar.schedule.micro_batches import largest_size
from autopar.sharding.mesh import divisors

# Pairs of a mesh shape and a number of micro-batches up to which a search looks at all of them: for any model, and for
# one that has few enough cuts to look at all of these, too. Up to the last number, as many as make, times the cuts that
# it looks at, the product.
_MOST_SHAPES, _MOST_SHAPES_OF_SMALL, _MOST_SHAPES_OF_SMALLEST = 60, 100, 400
_SHAPES_TIMES_CUTS = 15_000

_LEAST_REBUILT = 0.02  # of all saved bytes, for stages that recompute attention alone


class SearchSpace:
    """The partition problems for one cost graph under given options."""

    def __init__(
        self, costs: CostGraph, options: SearchOptions, meshes: MeshChoices | None = None, apart: int | None = None
    ) -> None:
        """`meshes`: that stages may have, beside those that `costs` has. `apart`: a width whose meshes have pools of
        their own, as hosts have fewer places for them than their number of devices says."""
        self.costs = costs
        self.meshes = meshes
        self.options = options
        self.atoms = make_atoms(costs, options.constraints)
        self.apart = apart
        self.pools = pools_of(costs.groups)
        if apart is not None:
            self.pools = with_places_apart(costs, self.pools, apart)
        self.full: Used = tuple(len(pool) for pool in self.pools)
        self._nodes = [nodes_of(costs, pool) for pool in self.pools]
        self._known_counts: dict[tuple[int, int, int], bool] = {}
        self._single = tuple(self._kind(pool, 1) for pool in range(len(self.pools)))
        # Seconds of planned clusters do not depend on how many devices are busy, so that one search knows them all.
        self.ahead = costs.cluster is not None
        few = math.prod(c + 1 for c in self.full) <= EXACT_STATES
        self.effort = (AHEAD if few else AHEAD_COARSE) if self.ahead else EXACT if few else COARSE
        self.graph: AtomGraph = self.atoms.graph(
            self.atoms.sums(tuple(costs.shares), np.array(list(costs.shares.values())))
        )
        # Of a chain of layers half of the cuts are different ones: many meshes with several stages each need more.
        most = self.effort.cuts * (2 if meshes is not None and sum(self.full) > MANY_DEVICES else 1)
        self._most_cuts = most_cuts([min(count, MANY_DEVICES) for count in self.full], most)
        cuts, self.complete = cuts_worth_looking_at(self.graph, self._most_cuts)
        self.n_cuts = len(cuts)
        self._configured: dict[str, Space] = {}  # the space with the bytes of a stage configuration, by its name
        self._space = self._space_of(cuts)
        self.counts = self._microbatch_counts()
        # Whether stages may have every mesh shape at every number of micro-batches; else only what is near the best.
        self.all_shapes = sum(map(self.n_shapes, self.counts)) <= self._most_shapes()
        self.schedules = searched_schedules(options, costs.training, apart=self.sends_looked_at)
        self.most_replicas = options.max_replicas or len(costs.groups)
        self._known_seconds = KnownSeconds()
        self._known_times: dict[tuple[str, int, float], AtomTimes] = {}
        self._known_kinds: dict[tuple[int, int], DeviceKind] = {}
        self.bytes_factors: dict[Config, float] = {}  # what rehearsals have shown, in place of `options.bytes_factor`
        self.refused: list[RefusedStage] = []  # the same of single stages

    def problem(self, m: int, schedule: str, counts: Used, chunks: int = 1, space: Space | None = None) -> Problem:
        """The partition problem for `m` micro-batches, with the times of operators on that many busy devices."""
        return self.problem_of(Config(schedule, m, counts, chunks), space)

    def problem_of(self, config: Config, space: Space | None = None, *, rehearsed: bool = True) -> Problem:
        """`problem`, with the limits of `config`. `rehearsed`: with as little memory as rehearsals have shown."""
        costs, m, chunks, copies = self.costs, config.n_microbatches, config.chunks, config.copies
        schedule = config.schedule
        rows = costs.batch_size / m
        busy = sum(config.counts) if m > 1 else 1
        space = space or self._space
        kinds = self._kinds(config, space)
        if rehearsed and config in self.bytes_factors:
            less = self.options.bytes_factor / self.bytes_factors[config]
            kinds = tuple(replace(kind, memory=kind.memory * less) for kind in kinds)
        times = [self._times(kind.name, max(1, busy // kind.width), rows).under(schedule) for kind in kinds]
        # If the caller computes the loss, all forwards come first: then every schedule holds what gpipe holds, and only
        # the bubble of the backwards has room for work that is delayed.
        phased = costs.training and not self.options.loss_inside
        behind = phased or config.sends_behind or schedule in ("gpipe", *INTERLEAVED)
        most_replicas = min(self.most_replicas, config.most_replicas or self.most_replicas)
        return Problem(
            space=space,
            forward=np.maximum([t.kernels.forward for t in times], 0.0),
            backward=np.maximum([t.kernels.backward for t in times], 0.0),
            weight=np.maximum([t.kernels.weight for t in times], 0.0) if schedule in SPLIT_BACKWARD else None,
            most_delayed_parts=1 if phased else 3 if schedule in INTERLEAVED else 2,
            captured=captured_of(times),
            launches=launches_of(times),
            overlapping=overlapping_of(times, costs.overlap),
            once=np.array([t.once for t in times]),
            accumulation=accumulation_of(times),
            n_microbatches=m // copies,
            schedule="gpipe" if phased else schedule,
            kinds=tuple(kind.of_one_copy(copies, chunks) for kind in kinds),
            max_replicas=1 if schedule in INTERLEAVED else max(1, most_replicas // copies),
            overhead=costs.python.busy,
            overhead_alone=costs.python.alone,
            handling=0.0 if costs.ranks is None else costs.ranks.handling,
            plain=m == 1,
            may_recompute=costs.training,
            cores=self._cores(times),
            blocks=self._blocks(times),
            sends_behind=costs.overlap.sends and behind,
            chunks=chunks,
            share=largest_size(costs.batch_size, m) / costs.batch_size,  # of the largest micro-batch
            refused=tuple(one for one in self.refused if rehearsed and one.applies(schedule, m)),
            known=self._known_seconds,
        )

    def add_meshes(
        self,
        m: int,
        widths: Iterable[int],
        *,
        every_shape: bool = False,
        only: Container[tuple[int, ...]] | None = None,
    ) -> None:
        """Let stages have meshes of these widths for `m` micro-batches, of the usual shapes or of every one, or of
        `only` some of them."""
        assert self.meshes is not None, "a search without meshes has none to add"
        meshes = self.meshes.meshes
        self._add([one for w in widths for one in meshes.configurations(w, m, every_shape=every_shape, only=only)])

    def _add(self, configurations: Sequence[StageConfiguration]) -> None:
        new = [one for one in configurations if one.name not in self.costs.configuration]
        self.costs = replace(self.costs, configurations=(*self.costs.configurations, *new))
        self.atoms = with_configurations(self.atoms, self.costs, new, self.options.constraints)

    @cached_property
    def widths_everywhere(self) -> list[int]:
        """Widths of meshes that all devices of a pool have places in."""
        every, pools = [] if self.meshes is None else self.meshes.widths, range(len(self.pools))
        return [w for w in every if any(self.counts_exactly(pool, w, self.full[pool]) for pool in pools)]

    def n_shapes(self, m: int) -> int:
        """The usual shapes of meshes of these widths for `m` micro-batches."""
        known = None if self.meshes is None else self.meshes.meshes
        return 0 if known is None or not known.divides(m) else sum(map(known.n_shapes, self.widths_everywhere))

    def _most_shapes(self) -> int:
        """Pairs of a mesh shape and a number of micro-batches that this search looks at, if there are no more."""
        always = _MOST_SHAPES_OF_SMALL if self.complete else _MOST_SHAPES
        return max(always, min(_MOST_SHAPES_OF_SMALLEST, _SHAPES_TIMES_CUTS // self.n_cuts))

    def most_counts(self) -> int:
        """The largest number of micro-batches that the batch allows."""
        return max(1, self.costs.batch_size // self.options.least_rows)

    def memory(self, group: DeviceGroup) -> float:
        """Bytes that each device of a group may use."""
        return min(group.memory, self.options.memory_limit or math.inf) / self.options.bytes_factor

    def widths(self, m: int) -> list[int]:
        """Devices of a mesh, ascending, for `m` micro-batches; 1 for single devices."""
        of_meshes = {one.width for one in self.costs.configurations if one.n_microbatches == m}
        return sorted(of_meshes | ({1} if self.costs.alone else set()))

    def device_counts(self) -> list[Used]:
        """Vectors of device counts: all of them for few devices, otherwise all devices, their numbers halved, and in
        clusters of few nodes those of every number of nodes."""
        if self.costs.cluster is None:
            return halved_counts(self.full, self._shifts)
        return counts_in_cluster(self.full, self.costs.cluster.nodes, self._shifts)

    @property
    def _shifts(self) -> Iterable[int]:
        """How often the numbers of many devices are halved."""
        return range(1, max(self.full).bit_length()) if self.ahead else self.effort.fewer

    def configs(self, m: int, counts: Used) -> Iterator[Config]:
        """Under every schedule that `counts` devices can follow."""
        total = sum(counts)
        for name in self.schedules[:1] if total == 1 else self.schedules:
            if name not in INTERLEAVED or total == 1:
                yield from self._configs_of(name, m, counts)
                if self._hides_sends and name in ("1f1b", "zb-h1") and m > 1 and total > 1:
                    yield from (replace(one, sends_behind=True) for one in self._configs_of(name, m, counts))
            elif m > 1 and sum(c > 0 for c in counts) == 1 and not self._space.pinned:
                yield from self._interleaved(name, m, counts)

    def _interleaved(self, name: str, m: int, counts: Used) -> Iterator[Config]:
        """All ranks have meshes of one width, and as many replicas, which share the micro-batches evenly."""
        for width in self.widths(m):
            meshes, rest = divmod(sum(counts), width)
            for copies in () if rest else divisors(math.gcd(m, meshes)):
                ranks = meshes // copies
                # With one stage a device, more micro-batches are in flight than under 1f1b, and hide sends.
                numbers = (1, *self.effort.chunks) if self.sends_looked_at else self.effort.chunks
                numbers = (2,) if name in V_SHAPED else numbers
                for chunks in numbers if ranks > 1 and copies <= self.most_replicas else ():
                    if ranks * chunks < self.n_cuts:
                        yield Config(name, m, counts, chunks, most_width=width, least_width=width, copies=copies)

    def counts_of(self, config: Config) -> Used:
        """Devices of each pool in the problem of `config`: those of one copy, once for each of its stages."""
        return tuple(count // config.copies * config.chunks for count in config.counts)

    def _configs_of(self, schedule: str, m: int, counts: Used) -> Iterator[Config]:
        whole = Config(schedule, m, counts)
        if sum(counts) <= MANY_DEVICES:
            yield whole
            return
        for width in self.widths(m):
            for copies in copies_of_pipeline(m, counts, width):
                alike = replace(whole, most_width=width, least_width=width, copies=copies)
                yield from (alike, replace(alike, most_replicas=copies))

    def limited(self, config: Config) -> Iterator[Config]:
        """`config` with each limit that a user could set: fewer devices, smaller meshes, fewer replicas."""
        if config.schedule in INTERLEAVED:
            return
        for counts in self.device_counts():
            fewer = replace(config, counts=counts)
            if counts != config.counts and fewer.within(config) and any(self.counts_of(fewer)):
                yield fewer
        for width in self.widths(config.n_microbatches)[:-1]:
            yield replace(config, most_width=width)
        most = min(self.most_replicas, config.n_microbatches, sum(config.counts))
        for replicas in range(1, most) if most <= FEW_DEVICES else (1 << n for n in range(most.bit_length())):
            yield replace(config, most_replicas=replicas)

    def bytes_factor(self, config: Config) -> float:
        """How many times the bytes of the formula stages hold."""
        return self.bytes_factors.get(config, self.options.bytes_factor)

    def _kinds(self, config: Config, space: Space) -> tuple[DeviceKind, ...]:
        """Single devices, and every stage configuration of meshes for the number of micro-batches."""
        if not self.costs.configurations:
            return self._single
        found = []
        if self._has_single(config):
            found += [replace(kind, pool=pool, space=space) for pool, kind in enumerate(self._single)]
        for pool, one in self._configurations_under(config):
            own = self._configured_space(space, one.name)
            found.append(replace(self._known_kind(pool, one.width), name=one.name, pool=pool, space=own))
        return tuple(found)

    def has_kinds(self, config: Config) -> bool:
        """Whether every pool has devices or meshes that `config` allows."""
        if not self.costs.configurations or self._has_single(config):
            return True
        return {pool for pool, _ in self._configurations_under(config)} == set(range(len(self.pools)))

    def _has_single(self, config: Config) -> bool:
        return self.costs.alone and config.least_width == 1

    def _configurations_under(self, config: Config) -> Iterator[tuple[int, StageConfiguration]]:
        """(pool, stage configuration of its meshes) that `config` allows."""
        most = config.most_width or math.inf
        for pool, single in enumerate(self._single):
            for one in self.costs.configurations:
                widest = min(most, single.count // config.copies)
                here = one.kind == single.name and one.n_microbatches == config.n_microbatches
                here = here and config.least_width <= one.width <= widest
                if here and self.counts_exactly(pool, one.width, config.counts[pool]):
                    yield pool, one

    def counts_exactly(self, pool: int, width: int, n_devices: int) -> bool:
        """Whether that many devices of a pool may be counted without knowing their nodes (`mesh_places`)."""
        key = (pool, width, n_devices)
        if key not in self._known_counts:
            exactly = counts_exactly(self._nodes[pool], width, n_devices)
            self._known_counts[key] = exactly and self._lie_like_their_kind(pool, width)
        return self._known_counts[key]

    def _lie_like_their_kind(self, pool: int, width: int) -> bool:
        """Whether meshes of a pool lie in their nodes like those of all devices of its kind, which are priced."""
        kind = self.pools[pool][0].kind
        everywhere = nodes_of(self.costs, [group for group in self.costs.groups if group.kind == kind])
        mine = devices_by_node(self._nodes[pool], width)
        return bool(mine) and mine == devices_by_node(everywhere, width)

    @property
    def only_on_some_devices(self) -> list[int]:
        """Widths of meshes that plans on all devices of their pool do not have: hosts have fewer places for them than
        the number of devices says, and the search counts devices. None where a search of the cluster takes long."""
        if self.ahead and not self.all_shapes:
            return []
        uncounted = {
            (pool, width)
            for (pool, width, n), exactly in self._known_counts.items()
            if not exactly and n == self.full[pool]
        }
        return sorted({width for pool, width in uncounted if self._lie_like_their_kind(pool, width)})

    def _known_kind(self, pool: int, width: int) -> DeviceKind:
        if (pool, width) not in self._known_kinds:
            self._known_kinds[pool, width] = self._kind(pool, width)
        return self._known_kinds[pool, width]

    def _kind(self, pool: int, width: int) -> DeviceKind:
        groups = self.pools[pool]
        return kind_of_pool(self.costs, groups, min(map(self.memory, groups)), self.options.optimizer, width)

    def _configured_space(self, space: Space, configuration: str) -> Space:
        if space is not self._space:  # cuts near one plan, which no other problem has
            return self._space_of(space.cuts, configuration, space)
        if configuration not in self._configured:
            self._configured[configuration] = self._space_of(space.cuts, configuration, space)
        return self._configured[configuration]

    def _cores(self, times: Sequence[AtomTimes]) -> CoreSeconds[np.ndarray] | None:
        """By kind; None where stages gain hardly anything from keeping less of their attentions, as where each is one
        operator: a search with a further mode takes about a sixth longer."""
        rebuilt, saved = (sum(one.nbytes for one in of) for of in (self.atoms.cores.rebuilt, self.atoms.saved))
        if not self.costs.training or rebuilt <= _LEAST_REBUILT * saved:
            return None
        return by_kind([t.again[Recompute.SELECTIVE] for t in times])

    def _blocks(self, times: Sequence[AtomTimes]) -> CoreSeconds[np.ndarray] | None:
        """By kind; None where the model repeats no layers that may run again."""
        if not self.costs.training or not self.atoms.layers.atoms:
            return None
        return by_kind([t.again[Recompute.FULL] for t in times])

    def _times(self, kind: str, busy: int, rows: float) -> AtomTimes:
        key = (kind, 1 if self.ahead else busy, rows)
        if key not in self._known_times:
            self._known_times[key] = atom_times(self.costs, self.atoms, kind, busy, rows)
        return self._known_times[key]

    def _space_of(self, cuts: np.ndarray, configuration: str = "", alike: Space | None = None) -> Space:
        costs, atoms = self.costs, self.atoms.of(configuration)
        mesh = costs.configuration.get(configuration)
        lane = 0.0
        if mesh is not None and estimated_sends(costs.cluster):
            lane = Lanes.of(costs, mesh.kind, mesh.width).between_nodes
        held = [(s.atoms, resident_bytes(w, self.options.optimizer, costs.training)) for s, w in atoms.parameters]
        return Space(
            cuts=cuts,
            alike=alike,
            values=atoms.values,
            lane=lane,
            resident=tuple(Shared(one.total, readers) for readers, one in held),
            gradients=tuple(Shared(one.gradient, readers) for readers, one in held if one.gradient),
            saved=atoms.saved,
            rebuilt=atoms.cores.rebuilt,
            core=atoms.cores.working,
            kept=atoms.layers.kept,
            block=atoms.layers.working,
            layered=atoms.layers.atoms,
            outside=atoms.layers.outside if costs.training else (),
            transient=atoms.transient,
            once=tuple(Shared(w.once, s.atoms) for s, w in atoms.parameters if w.once),
            stepped=stepped(costs, atoms, self.options.optimizer),
            pinned=atoms.pinned,
            recomputed=atoms.recomputed if costs.training else (),
            unrepeatable=atoms.unrepeatable,
        )

    @property
    def sends_looked_at(self) -> bool:
        """Whether the search looks at schedules that differ in what sends run behind; a large one does not."""
        return self.ahead and self.costs.overlap.sends and self.effort is AHEAD and self.all_shapes

    @property
    def _hides_sends(self) -> bool:
        """Whether sends take seconds that the passes of 1F1B and ZB-H1 may hide; a large search for a cluster does not
        look at that."""
        phased = self.costs.training and not self.options.loss_inside
        looked_at = self.sends_looked_at if self.ahead else self.costs.overlap.sends
        if phased or not looked_at:
            return False
        return any(math.isfinite(link.bandwidth) for link in self.costs.links.values())

    def _microbatch_counts(self) -> list[int]:
        if self.options.n_microbatches is not None:
            return [self.options.n_microbatches]
        if self.options.one_microbatch_because:
            return [1]
        if not self.costs.alone:
            return sorted({configuration.n_microbatches for configuration in self.costs.configurations})
        most = self.most_counts()
        if self.ahead:
            devices = {sum(counts) for counts in halved_counts(self.full, self._shifts)}
            return microbatch_counts_ahead(self.costs.batch_size, most, devices)
        if most <= self.effort.counts + 4:
            return list(range(1, most + 1))
        return sorted({round(x) for x in np.geomspace(1, most, self.effort.counts)})
