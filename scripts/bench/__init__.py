"""What scripts/benchmark.py measures: the plain way, the bare kernels, and fedpfl itself."""
