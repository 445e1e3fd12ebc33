"""How fast the machine is now, compared with the measurements that predictions are made from.

Operators were measured some time ago, perhaps while other programs ran, and a cloud's processors change their speed. A
step of the whole model, measured now, over the prediction of the same step says by how much. Replicas of the whole
model do the same work at the same moments, and compete for memory more than operators did when they were measured on
all devices at once. So they have a factor of their own, by the number of busy devices. Stages of a pipeline do
different work at any moment; they take the factor of one device:

    measured / predicted     1 busy device    110 ms / 100 ms = 1.10     the plain model
                             2 busy devices    72 ms /  60 ms = 1.20     one stage with two replicas
    3 replicas               predicted 50 ms, expected now 50 ms x 1.20 = 60 ms, by the most similar number
    a pipeline on 2          predicted 64 ms, expected now 64 ms x 1.10 = 70 ms

A plan that ran itself has a factor of its own: no other plan tells as much about it.

Over five runs of `python -m benchmarks run accuracy` on two processors, the 60 steps of pipelines were off by 3.9 % in
the median this way (95th percentile 11.6 %), and by 5.0 % (14.6 %) with the factor of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from autopar.plan.plan import Plan
from autopar.plan.scaling import scaled


@dataclass(frozen=True)
class PresentSpeed:
    """Measured over predicted seconds of steps."""

    factors: Mapping[tuple[str, int], float] = field(hash=False)  # by device kind and number of busy devices
    steps: int  # behind each factor, at least

    @classmethod
    def of(cls, measured: Iterable[tuple[Plan, Sequence[float]]]) -> PresentSpeed:
        """From plans with predictions and the seconds of their steps; those that run the whole model give factors.

        Of several with as many busy devices the one with the fewest micro-batches counts: the plain model, if it ran.
        """
        chosen: dict[tuple[str, int], tuple[Plan, Sequence[float]]] = {}
        for plan, seconds in sorted(measured, key=lambda pair: pair[0].n_microbatches):
            if runs_whole_model(plan) and seconds:
                chosen.setdefault((_kinds(plan)[0], _busy(plan)), (plan, seconds))
        factors = {key: median(seconds) / (plan.predicted_step_time or 1.0) for key, (plan, seconds) in chosen.items()}
        return cls(factors, min((len(seconds) for _, seconds in chosen.values()), default=0))

    def factor(self, plan: Plan) -> float | None:
        """By which the predictions of a plan that did not run are multiplied; None if a kind of its devices was not
        measured."""
        busy = _busy(plan) if runs_whole_model(plan) else 1
        known = [self._factor(kind, busy) for kind in _kinds(plan)]
        if not known or plan.predicted_step_time is None:
            return None
        return None if None in known else fmean(factor for factor in known if factor is not None)

    def applied(self, plan: Plan, own: Sequence[float] = ()) -> Plan:
        """The plan with predictions for the machine as it is now; the plan itself if a factor is not known.

        `own`: seconds of steps of this plan."""
        factor = median(own) / plan.predicted_step_time if own and plan.predicted_step_time else self.factor(plan)
        if factor is None:
            return plan
        single = self._factor(plan.device_kinds[0], 1) if plan.device_kinds else None
        of = "this plan" if own else "the whole model"
        return scaled(plan, factor, len(own) or self.steps, of, single=single)

    def _factor(self, kind: str, busy: int) -> float | None:
        """Of the most similar number of busy devices."""
        known = [number for of_kind, number in self.factors if of_kind == kind]
        nearest = min(known, key=lambda number: (abs(number - busy), number), default=None)
        return None if nearest is None else self.factors[kind, nearest]


def runs_whole_model(plan: Plan) -> bool:
    """Whether every micro-batch passes the whole model on one device, and the plan has a prediction."""
    (stage, *others) = plan.stages
    alone = not others and stage.sharding is None and not (stage.recompute or stage.layerwise)
    return alone and bool(plan.predicted_step_time) and len(set(_kinds(plan))) == 1


def _kinds(plan: Plan) -> list[str]:
    """Of each device that the plan uses; empty where it does not know them."""
    kinds = dict(zip(plan.devices, plan.device_kinds, strict=False))
    used = list(plan.used_devices)
    return [kinds[name] for name in used] if all(name in kinds for name in used) else []


def _busy(plan: Plan) -> int:
    """Devices, or meshes, that compute at the same time: a single micro-batch is on one after the other."""
    n = sum(stage.replicas for stage in plan.first_stages)
    return min(n, plan.n_microbatches) if len(plan.stages) == 1 else n if plan.n_microbatches > 1 else 1
