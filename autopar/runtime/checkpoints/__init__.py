"""Checkpoints on torch.distributed.checkpoint: one directory a step, in the original names, for any other plan."""
