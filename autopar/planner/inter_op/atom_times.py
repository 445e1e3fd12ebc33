"""Seconds of atoms: the cost table, summed over the operators of each atom."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np

from autopar.costs.cost_graph import CostGraph
from autopar.costs.cost_table import CostTable, HostTimes
from autopar.plan.recompute import PARTLY, Recompute
from autopar.planner.inter_op.atoms import Atoms
from autopar.schedule.builders import SPLIT_BACKWARD
from cost_models.collectives.overlap import CONTENTION, left_over, overlapped_pass
from cost_models.kernels.launches import Seconds, overlapped_seconds, waits


class PassSeconds(NamedTuple, Generic[Seconds]):
    """Seconds of a micro-batch: numbers, or arrays by atom or by stage."""

    forward: Seconds
    backward: Seconds
    weight: Seconds  # the part of `backward` that computes gradients of parameters


def passes(
    kernels: PassSeconds[Seconds],
    host: PassSeconds[Seconds],
    start: float | np.ndarray,
    network: PassSeconds[Seconds] | None = None,
    *,
    split: bool,
) -> PassSeconds[Seconds]:
    """The passes of a stage by the sums of its kernels, of their launches and of its collectives, in the objective and
    in the simulator: the longest of the three.

    `start`: s of the host at the start of each pass. `network`: of all collectives, where some run behind kernels;
    without, none does. `split`: the backward runs as two passes, the second for the gradients of parameters. A repeated
    forward is a pass of its own, too.
    """

    if split:  # the first part in the place of the whole
        kernels, host = (each._replace(backward=each.backward - each.weight) for each in (kernels, host))
        network = network and network._replace(backward=network.backward - network.weight)
    taken = PassSeconds(*(overlapped_seconds(k, h, start) for k, h in zip(kernels, host, strict=True)))
    if network is not None:
        taken = PassSeconds(*(overlapped_pass(t, n) for t, n in zip(taken, network, strict=True)))
    return taken._replace(backward=taken.backward + taken.weight) if split else taken


class CoreSeconds(NamedTuple, Generic[Seconds]):
    """Seconds of a micro-batch to run the cores of attention once more; or all layers.

    A forward, without what the backward need not gather after it.
    """

    kernels: Seconds
    host: Seconds
    network: Seconds  # of collectives, where some run behind kernels


def with_cores(
    kernels: PassSeconds[Seconds],
    host: PassSeconds[Seconds],
    network: PassSeconds[Seconds] | None,
    cores: CoreSeconds[Seconds],
) -> tuple[PassSeconds[Seconds], PassSeconds[Seconds], PassSeconds[Seconds] | None]:
    """Kernels, launches and collectives of a stage whose backward runs `cores` again, as it gets there."""

    def longer(seconds: PassSeconds[Seconds], again: Seconds) -> PassSeconds[Seconds]:
        return seconds._replace(backward=seconds.backward + again)

    return (
        longer(kernels, cores.kernels),
        longer(host, cores.host),
        None if network is None else longer(network, cores.network),
    )


def in_one_part(taken: PassSeconds[Seconds]) -> PassSeconds[Seconds]:
    """A backward that runs layers again does not come in parts: each part would run them again. It counts as long as
    its parts, which is never shorter than that of a stage that keeps everything."""
    return taken._replace(weight=0 * taken.weight)


class Behind(NamedTuple, Generic[Seconds]):
    """Seconds once a step of collectives that run behind a pass."""

    gradients: Seconds  # behind the last backward
    parameters: Seconds  # behind the first forward
    bucket: Seconds  # of either; for the last of the gradients and the first of the parameters nothing runs


def seconds_once(
    behind: Behind[Seconds], taken: PassSeconds[Seconds], network: PassSeconds[Seconds], *, split: bool
) -> Seconds:
    """What collectives add to a step that run behind the passes `taken`, in the objective and in the simulator.

    `network`: of other collectives in these passes; no two run at once. With a `split` backward, gradients of
    parameters come from its second part.
    """
    last = taken.weight - network.weight if split else taken.backward - network.backward
    added = left_over(behind.gradients, last, behind.bucket)
    return added + left_over(behind.parameters, taken.forward - network.forward, behind.bucket)


@dataclass(frozen=True)
class OverlappedAtoms:
    """Seconds of collectives, where some run behind kernels; see `OverlappedTimes`."""

    network: PassSeconds[np.ndarray]  # [n] of all collectives for one micro-batch
    hidden: PassSeconds[np.ndarray]  # [n] of those behind kernels
    hidden_again: Mapping[Recompute, np.ndarray]  # [n] of those in what runs again, less those that it makes needless
    gradients: np.ndarray  # [n] once a step
    parameters: np.ndarray  # [n] once a step
    bucket: float


class AtomTimes(NamedTuple):
    """Seconds of every atom for one micro-batch, except for `once`."""

    kernels: PassSeconds[np.ndarray]  # [n]; of devices whose launches are measured with them, all of it
    host: PassSeconds[np.ndarray]  # [n] of the host, to launch them
    start: float  # of the host, at the start of each pass of a stage
    once: np.ndarray  # [n] once a step, however many micro-batches: collectives inside of a mesh
    again: Mapping[Recompute, CoreSeconds[np.ndarray]]  # [n] by mode of PARTLY: what the backward runs again
    overlapped: OverlappedAtoms | None = None
    splitting: np.ndarray | float = 0.0  # [n] of Python, more than these where a backward comes in two parts
    # `kernels` of stages that are not compiled, where `kernels` are of compiled ones; None: all stages run alike.
    captured: PassSeconds[np.ndarray] | None = None
    left_alone: frozenset[Recompute] = frozenset()  # stages that recompute so take what `captured` says
    accumulation: np.ndarray | float = 0.0  # [n] of the backward, what the first of a replica's micro-batches lacks

    def running(self, recompute: Recompute) -> AtomTimes:
        """The times of stages with this mode, compiled or not."""
        if self.captured is None or recompute not in self.left_alone:
            return self
        return self._replace(kernels=self.captured, captured=None)

    def under(self, schedule: str) -> AtomTimes:
        """The times of a schedule's actions. Python divides backwards that come in two parts; half of what that takes
        counts to each part."""
        if schedule not in SPLIT_BACKWARD:
            return self

        def divided(seconds: PassSeconds[np.ndarray]) -> PassSeconds[np.ndarray]:
            forward, backward, weight = seconds
            return PassSeconds(forward, backward + self.splitting, weight + self.splitting / 2)

        if self.captured is None:
            return self._replace(kernels=divided(self.kernels))
        return self._replace(captured=divided(self.captured))  # a compiled backward is one node, and stays whole

    def stage(
        self, inside: Sequence[int], *, split: bool = False, recompute: Recompute = Recompute.NONE
    ) -> PassSeconds[float]:
        """The passes of a stage with the atoms `inside`. `recompute`: what the backward runs again as it gets there; a
        whole forward is a pass of its own."""
        if self.captured is not None and recompute in self.left_alone:
            return self.running(recompute).stage(inside, split=split, recompute=recompute)
        atoms = np.asarray(inside)  # once, as every sum would make one of a list
        kernels, host = (_summed(times, atoms) for times in (self.kernels, self.host))
        network = None if self.overlapped is None else _summed(self.overlapped.network, atoms)
        if recompute in PARTLY:
            again = CoreSeconds(*(float(of[atoms].sum()) for of in self.again[recompute]))
            kernels, host, network = with_cores(kernels, host, network, again)
        taken = PassSeconds(*map(float, passes(kernels, host, self.start, network, split=split)))
        return in_one_part(taken) if recompute.by_layer else taken

    def not_accumulated(self, inside: Sequence[int], taken: PassSeconds[float], *, split: bool) -> float:
        """What the backward of a stage takes less that adds its gradients to none. `taken`: the stage's passes."""
        seconds = np.asarray(self.accumulation)
        own = float(seconds[list(inside)].sum()) if seconds.ndim else 0.0
        return min(own, taken.weight if split else taken.backward)

    def network(self, inside: Sequence[int]) -> PassSeconds[float]:
        """Of all collectives in the passes of a stage, where some run behind kernels."""
        return _NO_NETWORK if self.overlapped is None else _summed(self.overlapped.network, inside)

    def hidden(self, inside: Sequence[int], *, split: bool = False, recompute: Recompute = Recompute.NONE) -> float:
        """What a micro-batch of a stage would take longer if no collective ran behind kernels, with what it runs
        again."""
        times, own = self.running(recompute), self.overlapped
        if own is None:
            return 0.0
        lost = 1 - CONTENTION
        exposed = PassSeconds(*(k + lost * h for k, h in zip(times.kernels, own.hidden, strict=True)))
        again = {
            mode: of._replace(kernels=of.kernels + lost * own.hidden_again[mode]) for mode, of in times.again.items()
        }
        alone = times._replace(kernels=exposed, again=again, overlapped=None)

        def total(of: AtomTimes) -> float:
            taken = of.stage(inside, split=split, recompute=recompute)
            return taken.forward * (2 if recompute == Recompute.STAGE else 1) + taken.backward

        return max(0.0, total(alone) - total(times))

    def behind(self, inside: Sequence[int]) -> Behind[float]:
        """Of the collectives inside of a stage's mesh."""
        if self.overlapped is None:
            return Behind(0.0, 0.0, 0.0)
        atoms, own = list(inside), self.overlapped
        return Behind(float(own.gradients[atoms].sum()), float(own.parameters[atoms].sum()), own.bucket)


