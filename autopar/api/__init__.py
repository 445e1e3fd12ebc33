"""The public calls, a file for each. Importing this package registers how plans are shown, priced and made by hand."""

from autopar.api import by_hand  # noqa: F401  registers what `Plan.by_hand` calls
from autopar.api.comparing import accuracy, compare
from autopar.api.parallelizing import parallelize
from autopar.api.planning import plan
from autopar.api.profiling import profile

__all__ = ["accuracy", "compare", "parallelize", "plan", "profile"]
