"""What autopar's claims rest on: `python -m benchmarks list`."""
