"""What operators do to the dimensions of their tensors, as lines of index notation.

`bind(node)` reads the line of an ATen operator for one call of it: which index is kept, summed or whole, and in which
operands the operator is linear. From that follow the proof that a batch may be split (`autopar.proof`) and the ways to
shard an operator.
"""

from autopar.rules.notation import Dims, Kind, MisfitError, Rule, Size, read
from autopar.rules.table import RULES, bind, rule_name

__all__ = ["RULES", "Dims", "Kind", "MisfitError", "Rule", "Size", "bind", "read", "rule_name"]
