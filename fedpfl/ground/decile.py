"""The worst decile, as every number of that name counts it."""


def decile(count: int) -> int:
    """Return how many of so many clients are the worst decile: a tenth, rounded down, at least one."""
    return max(1, count // 10)