_NO_NETWORK = PassSeconds(0.0, 0.0, 0.0)


def atom_times(costs: CostGraph, atoms: Atoms, name: str, workers: int, rows: float) -> AtomTimes:
    """Seconds at a micro-batch of `rows` samples; the loss counts to the last atom.

    `name`: a device kind, or a stage configuration. `workers`: devices that are busy at the same time.
    """
    table = costs.table(name, workers)
    nothing, shares = np.zeros(len(table.nodes)), atoms.weight_shares(costs, table.nodes)
    if table.weight is not None:  # what is not divided is not launched apart, either
        shares = shares * (table.weight > 0)

    def sums(
        forward: np.ndarray,
        backward: np.ndarray,
        loss: tuple[float, float] = (0.0, 0.0),
        weight: np.ndarray | None = None,
    ) -> PassSeconds[np.ndarray]:
        if weight is None:
            weight = backward * shares
        f, b, w = (atoms.sums(table.nodes, times) for times in (forward, backward, weight))
        f[-1] += loss[0]
        b[-1] += loss[1]
        return PassSeconds(f, b, w)

    host = table.host
    launches = sums(nothing, nothing) if host is None else sums(host.forward, host.backward, host.loss)
    once = nothing if table.once is None else table.once
    run_again = {mode: atoms.run_again(costs, table.nodes, mode) for mode in PARTLY}
    overlapped = None
    if table.overlapped is not None:
        own = table.overlapped
        networks = sums(*own.network, weight=nothing)  # see `lower.split_backward`
        gradients, parameters = (atoms.sums(table.nodes, times) for times in (own.gradients, own.parameters))
        hidden = own.hidden[0] - (0.0 if table.gathering is None else table.gathering.hidden)
        hidden_again = {mode: atoms.sums(table.nodes, hidden * inside) for mode, inside in run_again.items()}
        overlapped = OverlappedAtoms(networks, sums(*own.hidden), hidden_again, gradients, parameters, own.bucket)
    start = 0.0 if host is None else host.start
    forward, backward, loss = table.at(rows)
    if host is not None and not costs.overlap.launches:
        forward, backward = _serial(costs, atoms, table, host, forward, backward)
    network = nothing if table.overlapped is None else table.overlapped.network[0]
    launched = nothing if host is None else host.forward
    once_more = [forward, launched, network]
    if table.gathering is not None:
        once_more = [seconds - less for seconds, less in zip(once_more, table.gathering[:3], strict=True)]
    again = {
        mode: CoreSeconds(*(atoms.sums(table.nodes, seconds * inside) for seconds in once_more))
        for mode, inside in run_again.items()
    }
    kernels = sums(forward, backward, loss, table.weight)
    # Where launches have prices, these are of other systems, too. In one process a thread does all shards of a mesh.
    splits = host is None and (table.weight is None or table.weight.any())
    shards = costs.configuration[name].width if name in costs.configuration and costs.ranks is None else 1
    each = costs.python.splitting * shards
    splitting = atoms.sums(table.nodes, np.where(backward > 0, each, 0.0)) if splits else 0.0
    times = AtomTimes(kernels, launches, start, atoms.sums(table.nodes, once), again, overlapped, splitting)
    if table.accumulation is not None:
        times = times._replace(accumulation=atoms.sums(table.nodes, table.accumulation))
    ratio = costs.compiled.get(name)
    if ratio is None:
        return times
    # A compiled backward is one autograd node, which computes the gradients of inputs and parameters together: no part
    # of it can be delayed.
    factor = ratio.at(rows)
    whole = sums(*costs.table(name, 1).at(rows)) if ratio.of_one else kernels
    compiled = PassSeconds(factor * whole.forward, factor * whole.backward, 0 * kernels.weight)
    return times._replace(kernels=compiled, captured=kernels, left_alone=ratio.left_alone)


def _serial(
    costs: CostGraph, atoms: Atoms, table: CostTable, host: HostTimes, forward: np.ndarray, backward: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[nodes] s of both passes where the host launches nothing ahead of a layer: with what the device waits for it."""
    run = {name for names in atoms.nodes for name in names}  # others do not run in every pass
    inside = np.array([name in run for name in table.nodes], dtype=bool)
    there, back = (0 * forward, 0 * backward) if table.collectives is None else table.collectives
    layers = [costs.operators[name].block for name in table.nodes]
    changes = np.array([a != b for a, b in itertools.pairwise(layers)], dtype=bool)
    ahead, behind = np.concatenate([[True], changes]), np.concatenate([[True], changes[::-1]])
    return (
        forward + waits(inside * (forward - there), inside * host.forward, ahead),
        backward + waits((inside * (backward - back))[::-1], (inside * host.backward)[::-1], behind)[::-1],
    )


def _summed(times: PassSeconds[np.ndarray], inside: Sequence[int] | np.ndarray) -> PassSeconds[float]:
    atoms = np.asarray(inside)
    return PassSeconds(*(float(t[atoms].sum()) for t in times))
