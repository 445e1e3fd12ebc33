"""What results of calls have in common: a report, which notebooks show and `save` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors.names import with_checked_names
from autopar.plan.display import reported, shown

if TYPE_CHECKING:
    from autopar.report.document import Report


class Result:
    """`print(result)` shows text, a notebook shows a page, and `save("r.html")` writes the page as a file."""

    @with_checked_names
    def report(self, *, command: str | None = None) -> Report:
        """The result as a `Report`. `command`: the command or program that made it, to be shown with it."""
        made: Report = reported(self, command=command)
        return made

    def save(self, path: str | Path) -> Path:
        """Write the report as one HTML file that needs no network, and return its path. Raises OSError."""
        return self.report().save(path)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __str__(self) -> str:
        return shown(self)
