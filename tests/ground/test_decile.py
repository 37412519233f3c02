"""The worst decile has a tenth of the clients, rounded down, and never none."""

from fedpfl.ground.decile import worst_decile_size


def test_the_worst_decile_is_a_tenth_of_the_clients():
    clients = (1, 9, 10, 19, 20, 101)
    assert [worst_decile_size(count) for count in clients] == [1, 1, 1, 1, 2, 10]
