"""Backends: how many clients are trained and evaluated, one by one, stacked, or over several processes."""
