"""The public calls `autopar.compare` and `autopar.accuracy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from autopar.analysis.example import LossFunction, capture_example, example_ahead
from autopar.costs.history import recall
from autopar.costs.prediction_error import Accuracy
from autopar.errors import InputError, each_warning_once
from autopar.errors.names import with_checked_names
from autopar.options import CompareKeywords, PlanOptions
from autopar.plan.plan import Plan
from autopar.planner.cluster_comparison import ClusterComparison, compare_ahead
from autopar.report.progress import progress_bar
from autopar.runtime.arguments import (
    Devices,
    check_loss_and_target,
    check_module,
    devices_at_hand,
    need_example,
    refuse_estimated,
)
from autopar.runtime.comparing.compare import compare_at_hand
from autopar.runtime.comparing.comparison import SINGLE, Comparison
from autopar.runtime.other_systems.catalogue import check_systems
from cost_models import Cluster


@with_checked_names
def compare(
    model: nn.Module,
    devices: Devices = None,
    plans: Mapping[str, Plan | None] | None = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    repeats: int = 7,
    systems: Sequence[str] = (),
    **options: Unpack[CompareKeywords],
) -> Comparison | ClusterComparison:
    """Measure step times and peak memory of `plans` beside their predictions and the plain model on the first device.

    On a cluster that is not at hand nothing is measured: the result is a `ClusterComparison` of predicted steps,
    throughput, model FLOPs utilisation, memory, bubbles and communication.

    With `loss_fn` and `target`, a step is a `train_step`. Without, it is a call and a backward from the output's
    `.loss`, or else from the means of the outputs. For a model in eval mode without `loss_fn`, a step is a forward.
    Steps alternate between the plans (A B C A B C ...) on copies of the model: parameters, gradients, running
    statistics and the random state stay unchanged.

    Args:
        plans: by name; None for the plan that autopar chooses under the options. Default: {"auto": None}.
        repeats: number of measured steps per plan. Six or more allow intervals of 95 %.
        systems: other systems that take turns with the plans, by name. "plain": the model itself with all threads that
            torch has; "ceiling": a process for each device, each with its part of the batch, that exchange nothing, to
            show what the machine gives at most; "DataParallel" (GPUs), "DDP"; for an nn.Sequential "torchgpipe",
            "pipelining" (torch.distributed.pipelining under 1F1B) and "pipelining:SCHEDULE" for each of its schedules.
            They pipeline `n_microbatches`, or two for each device. One that cannot run the step has a row that says
            why. Processes load the model and `loss_fn` by pickle: define these at the top level of a module, and call
            `compare` under `if __name__ == "__main__":`.
        options: `n_microbatches`, `schedule`, `max_replicas`, `max_shards`, `memory_limit`, `batch_norm`, `batch_dim`,
            `strict` and `cache`; on a cluster that is not at hand also `launch`, `precision`, `optimizer_step` and
            `overlap` (see `plan`).

    The other arguments and the errors are those of `parallelize`. Measured plans hold no optimizer state; on a cluster
    that is not at hand they hold Adam's.
    """
    check_module(model)
    chosen = PlanOptions(**options)
    args, kwargs = need_example("comparing", example_args, example_kwargs)
    check_loss_and_target(loss_fn, target)
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise InputError(f"repeats must be a whole number of at least 1, got {repeats!r}")
    systems = check_systems(systems)
    plans = _checked(plans, systems)
    if isinstance(devices, Cluster) and not devices.at_hand:
        if systems:
            raise InputError(f"systems: {devices.title} is not at hand, so no other system can run on it")
        batch_dim, strict = chosen.batch_dim, chosen.strict
        example = example_ahead(model, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict)
        with progress_bar() as progress:
            return compare_ahead(example, devices, plans, chosen, progress)
    refuse_estimated(options)
    parsed = devices_at_hand(model, devices)
    batch_dim, strict = chosen.batch_dim, chosen.strict
    # Every plan runs on a copy of the model, which would warn again.
    with progress_bar() as progress, each_warning_once(set()):
        example = capture_example(
            model, parsed, args, kwargs, loss_fn=loss_fn, target=target, batch_dim=batch_dim, strict=strict
        )
        return compare_at_hand(example, parsed, plans, chosen, repeats, progress, systems)


def _checked(plans: Mapping[str, Plan | None] | None, systems: Sequence[str]) -> dict[str, Plan | None]:
    """The plans to compare, by name. Raises InputError that names what is wrong."""
    if plans is None:
        return {"auto": None}
    if not isinstance(plans, Mapping):
        raise InputError(f"plans must be a dict of names and plans, got {type(plans).__name__}; give {{'mine': plan}}")
    if not plans and not systems:
        raise InputError('plans: there is nothing to compare; give {"auto": None} for the plan of the search')
    wrong = [text for name, plan in plans.items() for text in _wrong(name, plan, systems)]
    if wrong:
        raise InputError(f"plans: {'; '.join(wrong)}")
    return dict(plans)


def _wrong(name: Any, plan: Any, systems: Sequence[str]) -> Iterator[str]:
    """What is wrong with a plan to compare, and with its name."""
    if not (isinstance(name, str) and name):
        yield f"names must be texts, got {name!r}"
    elif name in (SINGLE, *systems):
        yield f"{name!r} is the name of another row, give the plan another name"
    if not (plan is None or isinstance(plan, Plan)):
        hint = " (Plan.load reads a file)" if isinstance(plan, (str, Path)) else ""
        yield f"{name!r} must be a Plan, or None for a search, got {type(plan).__name__}{hint}"


@with_checked_names
def accuracy(since: datetime | None = None, kind: str | None = None) -> Accuracy:
    """Return how far predicted step times were from measured ones, from the history beside the cache of measurements.

    Every `compare`, every tuned plan and every `train_step(..., profile=True)` adds to the history, unless it was
    called with `cache=False`.

    Args:
        since: only steps measured from then on; local time where it has no time zone.
        kind: only plans on device types whose name contains this text, such as "H200".
    """
    return Accuracy.of(recall(), since=since, kind=kind)
