"""How many examples hypothesis tries, by HYPOTHESIS_PROFILE: few in "fast", the default run, and many in "thorough".

Both try the same examples every time, so that a run that fails, fails again. "random" looks for new ones, as many.
"""

from __future__ import annotations

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")

settings.register_profile("fast", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=300, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=300)


def examples(usual: int, others: int | None = None) -> int:
    """For `@settings(max_examples=examples(n))`: n in the default run, 10 n or `others` in the others."""
    return usual if PROFILE == "fast" else others or 10 * usual
