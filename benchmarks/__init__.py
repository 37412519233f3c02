"""Measure fedpfl: `python -m benchmarks NAME ...`."""
