"""CFL (arXiv:1910.01991): when a cluster splits and where, by hand-made updates; newcomers."""

import math

import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import CFL
from tests.conftest import CPU, assert_close, assert_same, tiny

ROOM = {"warmup": 0, "clusters": 3}


def aggregated(method, changes, numbers=(0, 1, 2, 3), clients=4, weight=None):
    """The server's state after one round with these updates of a model of zeros."""
    net = tiny()
    zeros = tree.full_like(net.params, 0.0)
    server = make_initial_state(method, net, clients, CPU).server
    server = {**server, "models": tree.full_like(server["models"], 0.0)}
    uploads = tree.stack([{**zeros, "fc.bias": change} for change in changes])
    given = {"number": torch.tensor(numbers)}
    weight = (
        torch.full((len(changes),), 1 / len(changes)) if weight is None else torch.tensor(weight)
    )
    return method.aggregate(server, given, net.bind({}), uploads, weight, None)[0]


def unit(degrees, length=1.0):
    angle = math.radians(degrees)
    return torch.nn.functional.pad(
        length * torch.tensor([math.cos(angle), math.sin(angle)]), (0, 10)
    )


def test_two_opposite_pairs_part():
    """u, u, -u, -u: the mean is 0 and the longest |u|."""
    u = unit(30.0, 2.0)
    after = aggregated(CFL(**ROOM), [u, u, -u, -u])
    assert after["cluster_of"].tolist() == [0, 0, 1, 1, 3]
    assert_same(after["models"]["fc.bias"], torch.stack([u, -u, 0 * u, 0 * u]))
    for method in (
        CFL(eps2=2.1, **ROOM),
        CFL(gamma=1.0, **ROOM),
        CFL(warmup=1),
        CFL(warmup=0, clusters=1),
    ):
        assert aggregated(method, [u, u, -u, -u])["count"] == 1
    assert (
        aggregated(CFL(eps1=2.0, eps2=2.0, warmup=0), [u, u, u, u])["count"] == 1
    )  # mean and longest are one
    assert aggregated(CFL(**ROOM), [u, -u], (0, 1), 2)["count"] == 1  # of two clients
    assert (
        aggregated(CFL(**ROOM), [u, u, -u, -u], clients=5)["count"] == 1
    )  # one of them is not here
    assert (
        aggregated(CFL(**ROOM), [u, u, -u, -u], weight=[0.4, 0.3, 0.2, 0.1])["count"] == 1
    )  # a mean of 0.4 |u|


def test_a_newcomer_has_the_model_from_before_the_first_split():
    u = unit(0.0, 2.0)
    method = CFL(eps1=9.0, **ROOM)
    after = aggregated(method, [u, 0.5 * u, -u, -u])
    given = {"number": torch.tensor(5), "newcomer": torch.tensor(True)}
    assert_close(method.personal(after, given)["fc.bias"], -u / 8)
    net, uploads = tiny(), tree.map(lambda leaf: leaf[[0, 0, 1, 1]] + 1, after["models"])
    later = method.aggregate(
        after, {"number": torch.arange(4)}, net.bind({}), uploads, torch.full((4,), 0.25), None
    )[0]
    assert_same(method.personal(later, given), method.personal(after, given))
    given["number"] = torch.tensor(2)
    assert_same(method.personal(after, given)["fc.bias"], -u)
