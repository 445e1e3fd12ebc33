"""Training of GPT-3, Llama 3 405B and a mixture of experts on 64 to 16,384 H100: planned and simulated.

The batch of a step stays the same, so that more devices have less to do each. Every case is planned in a process of its
own, as many at once as there are cores, and kept as soon as it is done; a run that is interrupted goes on with the
cases that are not there.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from textwrap import shorten
from typing import Any

import autopar
from autopar import AutoparError, ClusterComparison, Plan
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from benchmarks.scale_models import MODELS, QUICK, Training
from cost_models.hardware.devices import usable_cores

log = logging.getLogger(__name__)

COUNTS = (64, 256, 1024, 4096, 16384)
QUICK_COUNTS = (2, 4)
SEARCHED, BY_HAND = "searched", "by hand"
_PER_NODE = 8
_HOW: dict[str, Any] = {"precision": "bf16-mixed", "launch": "compiled", "optimizer_step": "fused", "overlap": "all"}
TRILLION = 1e12  # tokens, for the cost of a training run


def run_scale(quick: bool, kept: Kept, at_once: int | None = None) -> Report:
    """`at_once`: cases that are planned at the same time; default: one a core."""
    cases = _cases(quick)
    _plan_missing([case for case in cases if kept.get(*case) is None], kept, at_once or usable_cores())
    found = [kept.get(*case) for case in cases]
    models = {**MODELS, **QUICK}
    tables = [
        _table(models[name].title, [row for row in found if row["model"] == name])
        for name in dict.fromkeys(row["model"] for row in found)
    ]
    return Report("Training at scale, simulated", tuple(tables), {"cases": found}, lambda path: draw(found, path))


def _cases(quick: bool) -> list[tuple[str, int, str]]:
    """Model, devices and plan, those of few devices first."""
    models = QUICK if quick else MODELS
    return [
        (name, devices, plan)
        for devices in (QUICK_COUNTS if quick else COUNTS)
        for name, training in models.items()
        for plan in (SEARCHED, *((BY_HAND,) if training.by_hand else ()))
    ]


def _plan_missing(cases: list[tuple[str, int, str]], kept: Kept, at_once: int) -> None:
    """Plan the cases, and keep each as soon as it is done. Raises what one of them raises."""
    running: dict[Future[dict[str, Any]], tuple[str, int, str]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        while cases or running:
            while cases and len(running) < at_once:
                case = cases.pop(0)
                running[pool.submit(_in_its_own_process, *case)] = case
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                kept.put(*running.pop(done), value=done.result())


def _in_its_own_process(model: str, devices: int, plan: str) -> dict[str, Any]:
    """The row of a case. Raises RuntimeError with its output where the process fails."""
    log.info("%s on %d devices, %s", model, devices, plan)
    code = f"from benchmarks.scale import print_case; print_case({model!r}, {devices}, {plan!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{model} on {devices} devices, {plan}: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def print_case(model: str, devices: int, plan: str) -> None:
    """Plan a case, and print its row as JSON."""
    row: dict[str, Any] = {"model": model, "devices": devices, "plan": plan}
    try:
        row |= planned({**MODELS, **QUICK}[model], devices, plan)
    except AutoparError as error:
        row["refused"] = " ".join(str(error).split())
    used = resource.getrusage(resource.RUSAGE_SELF)
    row["planning"] = used.ru_utime + used.ru_stime
    row["peak_gb"] = used.ru_maxrss * 1024 / 1e9
    print(json.dumps(row))


def planned(training: Training, devices: int, how: str) -> dict[str, Any]:
    """What a step takes: s, bytes and fractions. Raises AutoparError where no plan fits."""
    nodes = max(1, devices // _PER_NODE)
    cluster = autopar.Cluster.preset(f"{min(devices, _PER_NODE)}xH100", nodes=nodes)
    model, inputs = training.sizes.build().train(), training.inputs()
    plan = None
    if how == BY_HAND:
        degrees = training.degrees(devices)
        plan = Plan.by_hand(model, cluster, example_args=inputs, optimizer="adamw", **degrees, **_HOW)
    compared = autopar.compare(model, cluster, {how: plan}, example_args=inputs, **_HOW)
    assert isinstance(compared, ClusterComparison), "the cluster is not at hand"
    row = compared[how]
    tokens = training.batch * training.sizes.seq
    return {
        "step": row.seconds,
        "bubble": row.bubble,
        "memory": row.memory,
        "fits": row.fits,
        "communication": row.communication,
        "utilisation": row.utilisation,
        "device_hours": row.seconds * devices / 3600 * TRILLION / tokens,
        "used": len(row.plan.used_devices),
        "stages": len(row.plan.stages),
        "shards": max(stage.shards for stage in row.plan.stages),
        "replicas": max(stage.replicas for stage in row.plan.stages),
        "n_microbatches": row.plan.n_microbatches,
        "schedule": row.plan.schedule,
    }


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    return Table(
        title,
        ("devices", "plan", "step s", "bubble", "communication", "memory GB", "MFU", "device-hours", "planning CPU s"),
        tuple(_line(row) for row in rows),
        "Plans: stages x shards x replicas of the largest stage. Communication: exposed, as a fraction of the step. "
        "Model FLOPs utilisation counts all devices. Device-hours: for 1 trillion tokens. Data sheets of H100 and "
        "InfiniBand; bf16 with float32 master weights, AdamW, compiled stages, overlap where systems have it.",
    )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    devices = f"{row['devices']:,}, {row['plan']}"
    if "refused" in row:
        return (devices, f"none: {shorten(row['refused'], 120)}", *[""] * 6, f"{row['planning']:.0f}")
    shape = f"{row['stages']} x {row['shards']} x {row['replicas']}, {row['schedule']}"
    return (
        devices,
        shape if row["fits"] else f"{shape} (does not fit)",
        f"{row['step']:.3g}",
        f"{row['bubble']:.0%}",
        f"{row['communication'] / row['step']:.0%}",
        f"{row['memory'] / 1e9:.0f}",
        f"{row['utilisation']:.1%}",
        f"{row['device_hours']:,.0f}",
        f"{row['planning']:.0f}",
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Step time, utilisation and cost against the number of devices. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = {
        "step": "step, s",
        "utilisation": "model FLOPs utilisation",
        "device_hours": "H100-hours for 10^12 tokens",
    }
    for axes, (key, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, how in dict.fromkeys((row["model"], row["plan"]) for row in rows):
            mine = [r for r in rows if (r["model"], r["plan"]) == (name, how) and r.get("fits")]
            style = "o-" if how == SEARCHED else "x--"
            if mine:
                axes.plot([r["devices"] for r in mine], [r[key] for r in mine], style, label=f"{name}, {how}")
        axes.set(xscale="log", xlabel="devices", ylabel=label, yscale="linear" if key == "utilisation" else "log")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=150)
