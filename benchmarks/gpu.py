"""Everything that is promised of GPUs, on one GPU and, where there are some, on several: goals met and missed.

Without a GPU it refuses; `--device cpu` runs, on tiny or full models, what makes sense there, to show that it runs.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from benchmarks.gpu_checks import PARTS
from benchmarks.gpu_models import MODELS, Builder, Subject
from benchmarks.gpu_setting import FULL, QUICK, Finding, Setting
from benchmarks.gpu_several import several
from benchmarks.kept import Kept
from benchmarks.output import Report, Table
from cost_models.errors import DeviceError

log = logging.getLogger(__name__)

RUNS = "runs"  # the goal that a part misses where it fails


def run_gpu(
    quick: bool,
    device: str | None = None,
    only: Sequence[str] = (),
    parts: Sequence[str] = (),
    *,
    backend: str | None = None,
    kept: Kept | None = None,
) -> Report:
    """`device`: default the current GPU. `only`, `parts`: names of models and of parts, default all. `backend`: of
    torch.compile.

    Raises DeviceError without the device, or for a model or part of another name.
    """
    setting = setting_of(quick, device, backend)
    check_names("model", only, MODELS)
    check_names("part", parts, part_names())
    kept = Kept() if kept is None else kept
    findings: list[Finding] = []
    for name, build in MODELS.items():
        if not only or name in only:
            findings += _findings(name, build, setting, parts or part_names(), kept.part(name))
    return report_of(findings, setting)


def part_names() -> tuple[str, ...]:
    return (*(part.__name__ for part in PARTS), several.__name__)


def check_names(what: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raises DeviceError, naming those there are."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise DeviceError(f"no {what} {', '.join(unknown)}; gpu has {', '.join(known)}")


def _findings(name: str, build: Builder, setting: Setting, parts: Sequence[str], kept: Kept) -> list[Finding]:
    """Of one model. A part that fails is a goal that is missed; the others run all the same."""
    subject = cache(lambda: build(setting.device, setting.quick))  # not for parts whose findings are kept

    def judged_part(part: Callable[[Subject, Setting], Iterator[Finding]]) -> list[dict[str, Any]]:
        title = subject().name
        log.info("%s: %s", title, part.__name__)
        found = [judged(f, setting) for f in guarded(title, part.__name__, partial(part, subject(), setting))]
        subject().workload.clear()
        _free(setting)
        return [dataclasses.asdict(finding) for finding in found]

    def judged_several() -> list[dict[str, Any]]:
        title = subject().name
        subject.cache_clear()  # the systems of several devices need the memory
        _free(setting)
        log.info("%s: several devices", title)
        found = guarded(title, "several devices", partial(several, name, title, setting))
        return [dataclasses.asdict(judged(finding, setting)) for finding in found]

    makers = {part.__name__: partial(judged_part, part) for part in PARTS} | {several.__name__: judged_several}
    kept_parts = [kept.case(part, make=make) for part, make in makers.items() if part in parts]
    return [Finding(**finding) for found in kept_parts for finding in found]


def setting_of(quick: bool, device: str | None, backend: str | None = None) -> Setting:
    """Raises DeviceError without the device."""
    place = torch.device(device or "cuda")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                "the benchmark needs a GPU, and PyTorch sees no CUDA device; "
                "--device cpu runs what makes sense on a CPU"
            )
        if (place.index or 0) >= torch.cuda.device_count():
            raise DeviceError(f"there is no {place}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    elif place.type != "cpu":
        raise DeviceError(f"the benchmark knows cuda and cpu devices, not {device!r}")
    return Setting(place, quick, *(QUICK if quick else FULL), backend=backend or "inductor")


def judged(finding: Finding, setting: Setting) -> Finding:
    """The goals are those of a GPU: on a CPU only a failure is judged."""
    if setting.is_gpu or finding.goal == RUNS:
        return finding
    return dataclasses.replace(finding, met=None)


def guarded(model: str, part: str, run: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from run()
    except Exception as error:
        log.warning("%s: %s failed\n%s", model, part, traceback.format_exc())
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        yield Finding(model, part, RUNS, None, "failed", False, why)


def _free(setting: Setting) -> None:
    gc.collect()  # modules and graphs refer to each other, and the next part needs the memory
    if setting.is_gpu:
        torch.cuda.empty_cache()


# -- what is shown ----------------------------------------------------------------------------------------------------


def report_of(findings: Sequence[Finding], setting: Setting) -> Report:
    met, missed = (sum(f.met is judged for f in findings) for judged in (True, False))
    title = f"Goals on {setting.device}: {met} met, {missed} missed, {len(findings) - met - missed} not judged"
    data = {
        "quick": setting.quick,
        "device": str(setting.device),
        "findings": [dataclasses.asdict(f) for f in findings],
    }
    return Report(title, tuple(_table(name, findings) for name in dict.fromkeys(f.model for f in findings)), data)


def _table(model: str, findings: Iterable[Finding]) -> Table:
    rows = tuple((f.promise, f.text, f.goal, _verdict(f), f.note) for f in findings if f.model == model)
    note = (
        "Systems run in turn (A B A B ...), medians over the rounds; ratios are medians of pairs of one round. Errors "
        "are predicted / measured - 1."
    )
    return Table(model, ("promise", "measured", "goal", "", "how"), rows, note)


def _verdict(finding: Finding) -> str:
    if finding.met is None:
        return "not measured" if finding.value is None else "not judged"
    return "met" if finding.met else "missed"
