"""Plans with degrees, as `Plan.by_hand` lays them out, without a model and its capture; random degrees."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar import Plan
from autopar.plan.degrees import Degrees
from autopar.plan.recompute import RECOMPUTE, Recompute
from autopar.plan.stage import Stage
from autopar.sharding.layouts import PARTIAL, REPLICATE
from autopar.sharding.stage_sharding import Passage, StageSharding, Stored, TensorRedistribution
from autopar.sharding.strategies import OperatorPlacements


def plan_with(degrees: Degrees, n_layers: int, *, cut_inside: bool = False) -> Plan:
    """A plan of `layers.0` .. with a product and a norm each; `cut_inside`: the norm of layer 0 in the last stage."""
    n_stages = degrees.n_stages
    operators: list[list[str]] = [[] for _ in range(n_stages)]
    operators[0].append("embed/embedding#0")
    for layer in range(n_layers):
        home = layer * n_stages // n_layers
        operators[home] += [f"layers.{layer}.up/linear#0", f"layers.{layer}.down/linear#0"]
        operators[-1 if cut_inside and layer == 0 else home].append(f"layers.{layer}.norm/layer_norm#0")
    operators[-1].append("head/linear#0")
    names = [f"cuda:{i}" for i in range(degrees.tensor * degrees.pipeline * degrees.data)]
    mode = RECOMPUTE[degrees.recompute]
    stages = tuple(
        Stage(
            tuple(names[i] for i in degrees.devices(degrees.rank_of[stage])),
            tuple(keys),
            recompute=mode is Recompute.STAGE,
            selective=mode is Recompute.SELECTIVE,
            layerwise=mode.by_layer,
            keeps_products=mode is Recompute.OPERATORS,
            sharding=sharding_with(degrees, keys) if degrees.mesh else None,
        )
        for stage, keys in enumerate(operators)
    )
    return Plan(stages, degrees.n_microbatches, degrees.schedule, degrees.batch, tuple(names))


def sharding_with(degrees: Degrees, keys: list[str]) -> StageSharding:
    """Columns, rows and samples of the products in `keys`, and the sums behind rows."""
    data, tensor = degrees.data > 1, degrees.tensor > 1

    def placed(along_data: int, along_tensor: int) -> tuple[int, ...]:
        return (*([along_data] if data else []), *([along_tensor] if tensor else []))

    whole, rows = placed(0, REPLICATE), placed(0, PARTIAL)
    strategies, parameters, moves = [], [], []
    for key in keys:
        path = key.rpartition("/")[0]
        if "norm" in path:
            part = placed(0, 1 if degrees.sequence_parallel else REPLICATE)
            strategies.append((key, OperatorPlacements((part,), (part,))))
            continue
        column = path.endswith("up")
        into = OperatorPlacements((whole if column else placed(0, 2),), (placed(0, 2) if column else rows,))
        strategies.append((key, into))
        cut = 0 if column else 1
        zero = degrees.zero if data else 0
        parameters.append(
            (
                f"{path}.weight",
                Stored(
                    placed(1 - cut if zero == 3 else REPLICATE, cut),
                    placed(1 - cut if zero else REPLICATE, cut),
                    scattered=zero == 2,
                ),
            )
        )
        if zero == 3:
            read, stored = placed(REPLICATE, cut), placed(1 - cut, cut)
            back = Passage((stored, read), (placed(PARTIAL, cut), stored))
            moves.append(TensorRedistribution(f"{path}.weight", key, Passage((stored,), (stored,)), back))
        if tensor and not column:
            summed = placed(0, 1 if degrees.sequence_parallel else REPLICATE)
            own = Passage((rows, summed), (summed,))
            moves.append(TensorRedistribution(key, "next/add#0", Passage((rows,), (summed,)), own))
    return StageSharding(degrees.mesh, degrees.axes, tuple(strategies), tuple(parameters), tuple(moves))


@st.composite
def degrees(draw: st.DrawFn) -> Degrees:
    """Degrees that do not contradict each other."""
    tensor, pipeline, data = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    chunks = draw(st.integers(1, 3)) if pipeline > 1 else 1
    schedules = ["interleaved-1f1b"] if chunks > 1 else ["gpipe", "1f1b", "zb-h1"]
    micro_batch, m = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    return Degrees(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch=micro_batch,
        schedule=draw(st.sampled_from(schedules)),
        chunks=chunks,
        zero=draw(st.integers(0, 3)) if data > 1 else 0,
        recompute=draw(st.sampled_from(list(RECOMPUTE))),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        batch=data * micro_batch * m,
    )
