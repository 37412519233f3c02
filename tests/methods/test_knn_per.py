"""kNN-Per (arXiv:2111.09360): FedAvg as a limit, votes of neighbours, what is laid by."""

import torch

from fedpfl.engine import FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.participation import OneClient
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground.tree import Ragged
from fedpfl.methods import Batch, FedAvg, KNNPer
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    hold_out_quarter,
    record_states,
)

EVERYONE = list(range(10))


def drawn(count, width=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=g), torch.randint(CLASSES, (count,), generator=g)


def kept(z, y, real=None):
    return Ragged({"z": z, "y": y}, torch.ones(len(y), dtype=torch.bool) if real is None else real)


def laid_by(method, net, federation, client, state):
    shard = make_shard(federation, client, 32, Draws(0, "adapt", 1))
    own = state.client(client)
    found = OneClient(client).one_by_one(
        lambda number, own: method.before_evaluation(
            state.server, own, net.bind({"main": {}}, True), shard
        ),
        own,
    )
    return method.personal(state.server, own | found)


def test_a_stored_sample_is_its_own_nearest_and_only_own_classes_are_told(net, federation):
    method, state = KNNPer(k=1, lam=1.0), record_states(FedAvg(), net, federation, COHORTS[:1])[-1]
    y = federation.y[federation.train[4]]
    told = method.predict(
        net.bind({"main": {}}),
        laid_by(method, net, federation, 4, state),
        Batch(federation.normalize(federation.x[federation.train[4]]), None),
    )
    assert told.argmax(1).tolist() == y.tolist()
    many = KNNPer(k=50, lam=1.0)
    everything = Batch(federation.normalize(federation.x), None)
    told = many.predict(
        net.bind({"main": {}}), laid_by(many, net, federation, 5, state), everything
    )
    assert told.isfinite().all()
    assert {*told.argmax(1).tolist()} <= {*federation.y[federation.train[5]].tolist()}


def test_votes_are_probabilities_and_know_no_order():
    (keys, y), (z, _) = drawn(30), drawn(7, seed=1)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    rotation = torch.linalg.qr(drawn(12, seed=3)[0])[0]
    for distance in ("squared", "euclidean"):
        method = KNNPer(k=5, distance=distance)
        votes = method._votes(z, *kept(keys, y), CLASSES)
        assert_close(votes.sum(1), torch.ones(7, dtype=torch.float64))
        assert_close(method._votes(z, *kept(keys[order], y[order]), CLASSES), votes)
        assert_close(
            method._votes(z @ rotation, *kept(keys @ rotation, y), CLASSES), votes, atol=1e-5
        )
        twice = KNNPer(k=10, distance=distance)._votes(
            z, *kept(keys.repeat(2, 1), y.repeat(2)), CLASSES
        )
        assert_close(twice, votes)
        padded = kept(
            torch.cat([keys, 0 * keys]), torch.cat([y, 0 * y]), torch.arange(60) < 30
        )  # as a client has them beside one of more
        assert_same(method._votes(z, *padded, CLASSES), votes)


def test_a_wide_kernel_counts_labels_and_a_narrow_one_sees_the_nearest_alone():
    (keys, y), (z, _) = drawn(30), drawn(7, seed=1)
    wide = KNNPer(k=99, scale=1e12)._votes(z, *kept(keys, y), CLASSES)
    shares = torch.bincount(y, minlength=CLASSES).double() / 30
    assert_close(wide, shares.expand(7, -1), atol=1e-9)
    narrow = KNNPer(scale=1e-12)._votes(z, *kept(keys, y), CLASSES)
    nearest = y[torch.cdist(z, keys).argmin(1)]
    assert_same(narrow, torch.nn.functional.one_hot(nearest, CLASSES).double())


def test_probabilities_and_logits_are_mixed_as_they_say():
    votes, logits = (
        torch.tensor([[0.9, 0.1, 0.0]], dtype=torch.float64),
        torch.tensor([[0.0, 3.0, -100.0]]),
    )
    lam = torch.tensor(0.5)
    mixed = KNNPer()._mix_votes(logits, votes, lam)
    assert_close(mixed[0, :2].exp(), (votes[0, :2] + logits[0].softmax(0)[:2]).float() / 2)
    assert mixed.isfinite().all()
    assert_close(KNNPer(mix="logits")._mix_votes(logits, votes, lam), (votes + logits).float() / 2)


def test_as_many_samples_are_laid_by_as_there_is_room(net, federation):
    state = record_states(FedAvg(), net, federation, COHORTS[:1])[-1]
    whole = laid_by(KNNPer(), net, federation, 0, state)["memory"].values
    for capacity, count in ((5, 5), (99, 40)):
        own = laid_by(KNNPer(capacity=capacity), net, federation, 0, state)["memory"].values
        rows = [(whole["z"] == z).all(1).nonzero().item() for z in own["z"]]
        assert len({*rows}) == count == len(own["y"])
        assert_same(whole["y"][rows], own["y"])
        assert capacity > 40 or rows != [0, 1, 2, 3, 4]


def test_only_who_tunes_lam_looks_at_held_out_samples(net, federation):
    assert KNNPer(lam=None).validates
    assert not KNNPer().validates
    held = hold_out_quarter(federation)
    state = record_states(FedAvg(), net, held, COHORTS[:1])[-1]
    assert float(laid_by(KNNPer(lam=None), net, held, 0, state)["lam"]) > 0
    assert (
        float(laid_by(KNNPer(lam=None), net, federation, 0, state)["lam"]) == 0
    )  # nothing to judge by


def test_fine_tuning_moves_the_head_alone(backend, net, federation):
    method, state = KNNPer(), record_states(FedAvg(), net, federation, COHORTS[:1])[-1]
    params = laid_by(method, net, federation, 0, state)
    (phase,) = method.finetuning(params, net.parts, 2)
    assert {name for name, moves in phase.mask["model"].items() if moves} == {*HEAD}
    assert phase.mask["memory"] is phase.mask["lam"] is False
    runner, tuning = (
        make_backend(as_engine(backend), net, CPU),
        FineTuning(LOCAL, Draws(0, "finetune", 1)),
    )
    tuned = runner.evaluate(EvalCall(method, federation, state, EVERYONE, tuning))
    assert (tuned.loss != runner.evaluate(EvalCall(method, federation, state, EVERYONE)).loss).any()
