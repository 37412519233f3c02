"""FedDBE (arXiv:2311.14975): FedAvg as a limit bit for bit, the regulariser and the memories by
hand.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch.func import grad

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, FedDBE
from fedpfl.testing.toy import as_engine
from tests.conftest import (
    COHORTS,
    CPU,
    TRAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_states,
)

UNSEEN, WEIGHT = 7, "classifier.weight"
YES = torch.tensor(True)


class Seen:
    """A network whose features are given as its weights."""

    def features(self, params, x):
        return torch.zeros(len(x), 5), params["features"]


def loss(method, z, running, mean, weight=None, probe=0.0):
    """The method's, of features `z`; the head is zero, so that cross-entropy moves nothing."""
    zero = torch.zeros_like(mean)
    client = {
        name: {WEIGHT: value} for name, value in (("u", zero), ("running", running), ("mean", mean))
    }
    model = {"features": z, WEIGHT: torch.zeros(5, z.shape[1])}
    params = {"model": model, "probe": {"u": {WEIGHT: zero}, "mean": {WEIGHT: zero + probe}}}
    batch = Batch(z, torch.arange(len(z)) % 5, weight)
    return method.loss({"known": YES}, client, Seen(), params, batch)


def test_without_a_running_mean_the_regulariser_is_off(backend, net, federation):
    off, still = (
        record_states(m, net, federation, engine=backend)
        for m in (FedDBE(kappa=0.0), FedDBE(kappa=9.0, rho=0.0))
    )
    for ours, theirs in zip(off, still, strict=True):
        assert_same(ours.server["model"], theirs.server["model"])
        assert_same(ours.clients["u"], theirs.clients["u"])
    on = record_states(FedDBE(kappa=9.0, rho=1.0), net, federation, engine=backend)
    assert differing(on[1].server["model"], off[1].server["model"])


def test_the_regularisers_gradient_is_the_formula():
    """It is kappa rho (s - zbar) / (B d) for each z, of the samples alone; none where s meets zbar."""
    g = torch.Generator().manual_seed(0)
    z, old, zbar = (
        torch.randn(8, 6, generator=g),
        torch.randn(6, generator=g),
        torch.randn(6, generator=g),
    )
    for kappa, rho in ((50.0, 1.0), (3.0, 0.3)):
        method = FedDBE(kappa=kappa, rho=rho)
        s = (1 - rho) * old + rho * z.mean(0)
        wanted = (kappa * rho * (s - zbar) / (8 * 6)).expand(8, 6)
        assert_close(grad(lambda z, m=method: loss(m, z, old, zbar))(z), wanted)
        assert grad(lambda z, m=method, s=s: loss(m, z, old, s))(z).abs().max() < 1e-6
    part = torch.tensor([1.0] * 5 + [0.0] * 3)
    assert_close(loss(FedDBE(), z, old, zbar, part), loss(FedDBE(), z[:5], old, zbar))


def test_the_running_mean_starts_at_zero_and_is_not_corrected():
    """Constant means m give (1 - (1 - rho)^k) m; the probes read off what moves."""
    method, m = FedDBE(rho=0.3, bias_lr=0.5), torch.tensor([1.0, -2.0])
    client = {"u": {WEIGHT: torch.zeros(2)}, "running": {WEIGHT: torch.zeros(2)}}
    for k in range(1, 4):
        grads = {"probe": {"u": {WEIGHT: m}, "mean": {WEIGHT: m}}}
        values = {
            "server": {"known": YES},
            "client": client,
            "params": {},
            "grads": grads,
            "batch": None,
        }
        client = method._advance(**values, loss=None, aux={})
        assert_close(client["running"][WEIGHT], (1 - 0.7**k) * m)
        assert_close(client["u"][WEIGHT], -0.5 * k * m)
    z = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    slope = grad(lambda probe: loss(method, z, m, m, probe=probe))(torch.zeros(2))
    assert_close(slope, z.mean(0))


