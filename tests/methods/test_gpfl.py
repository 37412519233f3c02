"""GPFL (arXiv:2308.10279): the valve, conditions, guidance, FedPer as a limit, traffic."""

import dataclasses

import pytest
import torch

from fedpfl import models
from fedpfl.ground import tree
from fedpfl.methods import GPFL, Batch, FedPer
from fedpfl.methods.gpfl import _apply_valve
from fedpfl.methods.shared.method import Phase
from tests.conftest import (
    CLASSES,
    COHORTS,
    assert_close,
    assert_same,
    client_row,
    participate,
    record_rounds,
    record_states,
)


@pytest.fixture(scope="module")
def started(net):
    """A net's server and client at the beginning, with the frequencies of class 2 alone."""
    server, client = GPFL().init(net.params, net.parts)
    return server, client | {"frequencies": torch.eye(CLASSES)[2]}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def open_valve(valve):
    """One that changes nothing above zero."""
    return {
        part: {**own, "scale": 0 * own["scale"], "shift": 0 * own["shift"]}
        for part, own in valve.items()
    }


@dataclasses.dataclass(frozen=True)
class Bypass(GPFL):
    """With an open valve that holds still, and without both losses of the global way."""

    def init(self, params, parts):
        server, client = super().init(params, parts)
        return {**server, "valve": open_valve(server["valve"])}, client

    def phases(self, server, client, params, epochs):
        return [Phase(epochs, {"body": True, "embeddings": False, "valve": False, "head": True})]

    def loss(self, server, client, net, params, batch):
        return batch.loss(self.predict(net, self.evaluated(server, client, params), batch))


def test_past_the_valve_it_is_fedper(backend, federation):
    """Where features come out of a ReLU."""
    net = models.build_network("mlp", (1, 8, 8), CLASSES, 0)
    own, outcomes = record_rounds(Bypass(), net, federation, engine=backend)
    states, others = record_rounds(FedPer(), net, federation, engine=backend)
    for state, per in zip(own, states, strict=True):
        assert_same(state.server["body"], per.server)
        assert_same(state.clients["head"], per.clients["head"])
    assert_same([o.after.correct for o in outcomes], [o.after.correct for o in others])


def test_the_valve_says_the_same_of_the_same_condition_and_is_never_negative(started):
    valve, z = started[0]["valve"], drawn(6, 12)
    out = _apply_valve(valve, z, drawn(12, seed=1))
    assert (out >= 0).all()
    assert_same(out[:1], _apply_valve(valve, z[:1], drawn(12, seed=1)))
    assert (out - _apply_valve(valve, z, drawn(12, seed=2))).abs().max() > 0.1
    assert_same(_apply_valve(open_valve(valve), z, drawn(12)), z.relu())
    assert _apply_valve(valve, z, torch.full((12,), -1e6)).isfinite().all()


def test_a_client_of_one_class_is_led_by_its_embedding_and_one_of_all_by_their_mean(net, started):
    server, client = started
    params = GPFL().start(server, client)
    assert_same(GPFL().evaluated(server, client, params)["condition"], server["embeddings"][2])
    uniform = client | {"frequencies": torch.full((CLASSES,), 1 / CLASSES)}
    assert_close(
        GPFL().evaluated(server, uniform, params)["condition"], server["embeddings"].mean(0)
    )


def test_frequencies_are_of_all_samples(backend, net, federation):
    state = record_states(GPFL(), net, federation, COHORTS[:1], engine=backend)[-1]
    for client in COHORTS[0]:
        labels = federation.y[federation.train[client]]
        wanted = torch.stack([(labels == c).float().mean() for c in range(CLASSES)])
        assert_close(state.clients["frequencies"][client], wanted)
    assert_close(state.clients["frequencies"][7], torch.full((CLASSES,), 1 / CLASSES))


def test_guidance_of_one_sample_is_the_same_either_way_and_of_many_grows_with_their_root(
    net, started
):
    """As far as the distance goes: 16 copies of a sample are 4 times as far as one."""
    server, client = started
    params, x, y = GPFL().start(server, client), drawn(1, 1, 8, 8), torch.tensor([2])

    def told(count, guidance):
        batch = Batch(x.expand(count, -1, -1, -1), y.expand(count))
        far, near = (
            GPFL(lam, 0.0, guidance).loss(server, client, net.bind({"main": {}}), params, batch)
            for lam in (1, 0)
        )
        return far - near

    assert_close(told(1, "frobenius"), told(1, "mean"))
    assert_close(told(16, "frobenius"), 4 * told(16, "mean"))
    assert_close(told(16, "mean"), told(1, "mean"))


def test_the_loss_decays_embeddings_and_valve_alone_and_sees_angles_alone(net, started):
    server, client = started
    params, bound = GPFL().start(server, client), net.bind({"main": {}})
    batch = Batch(drawn(8, 1, 8, 8), torch.arange(8) % CLASSES)
    decayed = {}
    for mu in (0.0, 0.5):
        decayed[mu], _ = bound.gradient(
            lambda bound, params, batch, mu=mu: GPFL(mu=mu).loss(
                server, client, bound, params, batch
            ),
            params,
            batch,
        )
    for part in ("embeddings", "valve"):
        added = tree.map(
            lambda a, b, value: a - b - 0.5 * value,
            decayed[0.5][part],
            decayed[0.0][part],
            params[part],
        )
        assert_close(added, tree.full_like(added, 0.0), atol=1e-6)
    assert_same(*(tree.select(decayed[mu], ("body", "head")) for mu in (0.0, 0.5)))
    longer = {**params, "embeddings": 3 * params["embeddings"]}
    one, other = (GPFL(mu=0.0).loss(server, client, bound, own, batch) for own in (params, longer))
    assert_close(one, other)


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


def test_alone_a_clients_upload_comes_back_and_no_other_head_moves(backend, net, federation):
    state = record_states(GPFL(), net, federation, COHORTS[:1], engine=backend)[-1]
    part = participate(GPFL(), net, federation, state, [2], engine=backend)
    server, _ = GPFL().aggregate(
        state.server, part.client_states, None, part.uploads, torch.ones(1), None
    )
    assert_close(server, client_row(part.uploads, 0))
    after = record_states(GPFL(), net, federation, COHORTS[:2], engine=backend)[-1]
    assert_same(client_row(after.clients["head"], 3), client_row(state.clients["head"], 3))
