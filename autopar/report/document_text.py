"""A report on a terminal: headings, tables and paragraphs, 80 to 120 columns wide."""

from __future__ import annotations

from functools import singledispatch
from io import StringIO

from rich.console import Console, RenderableType
from rich.text import Text

from autopar.plan.display import printable, shown
from autopar.report.document import (
    Bars,
    Block,
    Code,
    Curves,
    Figures,
    Fold,
    Heading,
    Paragraph,
    Points,
    Report,
    Section,
    Table,
    TimelineLanes,
    Tree,
)
from autopar.report.tables import WIDTH, at_width, bullet, paragraph, table

_MOST_ROWS = 24  # of a table
_HEADING, _VERDICT = "bold", "bold green"


def as_text(report: Report) -> str:
    """Without colours, 80 columns wide; `rich.print(report)` has colours, and the width of the terminal."""
    out = StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False)
    for part in renderables(report, WIDTH):
        console.print(part, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def renderables(report: Report, columns: int) -> list[RenderableType]:
    """The parts of a report, one below the other."""
    with at_width(columns):
        parts = [Text(paragraph(report.title), style=_HEADING), Text(paragraph(report.verdict), style=_VERDICT)]
        if report.verdict_notes:
            parts.append(Text(paragraph(", ".join(report.verdict_notes))))
        for section in report.sections:
            if section.text == ():
                continue
            title = paragraph(section.title)
            parts.append(Text(f"\n{title}\n{'-' * len(title)}", style=_HEADING))
            parts.append(Text(_section(section)))
        return [*parts]


def _section(section: Section) -> str:
    parts = section.blocks if section.text is None else section.text
    return "\n\n".join(text for text in map(_part, parts) if text)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    return block_text(part) if isinstance(part, Block) else shown(part)


@singledispatch
def block_text(block: Block) -> str:
    """The text of a block; empty for one that only a page can show."""
    raise NotImplementedError(f"no text is registered for {type(block).__name__}")


@block_text.register
def _figures(block: Figures) -> str:
    rows = [[one.label, one.value, one.note] for one in block.items]
    return table(["", "", ""], rows, words=3).partition("\n")[2].partition("\n")[2] if rows else ""


@block_text.register
def _paragraph(block: Paragraph) -> str:
    return paragraph(block.text)


@block_text.register
def _heading(block: Heading) -> str:
    return paragraph(block.text)


@block_text.register
def _points(block: Points) -> str:
    return "\n".join(map(bullet, block.items))


@block_text.register
def _table(block: Table) -> str:
    rows = [list(row) for row in block.rows[:_MOST_ROWS]]
    if len(block.rows) > len(rows):
        rows.append([f"... and {len(block.rows) - len(rows)} more", *[""] * (len(block.columns) - 1)])
    lines = table(block.columns, rows, words=block.words).splitlines()
    if not any(block.columns):
        lines = lines[2:]  # an empty head, and its rule
    return "\n".join([paragraph(block.caption), "", *lines])


@block_text.register
def _bars(block: Bars) -> str:
    shown = block.bars[:_MOST_ROWS]
    if all(len(bar.parts) <= 1 for bar in shown):
        return table([block.title, ""], [[bar.label, bar.text] for bar in shown], words=2)
    lines = [f"{bar.label}: {bar.text} ({', '.join(f'{p.name} {p.text}' for p in bar.parts)})" for bar in shown]
    return "\n".join([paragraph(block.title), "", *map(bullet, lines)])


@block_text.register
def _lanes(block: TimelineLanes) -> str:
    return "\n".join(printable(line) for line in block.text.splitlines())


@block_text.register
def _curves(block: Curves) -> str:
    return table([block.title, ""], [[curve.label, curve.note] for curve in block.curves[:_MOST_ROWS]], words=2)


@block_text.register
def _tree(block: Tree) -> str:
    staged = any(branch.stages for branch in block.branches)
    rows = [
        [branch.label, *([", ".join(map(str, branch.stages))] if staged else []), branch.note]
        for branch in block.branches[:_MOST_ROWS]
    ]
    columns = [block.title, *(["stage"] if staged else []), ""]
    return table(columns, rows, words=len(columns))


@block_text.register
def _code(block: Code) -> str:
    lines = "\n".join(f"    {printable(line)}" for line in block.text.splitlines())
    return f"{paragraph(block.label)}\n\n{lines}" if block.label else lines


@block_text.register
def _fold(block: Fold) -> str:
    return paragraph(f"{block.summary}: see the saved report")
