"""Work that takes seconds and knows no fraction done is announced here: capturing a model, compiling a stage.

with shown_work("capturing the model"):     report/progress.py shows it on terminals, once it is registered
    ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Shown = Callable[[str], AbstractContextManager[None]]

_shown: list[Shown] = []  # at most one


def show_work_with(shown: Shown) -> None:
    """From now on `shown` shows all work."""
    _shown[:] = [shown]


@contextmanager
def shown_work(what: str) -> Iterator[None]:
    """Inside, `what` is being done."""
    if not _shown:
        yield
        return
    with _shown[0](what):
        yield
