"""Plans with every number that a report shows, without a model; pages as what a parser makes of them."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from exit_plans import plan_with

from autopar import Plan
from autopar.plan.assumptions import Assumptions
from autopar.plan.degrees import Degrees
from autopar.plan.stage import RunnerUp, StageTransfer
from autopar.plan.step_work import StepWork
from autopar.sharding.stage_sharding import Exchange

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_CLOSED_BY_OTHERS = {"rect", "line", "path"}  # written with a slash


def priced(n_layers: int = 4, **changes: object) -> Plan:
    """Two stages of a pipeline on meshes of 2 x 2 devices, with made-up numbers."""
    degrees = Degrees(2, 2, 2, 1, "1f1b", 1, 1, "none", False, 16)
    bare = plan_with(degrees, n_layers)
    names = tuple(f"{i // 4}.{i % 4}:H100" for i in range(8))
    stages = []
    for index, stage in enumerate(bare.stages):
        assert stage.sharding is not None
        reader = next(key for key in stage.operators if key.startswith("layers."))
        exchange = Exchange("all_reduce", "tensor", reader, reader, 7_000_000, 0.0004)
        stages.append(
            dataclasses.replace(
                stage,
                devices=names[4 * index : 4 * index + 4],
                sharding=dataclasses.replace(stage.sharding, exchanges=(exchange,), collective_time=0.0004),
                forward_time=0.010 + index * 0.001,
                backward_time=0.020,
                weight_time=0.010,
                parameter_bytes=4_000_000_000,
                activation_bytes=1_500_000_000,
                peak_memory=21_000_000_000 + index,
                gradient_bytes=4_000_000_000,
                optimizer_bytes=8_000_000_000,
                transient_bytes=500_000_000,
                usable_memory=76_000_000_000,
                sync_time=0.003,
            )
        )
    plan = dataclasses.replace(
        bare,
        stages=tuple(stages),
        devices=names,
        device_kinds=("H100",) * 8,
        predicted_step_time=0.31,
        single_device_time=1.9,
        bubble=0.11,
        transfers=(StageTransfer(0, 1, 9_000_000, 9_000_000, 0.0005),),
        notes=("estimated from the data sheets of 2 nodes of 4xH100, not measured",),
        optimality="within 3% of a bound",
        runners_up=(RunnerUp("2 stages on other devices", 0.35), RunnerUp("the same, larger", 0.31)),
        assumed=Assumptions(precision="bf16-mixed"),
        work=StepWork(tokens=16 * 4096, flops=2.0e14, least_time=0.12),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


class Page(HTMLParser):
    """Reads a page. ValueError for a tag that is not closed, or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.figures: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        if self._open:
            raise ValueError(f"not closed: {self._open}")

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len({name for name, _ in attrs}) < len(attrs):
            raise ValueError(f"<{tag}> has an attribute twice")
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _CLOSED_BY_OTHERS | _VOID:
            raise ValueError(f"<{tag}/> is no HTML")
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing that is open")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("style", "script"):
            return
        self.words.append(data)
        if "dt" in self._open:
            self.figures[data] = []
        elif "dd" in self._open and self.figures:
            self.figures[list(self.figures)[-1]].append(data)
