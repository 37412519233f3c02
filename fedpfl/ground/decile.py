"""The worst decile, as every number of that name counts it."""


def worst_decile_size(count: int) -> int:
    """Return how many of so many clients are the worst decile: a tenth, rounded down, at least one."""
    return max(1, count // 10)