def test_a_memory_is_an_offset_of_the_logits_through_the_head(net):
    """And its gradient that of head(z + u)."""
    g = torch.Generator().manual_seed(0)
    x, y, u = (
        torch.randn(6, 1, 8, 8, generator=g),
        torch.arange(6) % 5,
        torch.randn(12, generator=g),
    )
    params = {"model": net.params, "u": {WEIGHT: u}}
    bound, batch = net.bind({"main": {}}), Batch(x, y)
    logits, z = bound.features(net.params, x)
    head = [net.params[name] for name in net.parts.head]
    assert_close(FedDBE().predict(bound, params, batch), F.linear(z + u, *head))
    assert_close(
        FedDBE().predict(bound, params, batch) - logits, (net.params[WEIGHT] @ u).expand(6, 5)
    )
    zero = {WEIGHT: torch.zeros(12)}
    client = {"u": {WEIGHT: u}, "running": zero, "mean": zero}

    def of(probe):
        given = {"model": net.params, "probe": {"u": {WEIGHT: probe}, "mean": zero}}
        return FedDBE().loss({"known": YES}, client, bound, given, batch)

    wanted = grad(lambda u: F.cross_entropy(F.linear(z + u, *head), y))(u)
    assert_close(grad(of)(torch.zeros(12)), wanted)


def test_memories_and_the_mean_change_when_they_should(backend, net, federation):
    method = FedDBE(bias_lr=0.1)
    states = record_states(method, net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        for client in range(10):
            changed = differing(
                client_row(states[t].clients["u"], client),
                client_row(states[t + 1].clients["u"], client),
            )
            assert bool(changed) == (client in cohort and TRAIN[client] > 1)
        assert_same(states[t + 1].server["mean"], states[1].server["mean"])
        assert_same(states[t + 1].clients["mean"], tree.repeat(states[1].server["mean"], 10))
    assert not states[0].server["known"]
    again = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    assert_same(
        [client_row(again.client_states["mean"], k) for k in range(5)],
        [states[1].server["mean"]] * 5,
    )


def test_the_datas_mean_is_that_of_all_samples_at_the_initial_model(backend, net, federation):
    """Whatever rho is; nobody trains for it."""
    x = torch.cat([federation.normalize(federation.x[own]) for own in federation.train])
    wanted = net.bind({}).features(net.params, x)[1].mean(0)
    for rho in (1.0, 0.2):
        state = record_states(
            FedDBE(mean="data", rho=rho), net, federation, COHORTS[:1], engine=backend
        )[-1]
        assert_close(state.server["mean"][WEIGHT], wanted)
    trained = record_states(FedDBE(), net, federation, COHORTS[:1], engine=backend)[-1].server[
        "mean"
    ][WEIGHT]
    assert (trained - wanted).abs().max() > 0.01


def test_the_training_mean_leaves_out_who_makes_no_step(backend, net):
    """One client beside one of a single sample: its own last running mean, at rho = 1 of the last
    minibatch.
    """
    both = make_federation((40, 1), (8, 0))
    alone = dataclasses.replace(both, train=both.train[:1], test=both.test[:1])
    one, two = (
        record_states(FedDBE(), net, f, [list(range(f.clients))], engine=backend)[-1].server["mean"]
        for f in (alone, both)
    )
    assert_close(two, one)
    assert one[WEIGHT].abs().max() > 0.01


def test_clients_are_judged_by_the_latest_model_and_their_own_memory(backend, net, federation):
    method = FedDBE(bias_lr=0.5)
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    personal = [method.personal(state.server, state.client(client)) for client in (0, UNSEEN)]
    assert_same(
        personal[0], {"model": state.server["model"], "u": client_row(state.clients["u"], 0)}
    )
    runner = make_backend(as_engine(backend), net, CPU)
    plain = dataclasses.replace(
        record_states(FedAvg(), net, federation, [])[0], server=state.server["model"]
    )
    own, fedavg = (
        runner.evaluate(EvalCall(m, federation, s, [0, UNSEEN])).loss
        for m, s in ((method, state), (FedAvg(), plain))
    )
    assert_close(own[1], fedavg[1])
    assert abs(own[0] - fedavg[0]) > 1e-2
