"""Stages: the exact search for a partition of the model into pipeline stages, over plain costs in seconds and bytes."""
