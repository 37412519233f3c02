"""SeqFedEDT (Du et al., IEEE Trans. Mobile Computing 2025): plain sequential learning as a
limit, and the classifier alone.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fedpfl.engine.keys import generator
from fedpfl.methods import FedAvg, SeqFedEDT, Turn
from tests.conftest import (
    COHORTS,
    assert_same,
    differing,
    keep_quick,
    record_rounds,
    record_states,
    tiny,
)


@dataclass(frozen=True)
class Passing(FedAvg):
    """Plain sequential learning."""

    def turns(self, played, cohort, clients, generator):
        return [Turn([client]) for client in order(played + 1)]

    def buffers(self):
        return {"main": "local"}


@pytest.fixture(scope="module")
def played(net, federation):
    """The states of three rounds, and the outcomes, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_rounds(method, net, federation, engine=backend)
    )


def order(t: int) -> list[int]:
    """Clients of round t in their order."""
    cohort = COHORTS[t - 1]
    return [
        cohort[place]
        for place in torch.randperm(len(cohort), generator=generator(0, "turns", t)).tolist()
    ]


@pytest.mark.parametrize("values", keep_quick([{}, {"classifier_only": True}]), ids=str)
def test_with_q_one_it_is_plain_sequential_learning(values, backend, federation):
    net = tiny(norm=True)
    own, plain = (
        record_states(m, net, federation, engine=backend)
        for m in (SeqFedEDT(q=1.0, **values), Passing())
    )
    for ours, theirs in zip(own, plain, strict=True):
        assert_same((ours.server, ours.client_buffers), (theirs.server, theirs.client_buffers))
    together = record_states(FedAvg(), net, federation, engine=backend)[-1]
    assert differing(plain[-1].server, together.server)
