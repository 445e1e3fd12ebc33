"""A report as one HTML file, or as a part of a notebook.

Everything is in the file: styles, drawings as SVG, no scripts, nothing from a network. Jinja2 escapes every text that
templates insert; names of modules and devices come from anywhere.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from autopar.version import __version__

if TYPE_CHECKING:
    import jinja2

    from autopar.report.document import Report, Span, TimelineLane

Steps = Sequence[tuple[float, float]]  # (share of the width, share of the height from there on)

_DIGITS = 5  # of a share in a drawing: a hundredth of a pixel


def page(report: Report) -> str:
    """A whole file."""
    return _environment().get_template("page.html").render(report=report, version=__version__)


def fragment(report: Report) -> str:
    """A part of a page that others made, such as a notebook's."""
    return _environment().get_template("fragment.html").render(report=report, version=__version__)


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.report.html"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"permille": _permille, "percent": _percent, "steps": _steps, "hue": _hue}
    environment.filters |= {"groupby_runs": _runs, "merged": _merged}
    return environment


def _permille(share: float) -> str:
    """Of the width of a drawing, which is 1000 units wide."""
    return f"{share * 1000:.{_DIGITS - 3}f}".rstrip("0").rstrip(".") or "0"


def _percent(share: float) -> str:
    return f"{share * 100:.{_DIGITS - 2}f}".rstrip("0").rstrip(".") + "%"


def _hue(stage: int) -> int:
    """Degrees on the colour circle; neighbouring stages are far apart on it, by the golden angle."""
    return round(225 + stage * 137.508) % 360


def _runs(lanes: Sequence[TimelineLane]) -> list[tuple[str, list[TimelineLane]]]:
    """TimelineLanes that follow each other in one group."""
    return [(group, list(run)) for group, run in itertools.groupby(lanes, key=lambda lane: lane.group)]


def _merged(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """One SVG path for all spans of a colour that have no title: a few bytes a span."""
    paths: dict[int, list[str]] = defaultdict(list)
    for span in spans:
        if not span.title:
            width = _permille(span.width)
            paths[span.colour].append(f"M{_permille(span.start)} 0h{width}v20h-{width}z")
    return [(colour, "".join(parts)) for colour, parts in paths.items()]


def _steps(lower: Steps, upper: Steps) -> str:
    """The SVG path between two step functions of (share of the width, share of the height) over the same places."""
    return f"M{_outline(upper)}L{_outline(lower, back=True)}Z"


def _outline(points: Steps, *, back: bool = False) -> str:
    corners: list[str] = []
    for index, (x, y) in enumerate(points):
        end = points[index + 1][0] if index + 1 < len(points) else 1.0
        corners += [f"{_permille(x)} {_permille(1 - y)}", f"{_permille(end)} {_permille(1 - y)}"]
    return "L".join(reversed(corners) if back else corners)
