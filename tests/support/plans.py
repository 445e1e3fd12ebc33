"""Random valid plans, as hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar import Plan
from autopar.plan.stage import RunnerUp, SizeRatios, Stage, StageTransfer

paths = st.from_regex(r"[a-z_][a-z0-9_]{0,6}(\.[a-z0-9_]{1,6}){0,3}", fullmatch=True)
operators = st.builds(
    lambda path, name, k: f"{path}/{name}#{k}",
    paths | st.just(""),
    st.sampled_from(["linear", "relu_", "_unsafe_view"]),
    st.integers(0, 9),
)
seconds = st.none() | st.floats(0, 1e6)
nbytes = st.none() | st.integers(0, 1 << 50)
ratios = st.none() | st.builds(SizeRatios, *[st.floats(0, 1)] * 4)
texts = st.text(max_size=20)


@st.composite
def hand_plans(draw: st.DrawFn) -> Plan:
    """Splits of modules, as `Plan.from_split` makes them."""
    names = draw(st.lists(paths, min_size=1, max_size=8, unique=True))
    n_stages = draw(st.integers(1, len(names)))
    numbers = [*range(n_stages), *(draw(st.integers(0, n_stages - 1)) for _ in names[n_stages:])]
    devices = None
    if draw(st.booleans()):
        free = iter(range(1000))
        devices = [[f"cpu:{next(free)}" for _ in range(draw(st.integers(1, 3)))] for _ in range(n_stages)]
    return Plan.from_split(
        dict(zip(names, numbers, strict=True)),
        n_microbatches=draw(st.integers(1, 64)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        devices=devices,
        recompute=draw(st.sets(st.integers(0, n_stages - 1))),
    )


@st.composite
def searched_plans(draw: st.DrawFn) -> Plan:
    """Plans by operators, with or without each of their numbers."""
    ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    replicas = draw(st.integers(1, 2))
    devices = tuple(f"cuda:{i}" for i in range(ranks * replicas + draw(st.integers(0, 1))))
    n = ranks * chunks
    keys = draw(st.lists(operators, min_size=n, max_size=n + 8, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, len(keys) - 1), min_size=n - 1, max_size=n - 1))) if n > 1 else []
    held = [tuple(keys[a:b]) for a, b in zip([0, *cuts], [*cuts, len(keys)], strict=True)]
    stages = tuple(
        Stage(
            devices[s % ranks * replicas : (s % ranks + 1) * replicas],
            held[s],
            forward_time=draw(seconds),
            weight_time=draw(seconds),
            parameter_bytes=draw(nbytes),
            peak_memory=draw(nbytes),
            recompute=draw(st.booleans()),
            size_ratios=draw(ratios),
        )
        for s in range(n)
    )
    return Plan(
        stages,
        n_microbatches=(m := draw(st.integers(1, 9))),
        schedule="interleaved-1f1b" if chunks > 1 else draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        batch_size=draw(st.none() | st.integers(m, 99)),
        devices=devices,
        training=draw(st.booleans()),
        predicted_step_time=draw(seconds),
        bubble=draw(st.none() | st.floats(0, 1)),
        transfers=tuple(
            StageTransfer(i, i + 1, draw(st.integers(0, 9)), 0, draw(st.floats(0, 1))) for i in range(n - 1)
        ),
        notes=tuple(draw(st.lists(texts, max_size=2))),
        objective=draw(seconds),
        bound=draw(seconds),
        optimality=draw(texts),
        runners_up=tuple(RunnerUp(draw(texts), draw(st.floats(0, 1))) for _ in range(draw(st.integers(0, 2)))),
        measured_step_time=draw(seconds),
        barrier=draw(st.booleans()),
        model=draw(st.none() | texts),
        device_kinds=draw(st.just(()) | st.just(("NVIDIA H200",) * len(devices))),
    )


plans = hand_plans() | searched_plans()
