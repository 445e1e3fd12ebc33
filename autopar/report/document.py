"""A report as a value: a verdict and sections of blocks, which text, notebooks and HTML files show alike.

    Report ── sections ── blocks: Figures, Heading, Paragraph, Points, Table, Bars, TimelineLanes,
                              Curves, Tree, Code, Fold
       │
       ├─ print(report)            report/document_text.py
       └─ save(), _repr_html_()    report/html/page.py with one template per block

Blocks hold finished texts and fractions of their drawing area. They hold no formulas: numbers come from plans, profiles
and comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from autopar.errors.names import with_checked_names
from autopar.plan.display import traced
from autopar.plan.files import PAGE, TRACE, file_to_write, write_whole

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True)
class Figure:
    """One number of the first screen."""

    label: str  # "step time"
    value: str  # "231 ms"
    note: str = ""  # "predicted 225 ms (-2.6%)"


@dataclass(frozen=True)
class Figures:
    """Numbers side by side."""

    kind: ClassVar[str] = "figures"
    items: tuple[Figure, ...]


@dataclass(frozen=True)
class Paragraph:
    """One or more sentences. `strong`: what a reader must not miss."""

    kind: ClassVar[str] = "paragraph"
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Heading:
    """A heading inside of a section."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    kind: ClassVar[str] = "points"
    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table. Its first `words` columns are text, the others numbers. `accents`: rows that stand out."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    accents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Part:
    """A part of a bar."""

    name: str
    share: float  # of the drawing's width
    text: str  # its quantity: "12.4 GB"


@dataclass(frozen=True)
class Bar:
    """A bar of parts side by side."""

    label: str
    text: str  # the whole in words: "61.2 of 79.1 GB"
    parts: tuple[Part, ...]
    limit: float | None = None  # share of the width at which a limit is drawn
    interval: tuple[float, float] | None = None  # shares of the width, between which the end of the bar may be


@dataclass(frozen=True)
class Bars:
    """Bars below each other with one legend: names of parts have one colour each, by their place in `names`."""

    kind: ClassVar[str] = "bars"
    title: str
    description: str  # what a screen reader says
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    limit_name: str = ""


@dataclass(frozen=True)
class Span:
    """Something that takes time in a lane."""

    start: float  # share of the width
    width: float  # share of the width
    colour: int  # place in the legend
    title: str = ""  # "forward of stage 0, micro-batch 3: 1.2 ms"


@dataclass(frozen=True)
class TimelineLane:
    """What one device does."""

    label: str
    note: str  # at the end of the lane: "87% busy"
    spans: tuple[Span, ...]
    group: str = ""  # lanes with the same group follow each other under its heading


@dataclass(frozen=True)
class TimelineLanes:
    """A timeline: one lane below the other, one axis for all."""

    kind: ClassVar[str] = "lanes"
    title: str
    description: str
    legend: tuple[str, ...]
    lanes: tuple[TimelineLane, ...]
    ticks: tuple[tuple[float, str], ...]  # share of the width, text
    text: str = ""  # the same for terminals


@dataclass(frozen=True)
class Band:
    """A part of a curve's height, from bottom to top."""

    name: str
    steps: tuple[tuple[float, float], ...]  # (share of the width, share of the height from there on)


@dataclass(frozen=True)
class Curve:
    """Stacked bands over time, and a limit."""

    label: str
    note: str
    bands: tuple[Band, ...]
    limit: float | None = None  # share of the height


@dataclass(frozen=True)
class Curves:
    """Curves below each other, with one axis for all."""

    kind: ClassVar[str] = "curves"
    title: str
    description: str
    names: tuple[str, ...]
    curves: tuple[Curve, ...]
    ticks: tuple[tuple[float, str], ...]
    top: str  # text for the full height
    limit_name: str = ""


@dataclass(frozen=True)
class Branch:
    """A module, or a group of operators, with what is inside it."""

    label: str
    note: str = ""
    stages: tuple[int, ...] = ()  # whose colours it has
    branches: tuple[Branch, ...] = ()
    leaves: str = ""  # operators, in one text


@dataclass(frozen=True)
class Tree:
    """A tree that unfolds. `strip`: (share of the width, stage, title) of its top, side by side."""

    kind: ClassVar[str] = "tree"
    title: str
    branches: tuple[Branch, ...]
    strip: tuple[tuple[float, int, str], ...] = ()
    open_levels: int = 1


@dataclass(frozen=True)
class Code:
    """A command or a program to copy."""

    kind: ClassVar[str] = "code"
    label: str
    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks that a page shows when the reader asks for them; text shows their summary and no more."""

    kind: ClassVar[str] = "fold"
    summary: str
    blocks: tuple[Block, ...]


Block = Figures | Heading | Paragraph | Points | Table | Bars | TimelineLanes | Curves | Tree | Code | Fold


@dataclass(frozen=True)
class Section:
    """Blocks under a heading.

    `text`: what terminals show in their place: texts, blocks, and values that print, such as a plan. (): nothing, not
    even the heading. None: the blocks.
    """

    title: str
    blocks: tuple[Block, ...]
    text: tuple[Any, ...] | None = None

    @property
    def anchor(self) -> str:
        """The section's name in links."""
        return "".join(c if c.isascii() and c.isalnum() else "-" for c in self.title.lower())


@dataclass(frozen=True)
class Report:
    """What `report()` returns: `print(report)` shows it as text, a notebook as a page, `save` writes it as a file."""

    title: str
    verdict: str  # one sentence
    sections: tuple[Section, ...]
    verdict_notes: tuple[str, ...] = field(default=())  # short facts beside the verdict: "estimated from data sheets"
    steps: tuple[Any, ...] = field(default=(), compare=False, repr=False)  # a plan and a profiled step, for `trace`

    def only(self, *titles: str) -> Report:
        """The report with these sections alone, in this order. Raises KeyError for a title that it does not have."""
        sections = {section.title: section for section in self.sections}
        for title in titles:
            if title not in sections:
                raise KeyError(f"there is no section {title!r}; known are {', '.join(sections)}")
        return replace(self, sections=tuple(sections[title] for title in titles))

    def save(self, path: str | Path) -> Path:
        """Write one self-contained HTML file; returns its path.

        Raises InputError for a name with another ending than .html or .htm, or where no file can be, and OSError.
        """
        from autopar.report.html.page import page

        path = file_to_write(path, PAGE)
        write_whole(path, page(self))
        return path

    @with_checked_names
    def trace(self, path: str | Path, rank: int | None = None) -> None:
        """Write the predicted step and the measured one as one Chrome trace, for Perfetto; compressed if the name ends
        in .gz. Processes of a rank follow each other: predicted, measured.

        `rank`: the events of one rank, as Holistic Trace Analysis reads them: measured ones if there are some.

        Raises InputError for a report without a step (of a comparison or a profile of costs), a rank that there is
        not, and a name with another ending than .json or .gz, or where no file can be; OSError.
        """
        traced(self, file_to_write(path, TRACE), rank)

    def _repr_html_(self) -> str:
        from autopar.report.html.page import fragment

        return fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from autopar.report.document_text import renderables

        return iter(renderables(self, options.max_width))

    def __str__(self) -> str:
        from autopar.report.document_text import as_text

        return as_text(self)
