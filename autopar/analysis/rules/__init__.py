"""What operators do to the dimensions of their tensors, as lines of index notation.

`table.bind(node)` reads the line of an ATen operator for one call: which indices are kept, summed or whole, and in
which operands the operator is linear. Two things follow from these rules: the proof that a batch may be split
(`analysis.batch_proof`), and the strategies that shard an operator (`sharding.strategies`).
"""
