"""SeqFedEDT (Du et al., IEEE Trans. Mobile Computing 2025): plain sequential learning as a
limit, and the classifier alone.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fedpfl.engine.keys import generator
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, SeqFedEDT, Turn
from fedpfl.methods.shared import importance
from tests.conftest import (
    COHORTS,
    HEAD,
    assert_same,
    client_row,
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


def test_with_the_classifier_alone_the_quantile_counts_over_it(backend, played):
    method = SeqFedEDT(q=0.5, classifier_only=True)
    states, outcomes = played(method, backend)
    assert set(states[0].clients["scored"]) == set(HEAD)
    assert set(outcomes[0].metrics) == {"personal_share", *(f"personal/{name}" for name in HEAD)}
    assert outcomes[2].metrics["personal_share"] == pytest.approx(
        importance.personal_count(0.5, 65) / 549
    )
    client = method.prepare(states[-1].server, states[-1].client(2))
    assert int(tree.ravel(client["mask"]).sum()) == importance.personal_count(0.5, 65)
    start = method._begin(states[-1].server, client)
    body = {name: value for name, value in states[-1].server.items() if name not in HEAD}
    assert_same({name: start[name] for name in body}, body)
    assert differing(
        {name: start[name] for name in HEAD}, {name: states[-1].server[name] for name in HEAD}
    )
    assert_same(client_row(states[-1].clients["rest"], order(3)[-1]), body)
