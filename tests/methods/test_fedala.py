"""FedALA (arXiv:2212.01197): weights of one and zero, how they are learned and for how long."""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import FedALA, LocalOnly
from fedpfl.methods.fedala import merge_models
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    LOOP,
    as_engine,
    assert_close,
    assert_same,
    client_row,
    record_states,
    tiny,
    with_client_states,
)

ALL = 3


@pytest.fixture(scope="module")
def played(net, federation):
    """Three rounds, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_states(method, net, federation, engine=backend)
    )


@dataclasses.dataclass(frozen=True)
class FromZero(FedALA):
    """All weights are 0 at first."""

    def init(self, params, parts):
        server, client = super().init(params, parts)
        return server, {**client, "weights": tree.full_like(client["weights"], 0.0)}


def learned(method, net, federation, state, client, seed=0, buffers=None):
    """A client's tree with the weights that its next round would start from."""
    shard = make_shard(federation, client, LOCAL.batch_size, Draws(seed, "train", 9))
    bound = net.bind(buffers or {"main": {}}, training=True)
    own = state.client(client)
    return own | method.before_training(state.server, own, bound, shard)


def test_weights_of_zero_keep_the_top_and_share_the_rest(net, federation):
    method = FromZero(eta=0.0)
    state = record_states(method, net, federation)[-1]
    model = method.personal(state.server, state.client(2))
    for name in net.params:
        kept = client_row(state.clients["top"], 2)[name] if name in HEAD else state.server[name]
        assert torch.equal(model[name], kept), name
    assert not torch.equal(model["classifier.weight"], state.server["classifier.weight"])


def test_weights_of_zero_everywhere_are_local_only(backend, net, federation):
    everyone = [list(range(10))] * 3
    method = FromZero(layers=ALL, eta=0.0)
    own = record_states(method, net, federation, everyone, engine=backend)
    for state, local in zip(
        own, record_states(LocalOnly(), net, federation, everyone, engine=backend), strict=True
    ):
        assert_same(state.clients["top"], local.clients["model"])


def test_merging_is_exact_at_both_ends():
    generator = torch.Generator().manual_seed(0)
    own, shared = ({"a": 100 * torch.randn(1000, generator=generator)} for _ in range(2))
    for value, wanted in ((1.0, shared), (0.0, own)):
        assert_same(merge_models(tree.full_like(own, value), own, shared), wanted)
    half = merge_models(tree.full_like(own, 0.25), own, shared)
    assert_close(half, {"a": 0.75 * own["a"] + 0.25 * shared["a"]}, atol=1e-4)


def test_weights_stay_between_zero_and_one_and_equal_entries_stay(net, federation):
    method = FedALA(eta=50.0)
    state = record_states(method, net, federation)[-1]
    client = state.client(2)
    own = {name: value.clone() for name, value in client["top"].items()}
    own["classifier.weight"][0] = state.server["classifier.weight"][0]
    state = with_client_states(state, client={"top": tree.repeat(own, 10)})
    found = learned(method, net, federation, state, 2)["weights"]
    for leaf in tree.leaves(found):
        assert ((leaf >= 0) & (leaf <= 1)).all()
    assert torch.equal(found["classifier.weight"][0], client["weights"]["classifier.weight"][0])
    assert (found["classifier.weight"] < 1).any()
    assert 0 in tree.ravel(found).tolist()


@pytest.mark.parametrize("layers", [1, 2])
def test_learning_changes_the_weights_alone(layers, played, net, federation):
    method = FedALA(layers=layers)
    state = played(method)[-1]
    before = tree.clone({"server": state.server, "clients": state.clients})
    client = learned(method, net, federation, state, 2)
    assert_same({"server": state.server, "clients": state.clients}, before)
    assert_same(client["top"], client_row(state.clients["top"], 2))
    start = method._begin(state.server, client)
    for name in net.params:
        if name not in client["top"]:
            assert torch.equal(start[name], state.server[name])


def test_learning_on_kept_features_is_learning_by_whole_forwards(played, net, federation):
    state = played(FedALA())[-1]

    @dataclasses.dataclass(frozen=True)
    class Whole(FedALA):
        def _objective(self, server, client, net, batch):
            return lambda top: batch.loss(net({**server, **top}, batch.x))

    fast, slow = (learned(m, net, federation, state, 2)["weights"] for m in (FedALA(), Whole()))
    assert_close(fast, slow, atol=1e-6)
    assert (fast["classifier.weight"] < 1).any()


def epochs(method, net, federation, state, client):
    """How many epochs the learning takes."""
    count, inner = [0], method._objective

    class Counting(type(method)):
        def _objective(self, server, client, net, batch):
            objective = inner(server, client, net, batch)

            def counted(top):
                count[0] += 1
                return objective(top)

            return counted

    fields = dataclasses.asdict(method)
    learned(Counting(**fields), net, federation, state, client)
    batches = make_shard(federation, client, LOCAL.batch_size, Draws(0, "train", 9)).batches(
        "weights", 0, method.share
    )
    return count[0] / len(list(batches))


