"""The worst decile, as every number of that name counts it."""


def worst_decile_size(clients: int) -> int:
    """Return a tenth of the clients, rounded down, but at least one."""
    return max(1, clients // 10)
