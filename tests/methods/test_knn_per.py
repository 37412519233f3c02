"""kNN-Per (arXiv:2111.09360): what is laid by, held-out samples, fine-tuning."""

from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.participation import OneClient
from fedpfl.engine.training.shard import make_shard
from fedpfl.methods import FedAvg, KNNPer
from tests.conftest import (
    COHORTS,
    HEAD,
    LOCAL,
    assert_same,
    differing,
    evaluate,
    hold_out_quarter,
    record_states,
)


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
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    tuned, plain = (
        evaluate(method, net, federation, state, backend, tuning=own) for own in (tuning, None)
    )
    assert differing(tuned.loss, plain.loss)
