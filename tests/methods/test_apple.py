"""APPLE (arXiv:2110.08394) of the own core alone is Local-Only."""

from dataclasses import dataclass

import torch

from fedpfl.methods import APPLE, LocalOnly
from tests.conftest import assert_close, assert_same, record_states


@dataclass(frozen=True)
class Alone(APPLE):
    """p_i is a unit vector."""

    def prepare(self, server, client):
        p = (torch.arange(len(client["p"])) == client["number"]).float()
        return {**client, "p": p}


def test_of_the_own_core_alone_it_is_local_only(backend, net, federation):
    """Bit for bit where memory layouts are the same; the loop backend gives a convolution another
    one.
    """
    own, other = (
        record_states(m, net, federation, engine=backend) for m in (Alone(rate=0.0), LocalOnly())
    )
    for ours, theirs in zip(own, other, strict=True):
        if backend == "batched":
            assert_same(ours.server["cores"], theirs.clients["model"])
        assert_close(ours.server["cores"], theirs.clients["model"], atol=1e-7, rtol=0.0)
