"""How many examples hypothesis tries: few in the default run, many with HYPOTHESIS_PROFILE=thorough."""

from __future__ import annotations

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")

settings.register_profile("fast", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=300)


def examples(usual: int) -> int:
    """For `@settings(max_examples=examples(n))`: n in the default run, 10 n in the thorough one."""
    return 10 * usual if PROFILE == "thorough" else usual
