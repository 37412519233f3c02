"""FedALA (arXiv:2212.01197): for how long weights are learned."""

import math

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import FedALA
from tests.conftest import COHORTS, LOCAL, record_states


@pytest.mark.parametrize(
    ("losses", "threshold", "wanted"),
    [
        ([0.0, 0.0, 0.3, 0.12, 0.12], 0.1, 4),  # deviations 0 (too early), 0.15, 0.09
        ([0.0, 0.0, 0.5, 0.5, 0.5], 0.25, 4),  # 0.25 is not below
        ([0.0, 0.3, 0.3, 0.3, 0.3], 0.1, 3),
        ([0.0, 9.0, 0.0, 9.0, 0.0], 0.1, 5),  # never
        ([0.0, math.inf, 0.0, 0.0, 0.0], 0.1, 2),  # training says that it diverged
        ([math.nan] * 5, 0.1, 1),
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
    method = Told(threshold=threshold, window=2, max_epochs=5)
    shard = make_shard(federation, 2, LOCAL.batch_size, Draws(0, "train", 9))
    method.before_training(state.server, state.client(2), net.bind({"main": {}}, True), shard)
    assert made == [32, 20]  # of 80 % of 65
    assert len(losses) - len(list(given_losses)) == wanted
