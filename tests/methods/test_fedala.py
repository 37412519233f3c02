"""FedALA (arXiv:2212.01197): for how long weights are learned, and that nothing else moves."""

import dataclasses

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import FedALA
from tests.conftest import COHORTS, LOCAL, record_states


def learned(method, net, federation, state, client, seed=0, buffers=None):
    """A client's tree with the weights that its next round would start from."""
    shard = make_shard(federation, client, LOCAL.batch_size, Draws(seed, "train", 9))
    bound = net.bind(buffers or {"main": {}}, training=True)
    own = state.client(client)
    return own | method.before_training(state.server, own, bound, shard)


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


def test_the_first_time_lasts_until_the_loss_settles_and_later_ones_an_epoch(net, federation):
    _, state, later = record_states(FedALA(), net, federation, COHORTS[:2])
    assert not state.clients["settled"][2]
    for values, count in (
        *(({}, 11), ({"window": 4}, 5), ({"max_epochs": 3}, 3)),
        ({"threshold": 0.0, "max_epochs": 17}, 17),
    ):
        assert epochs(FedALA(**values), net, federation, state, 2) == count
    assert later.clients["settled"].tolist() == [client == 2 for client in range(10)]  # in both
    assert epochs(FedALA(), net, federation, later, 2) == 1


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