def test_the_first_time_lasts_until_the_loss_settles_and_later_ones_an_epoch(
    played, net, federation
):
    state = played(FedALA())[1]
    assert not state.clients["settled"][2]
    assert epochs(FedALA(), net, federation, state, 2) == 11
    assert epochs(FedALA(window=4), net, federation, state, 2) == 5
    assert epochs(FedALA(threshold=0.0, max_epochs=17), net, federation, state, 2) == 17
    assert epochs(FedALA(max_epochs=3), net, federation, state, 2) == 3
    state = played(FedALA())[2]  # client 2 took part in both
    assert state.clients["settled"].tolist() == [client == 2 for client in range(10)]
    assert epochs(FedALA(), net, federation, state, 2) == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("layers", [1, 2])
def test_losses_that_are_not_finite_end_the_learning_without_an_error(
    layers, value, net, federation
):
    """Training, which goes on from there, says that it diverged."""
    method = FedALA(layers=layers)
    state = record_states(method, net, federation, COHORTS[:1])[-1]
    assert epochs(method, net, federation, state, 2) == 11
    state.server["classifier.bias"][0] = value
    assert epochs(method, net, federation, state, 2) == 1


def test_a_threshold_between_waits(played, net, federation):
    """Large steps make the losses fall for longer than eleven epochs."""
    state = played(FedALA())[1]
    counts = [
        epochs(FedALA(eta=5.0, threshold=t), net, federation, state, 2) for t in (0.1, 1e-3, 1e-5)
    ]
    assert counts == sorted(counts)
    assert 11 <= counts[0] < counts[-1]


@pytest.mark.parametrize(
    ("losses", "threshold", "wanted"),
    [
        ([0.0, 0.0, 0.3, 0.12, 0.12], 0.1, 4),  # deviations 0 (too early), 0.15, 0.09
        ([0.0, 0.0, 0.5, 0.5, 0.5], 0.25, 4),  # 0.25 is not below
        ([0.0, 0.3, 0.3, 0.3, 0.3], 0.1, 3),
    ],
)
def test_it_settles_when_the_standard_deviation_of_the_last_losses_is_below_the_threshold(
    losses, threshold, wanted, net, federation
):
    """That of the last `window` losses themselves, over their number (arXiv:2212.01197 and its
    code). Of an epoch's two minibatches the last one counts.
    """
    given_losses, made = iter(losses), []

    class Told(FedALA):
        def _objective(self, server, client, net, batch):
            made.append(len(batch.y))
            last = len(made) == 2
            return lambda top: 0 * tree.ravel(top).sum() + (next(given_losses) if last else 100.0)

    state = record_states(FedALA(), net, federation, COHORTS[:1])[-1]
    learned(Told(threshold=threshold, window=2, max_epochs=5), net, federation, state, 2)
    assert made == [32, 20]  # of 80 % of 65
    assert len(losses) - len(list(given_losses)) == wanted


def test_weights_are_kept_from_round_to_round_and_judging_keeps_none(
    backend, played, net, federation
):
    method = FedALA()
    states = played(method, backend)
    first, second = (client_row(state.clients["weights"], 2) for state in (states[1], states[2]))
    assert_same(first, tree.full_like(first, 1.0))
    assert not torch.equal(second["classifier.weight"], first["classifier.weight"])
    before = tree.clone(states[2].clients)
    make_backend(as_engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, states[2], list(range(10)))
    )
    assert_same(states[2].clients, before)


def test_judging_learns_first(net, federation):
    method = FedALA(eta=20.0)
    state = record_states(method, net, federation)[-1]
    runner = make_backend(LOOP, net, CPU)
    clients = [0, 1, 2, 5]
    learned_first = runner.evaluate(EvalCall(method, federation, state, clients))
    at_once = runner.evaluate(EvalCall(FedALA(eta=0.0), federation, state, clients))
    assert (learned_first.loss != at_once.loss).all()


def test_a_client_that_never_trained_has_the_global_model(backend, net, federation):
    method = FromZero()
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    assert_same(
        method.personal(state.server, learned(method, net, federation, state, 7)), state.server
    )


def test_a_client_without_a_minibatch_keeps_its_weights(played, net, federation):
    """80 % of two samples is a lone one."""
    method = FedALA()
    state = played(method)[-1]
    assert state.client(8)["participated"]
    assert_same(
        learned(method, net, federation, state, 8)["weights"],
        client_row(state.clients["weights"], 8),
    )


def test_the_part_of_the_data_is_drawn_anew(played, net, federation):
    method = FedALA()
    state = played(method)[-1]
    one, other = (learned(method, net, federation, state, 2, seed)["weights"] for seed in (0, 1))
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])


def test_batch_normalisation_stays(backend, federation):
    net, method = tiny(norm=True), FedALA(layers=2)
    state = record_states(method, net, federation, engine=backend)[-1]
    bound = net.bind(state.server_buffers, training=True)
    shard = make_shard(federation, 2, LOCAL.batch_size, Draws(0, "train", 9))
    method.before_training(state.server, state.client(2), bound, shard)
    assert_same(bound.buffers, state.server_buffers)
