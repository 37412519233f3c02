"""FedProto (arXiv:2105.00243): Local-Only as a limit, prototypes, the nearest of them, traffic."""

import dataclasses

import pytest
import torch

from fedpfl.engine import FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedProto
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    PLAIN,
    as_engine,
    assert_close,
    assert_same,
    client_row,
    participate,
    record_rounds,
    record_states,
)

EVERYONE = list(range(10))


@pytest.fixture(scope="module")
def second(net, federation):
    """The state after two rounds."""
    return record_states(FedProto(), net, federation, COHORTS[:2])[-1]


@pytest.mark.parametrize("weights", ["uniform", "counts"])
def test_alone_a_clients_prototypes_are_the_servers(weights, backend, net, federation, second):
    method = FedProto(weights=weights)
    part = participate(method, net, federation, second, [2], engine=backend)
    server, _ = method.aggregate(second.server, {}, None, part.uploads, torch.ones(1), None)
    present = part.uploads.mask["mean"][0, :, 0]
    assert_same(server["mean"][present], part.uploads.values["mean"][0][present])
    assert_same(server["mean"][~present], second.server["mean"][~present])


def test_a_prototype_lies_between_the_clients_own_and_one_that_nobody_has_stays(
    backend, net, federation, second
):
    y = federation.y.clone()
    for client in (1, 8):
        y[federation.train[client]] = torch.arange(len(federation.train[client])) % 2
    part = participate(
        FedProto(), net, dataclasses.replace(federation, y=y), second, [1, 8], engine=backend
    )
    server, _ = FedProto().aggregate(second.server, {}, None, part.uploads, torch.ones(2) / 2, None)
    means = part.uploads.values["mean"][:, :2]
    assert (server["mean"][:2] >= means.amin(0) - 1e-6).all()
    assert (server["mean"][:2] <= means.amax(0) + 1e-6).all()
    assert_close(server["mean"][:2], means.mean(0))
    assert_same(server["mean"][2:], second.server["mean"][2:])


def test_the_pull_is_zero_at_the_prototype_and_never_reaches_the_head(
    backend, net, federation, second
):
    params, x = (
        client_row(second.clients["model"], 0),
        federation.normalize(federation.x[federation.train[0][:1]]),
    )
    logits, z = net.bind({"main": {}}).features(params, x)
    at = {"mean": z.detach().expand(CLASSES, -1), "seen": torch.ones(CLASSES, dtype=torch.bool)}
    batch = Batch(x, federation.y[federation.train[0][:1]])
    assert_same(
        FedProto(9.0).loss(at, {}, net.bind({"main": {}}), params, batch)[0],
        batch.loss(logits),
    )
    with_it, without = (
        participate(
            FedProto(lam), net, federation, second, [2], engine=backend, local=PLAIN
        ).client_states["model"]
        for lam in (9.0, 0.0)
    )
    assert_same(tree.select(with_it, HEAD), tree.select(without, HEAD))
    assert (with_it["fc.weight"] - without["fc.weight"]).abs().max() > 1e-3


def test_a_sample_is_of_the_class_whose_prototype_is_nearest(net, federation, second):
    """Of those that there are: class 1 has none, and its place in `mean` is nearest to all."""
    seen = torch.tensor([True, False, True, True, True])
    x = federation.normalize(federation.x[federation.train[4]])
    z = net.bind({"main": {}}).features(client_row(second.clients["model"], 4), x)[1]
    mean = torch.where(seen[:, None], second.server["mean"], z.mean(0))
    params = {"model": client_row(second.clients["model"], 4), "mean": mean, "seen": seen}
    logits = FedProto().predict(net.bind({"main": {}}), params, Batch(x, None))
    far = (z[:, None] - mean).square().sum(2).masked_fill(~seen, torch.inf)
    assert logits.argmax(1).tolist() == far.argmin(1).tolist()
    assert logits.isfinite().all()
    assert_close(logits[:, 0] - logits[:, 2], far[:, 2] - far[:, 0], atol=1e-5)


def test_before_the_first_round_and_fine_tuned_it_predicts(backend, net, federation):
    runner, tuning = (
        make_backend(as_engine(backend), net, CPU),
        FineTuning(LOCAL, Draws(0, "finetune", 1)),
    )
    for method in (FedProto(), FedProto(judge="nearest_own")):
        states = record_states(method, net, federation, COHORTS[:1])
        head = runner.evaluate(EvalCall(FedProto(judge="head"), federation, states[0], EVERYONE))
        assert_same(
            runner.evaluate(EvalCall(method, federation, states[0], EVERYONE)).correct, head.correct
        )
        assert (
            runner.evaluate(EvalCall(method, federation, states[1], EVERYONE, tuning))
            .loss.isfinite()
            .all()
        )


@pytest.mark.parametrize(("weights", "more"), [("uniform", 0), ("counts", 1)])
def test_what_travels(weights, more, backend, net, federation):
    """The last client has one sample, and makes no step."""
    states, outcomes = record_rounds(FedProto(weights=weights), net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        classes = [len(federation.y[federation.train[i]].unique()) for i in cohort if i != 9]
        assert outcomes[t].traffic.values_up >= (12 + more) * (
            sum(classes) - 2
        )  # a dropped lone sample's class
        assert outcomes[t].traffic.values_up <= (12 + more) * sum(classes)
        assert outcomes[t].traffic.values_up % (12 + more) == 0
        assert outcomes[t].traffic.values_down == len(cohort) * 12 * int(
            states[t].server["seen"].sum()
        )
