"""Hold what every room stands on: trees of tensors, errors in one line, files, the lock and
identity of a run.
"""
