"""GPFL (arXiv:2308.10279): published sizes, and what is drawn."""

import dataclasses

import pytest

from fedpfl import models
from fedpfl.ground import tree
from fedpfl.methods import GPFL
from tests.conftest import COHORTS, assert_same, record_rounds


def test_what_travels_and_what_is_drawn(net, federation):
    built = models.build_network("cnn4", (3, 32, 32), 10, 0)
    server = GPFL().init(built.params, built.parts)[0]
    assert tree.size(server["valve"]) == 527_360
    assert tree.size(server) == 1_405_888
    assert_same(server, GPFL().init(built.params, built.parts)[0])
    other = GPFL().init(built.params, dataclasses.replace(built.parts, seed=1))[0]
    assert (server["embeddings"] - other["embeddings"]).abs().max() > 0.01
    assert float(server["embeddings"].std()) == pytest.approx(1, abs=0.05)
    weight = server["valve"]["gamma"]["weight"]
    assert float(weight.abs().max()) <= 512**-0.5
    assert float(weight.std()) == pytest.approx(512**-0.5 / 3**0.5, rel=0.02)
    assert (weight - server["valve"]["beta"]["weight"]).abs().max() > 0.01
    states, outcomes = record_rounds(GPFL(), net, federation, COHORTS[:1])
    size = 5 * tree.size(states[0].server)
    assert (outcomes[0].traffic.values_down, outcomes[0].traffic.values_up) == (size, size)
