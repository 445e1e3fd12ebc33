"""Calls that raise an error which scripts catch: on all ranks, or the job cannot go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from autopar.errors import AutoparError

_POLL = 0.02  # s


class RaisedCalls:
    """Of one rank. An error between two collectives of a call leaves its rank behind the others, unless all raise:
    its next collective, of another call, would pair with one that they began long before. So a rank that raised waits
    before its next call until all ranks have raised."""

    def __init__(self, store: Any, size: int, patience: float) -> None:
        """`patience`: seconds to wait for the others."""
        self._store, self._size, self._patience = store, size, patience
        self._n_begun = 0
        self._raised = False

    def begin(self) -> None:
        """All ranks begin the same call."""
        self._n_begun += 1

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around the rest of the call."""
        try:
            yield
        except BaseException:
            self._raised = True
            with contextlib.suppress(RuntimeError):  # the store is gone, with its rank: the error says more
                self._store.add(self._key, 1)
            raise

    def wait_for_others(self) -> None:
        """Before a call. Raises AutoparError if the last call raised on this rank alone, or on some of the ranks."""
        if not self._raised:
            return
        end = time.monotonic() + self._patience
        while (n := int(self._store.add(self._key, 0))) < self._size:
            if time.monotonic() > end:
                raise AutoparError(
                    f"the last call raised an error on {n} of {self._size} ranks, this one among them, and the others "
                    f"did not raise within {self._patience:g} s: the ranks are out of step; end all and start again"
                )
            time.sleep(_POLL)
        self._raised = False

    @property
    def _key(self) -> str:
        return f"raised/{self._n_begun}"
