"""Plans made by hand: from a split of the modules, or from degrees; `Plan` has these methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.errors.names import with_checked_names
from autopar.plan.display import by_hand
from autopar.plan.placeholders import ordinal
from autopar.plan.recompute import recompute_by_stage
from autopar.plan.stage import Stage
from autopar.schedule.builders import V_SHAPED, ranks_of_stages

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

BY_HAND = "by hand: "  # begins the note that has the degrees of a plan made by hand
_MOST_NAMED = 4  # stages in a message


class PlanByHand:
    """What makes a plan without a search."""

    @classmethod
    @with_checked_names
    def from_split(
        cls,
        split: Mapping[str, int],
        *,
        n_microbatches: int,
        schedule: str = "1f1b",
        devices: Sequence[Sequence[str] | str] | None = None,
        recompute: str | Collection[int] | Mapping[int, str] = (),
        selective: Collection[int] = (),
    ) -> Plan:
        """A plan made by hand: `split` puts modules (by path, as in `named_modules()`) on stages.

        The most specific path counts. A module that is not named runs on the latest stage that its inputs come from.

        Args:
            devices: for each stage its device, or the devices of its replicas. Default: stage s on the s-th device
                offered (CPU workers are called `"cpu:0"`, `"cpu:1"` ...); under interleaved schedules the stages go
                round the devices offered, under zb-v along half as many devices as stages and back.
            recompute: the stages that keep only their inputs and run their whole forwards again; or what stages do, as
                `by_hand` calls it: "full" for all, {0: "full", 1: "stage", 2: "selective"} by stage.
            selective: the stages that recompute the cores of their attentions alone.

        Raises:
            PlanError: stages that are not numbered 0, 1, 2 .., and other arguments that cannot be.
        """
        n_stages = _stages_in(split)
        if devices is None:
            names: list[tuple[str, ...]] = [(ordinal(rank),) for rank in _ranks_in_order(schedule, n_stages)]
        else:
            names = _devices_by_stage(devices, n_stages)
        if isinstance(selective, str) or not isinstance(selective, Collection):
            raise PlanError(f"selective must list stages, as in [0, 1], got {selective!r}")
        unknown = ", ".join(repr(stage) for stage in selective if stage not in range(n_stages))
        if unknown:
            raise PlanError(f"selective names {unknown}, but there are stages 0..{n_stages - 1}")
        if not isinstance(recompute, (str, Mapping)) and isinstance(recompute, Collection):
            recompute = dict.fromkeys(recompute, "stage")
        modes = recompute_by_stage(recompute, n_stages)
        stages = tuple(
            Stage(
                d,
                recompute=modes.get(s) == "stage",
                selective=s in selective or modes.get(s) == "selective",
                layerwise=modes.get(s) in ("full", "selective-op"),
                keeps_products=modes.get(s) == "selective-op",
            )
            for s, d in enumerate(names)
        )
        return cast("type[Plan]", cls)(stages, n_microbatches, schedule, split=tuple(split.items()))

    @classmethod
    @with_checked_names
    def by_hand(
        cls,
        model: nn.Module,
        devices: Any,
        *,
        example_args: tuple[Any, ...] | None = None,
        example_kwargs: dict[str, Any] | None = None,
        target: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        data: int | None = None,
        micro_batch: int | None = None,
        schedule: str | None = None,
        chunks: int | None = None,
        zero: int = 0,
        recompute: str = "none",
        sequence_parallel: bool = False,
        optimizer: str = "adamw",
        batch_dim: int | dict[str, int | None] | None = None,
        launch: str | None = None,
        precision: str | None = None,
        optimizer_step: str | None = None,
        overlap: str | None = None,
    ) -> Plan:
        """The plan with these degrees, as they are written for Megatron-LM, torchtitan or DeepSpeed, and its price.

        The layers of the model make stages of as many layers each. A stage has a mesh of `data` x `tensor` devices,
        and every micro-batch of the plan is `micro_batch` samples of each replica. Strategies of operators follow the
        degrees; where several do, they are the fastest.

        Args:
            devices: a cluster, or the devices at hand (None under torchrun: the ranks); all of them are used. On
                workers of a CPU, the strategies are those for as many H100, and nothing is predicted: workers of one
                process run their shards one after another.
            example_args, example_kwargs, target, loss_fn: a call with the samples of a whole step, as for
                `autopar.plan`.
            tensor: devices that cut every matrix by columns or rows.
            pipeline: devices that a micro-batch passes one after another.
            data: replicas. Default: what the devices leave.
            micro_batch: samples of each replica in a micro-batch. Default: 1 in a pipeline, otherwise all.
            schedule: "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb" or "zb-v". Default: 1f1b; with
                several chunks interleaved-1f1b.
            chunks: stages of each device. Default: 1; under zb-v 2.
            zero: what is cut over replicas: 0 nothing, 1 the optimizer's state, 2 gradients as well, which are reduced
                for every micro-batch, 3 parameters as well. The gradient of tied parameters is cut only with 3. Prices
                are those of devices that each step their part. One process at hand has one optimizer and adds up the
                gradients of its devices after the last backward, whatever `zero` says of states and gradients.
            recompute: "none"; "full": every layer keeps only its inputs, and runs again right before its backward
                (Megatron-LM: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1;
                torchtitan: full activation checkpointing); what lies outside of layers is kept. Of a model
                without equal layers in a row, it is "stage". "stage": stages keep only their inputs and run their
                forwards again. "selective": stages keep all but what attention makes between its products, scores,
                softmax and dropout, and run that with both products again. It is found by dataflow. Of an attention in
                one operator, such as scaled_dot_product_attention, nothing is kept but its operands and its result.
                "selective-op": as "full", but layers also keep what every second product with a parameter and every
                attention in one operator make, and do not make that again (torchtitan: selective activation
                checkpointing by operator). The search does not try it.
            sequence_parallel: normalizations, dropouts and sums work on parts of the tensors as well. What matrices
                then read gathered is kept as parts, and gathered again in the backward, as in Megatron-LM.
            optimizer: whose state must fit the memory, and whose step ends the predicted one.
            batch_dim: as for `autopar.plan`.
            launch, precision, optimizer_step, overlap: as for `autopar.plan` on a cluster.

        Raises:
            PlanError: degrees that contradict each other, the devices or the model. All are listed, with the nearest
                degrees that are right, if there are any.
        """
        degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "data": data, "micro_batch": micro_batch}
        degrees |= {"schedule": schedule, "chunks": chunks, "zero": zero, "recompute": recompute}
        degrees |= {"sequence_parallel": sequence_parallel}
        plan: Plan = by_hand(
            model,
            devices,
            degrees,
            example_args=example_args,
            example_kwargs=example_kwargs,
            target=target,
            loss_fn=loss_fn,
            optimizer=optimizer,
            batch_dim=batch_dim,
            launch=launch,
            precision=precision,
            optimizer_step=optimizer_step,
            overlap=overlap,
        )
        return plan


def _ranks_in_order(schedule: str, n_stages: int) -> Sequence[int]:
    """The place of each stage on devices in their order: its own, but under a schedule that comes back."""
    if schedule not in V_SHAPED or n_stages == 1:
        return range(n_stages)
    if n_stages % 2:
        raise PlanError(f"under {schedule} every device has two stages, and {n_stages} are no multiple of two")
    return ranks_of_stages(schedule, n_stages // 2, 2)


def _stages_in(split: Mapping[str, int]) -> int:
    """Number of stages of a split. Raises PlanError for a value that is no split."""
    if not isinstance(split, Mapping):
        raise PlanError(f"split must be a mapping from module paths to stages, as in {{'encoder': 0}}, got {split!r}")
    if not split:
        raise PlanError("split is empty; give at least one module path and its stage")
    wrong = {path: stage for path, stage in split.items() if type(stage) is not int or stage < 0}
    if wrong:
        raise PlanError(f"stages are numbered from 0, got {wrong}")
    unnamed = [path for path in split if not isinstance(path, str)]
    if unnamed:
        raise PlanError(f"split has paths of modules, as in named_modules(), got {unnamed}")
    n_stages = max(split.values()) + 1
    if n_stages > len(split):  # so some have no module, perhaps many
        used = set(split.values())
        empty = itertools.islice((str(stage) for stage in range(n_stages) if stage not in used), _MOST_NAMED)
        raise PlanError(f"no module is put on stage {', '.join(empty)}; number the stages 0, 1, 2, ...")
    return n_stages


def _devices_by_stage(devices: Sequence[Sequence[str] | str], n_stages: int) -> list[tuple[str, ...]]:
    """The names of each stage's devices. Raises PlanError."""
    example = "one entry for each stage, its device or a list of them: ['cuda:0', ['cuda:1', 'cuda:2']]"
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise PlanError(f"devices must have {example}, got {devices!r}")
    if len(devices) != n_stages:
        raise PlanError(f"the split has {n_stages} stages, but devices names {len(devices)}; give {example}")
    found = []
    for stage, named in enumerate(devices):
        names = tuple(named) if isinstance(named, (list, tuple)) else (named,)
        wrong = [name for name in names if not isinstance(name, (str, torch.device))]
        if wrong:
            raise PlanError(f"devices of stage {stage} must be names such as 'cuda:0', got {wrong[0]!r}")
        found.append(tuple(map(str, names)))
    return found
