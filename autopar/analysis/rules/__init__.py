"""What operators do to the dimensions of their tensors, as lines of index notation.

`bind(node)` reads the line of an ATen operator for one call of it: which index is kept, summed or whole, and in which
operands the operator is linear. From that follow the proof that a batch may be split (`autopar.proof`) and the ways to
shard an operator.
"""
