"""A network that gets ten times slower: the plan changes, and the new one is faster there.

Two hosts on this machine are network namespaces with a core each, joined by links that tc limits (`benchmarks.hosts`).
Under torchrun, one rank a host, autopar plans at both bandwidths; then both plans run in turn at both bandwidths.
"""

from __future__ import annotations

import json
import logging
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from autopar import DeviceError, Plan
from autopar.runtime.other_systems.independent import CEILING
from benchmarks.hosts import Hosts, hosts, why_not
from benchmarks.kept import Kept
from benchmarks.output import Report, Rounds, Table
from benchmarks.timing import ratio

log = logging.getLogger(__name__)

_JOB = Path(__file__).parent / "network_job.py"
FAST, SLOW = RATES = (400.0, 40.0)  # Mbit/s


def run_network(quick: bool, kept: Kept) -> Report:
    """Raises DeviceError where the machine allows no namespaces, and RuntimeError where a rank fails."""
    reason = why_not()
    if reason:
        raise DeviceError(f"hosts as network namespaces: {reason}")
    rounds = 2 if quick else 9
    with tempfile.TemporaryDirectory() as folder, hosts(2, FAST) as network:

        def made(rate: float) -> str:
            return planned(network, rate, Path(folder)).to_json()

        found = [Plan.from_json(kept.case("plan", rate, make=partial(made, rate))) for rate in RATES]
        measured = [
            kept.case("steps", rate, make=partial(compared, network, rate, found, rounds, Path(folder)))
            for rate in RATES
        ]
    return _report(found, measured)


def planned(network: Hosts, megabits: float, folder: Path) -> Plan:
    """What autopar plans where the links carry `megabits` Mbit/s."""
    log.info("planning at %g Mbit/s", megabits)
    network.limit(megabits)
    out = folder / f"plan-{megabits:g}.json"
    network.torchrun(_JOB, "plan", str(out), env={"AUTOPAR_CACHE_DIR": str(folder / "cache")})
    return Plan.from_json(out.read_text())


def compared(network: Hosts, megabits: float, plans: list[Plan], rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds and losses of steps by each plan (by number) and of the ceiling, in turn."""
    log.info("comparing at %g Mbit/s", megabits)
    network.limit(megabits)
    out, files = folder / f"compared-{megabits:g}.json", [folder / f"{i}.json" for i in range(len(plans))]
    for file, plan in zip(files, plans, strict=True):
        file.write_text(plan.to_json())
    network.torchrun(_JOB, "compare", str(out), str(rounds), *map(str, files), env={"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _report(plans: list[Plan], measured: list[dict[str, Any]]) -> Report:
    rows, data, rounds = [], [], []
    for own, (rate, found) in enumerate(zip(RATES, measured, strict=True)):
        seconds = found["seconds"]
        names = {str(index): f"plan made for {made_for:g} Mbit/s" for index, made_for in enumerate(RATES)}
        rounds.append(
            Rounds(f"{rate:g} Mbit/s", {names.get(key, key): taken for key, taken in seconds.items()}, CEILING)
        )
        for index, (made_for, plan) in enumerate(zip(RATES, plans, strict=True)):
            predicted = plan.predicted_step_time if index == own else None
            rows.append(
                (
                    f"{rate:g} Mbit/s",
                    f"{made_for:g} Mbit/s",
                    f"{plan.places}, {plan.schedule}, {plan.n_microbatches} micro-batches",
                    f"{predicted * 1e3:.0f}" if predicted else "",
                    f"{median(seconds[str(index)]) * 1e3:.0f}",
                    f"{ratio(seconds[str(index)], seconds[str(own)]):.2f}",
                )
            )
            one = {"seconds": seconds[str(index)], "loss": found["losses"][str(index)]}
            data.append({"rate": rate, "made_for": made_for, "plan": str(plan.places), "predicted": predicted, **one})
        rows.append((f"{rate:g} Mbit/s", "", CEILING, "", f"{median(seconds[CEILING]) * 1e3:.0f}", ""))
    table = Table(
        "Steps of the plans made for two bandwidths, at both",
        ("network", "plan made for", "plan", "predicted ms", "measured ms", "/ the plan made for it"),
        tuple(rows),
        "Two ranks over gloo, a core each, in network namespaces; medians, and of the ratios in each round. The "
        "ceiling: each rank has half of the batch, in micro-batches as the first plan's, and ranks send each other "
        "nothing.",
    )
    same = plans[0].without_predictions("compared") == plans[1].without_predictions("compared")
    values = {"steps": data, "plans_differ": not same}
    return Report("A network ten times slower", (table,), values, measured=tuple(rounds))
