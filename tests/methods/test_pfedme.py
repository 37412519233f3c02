"""pFedMe: the loss it tells, fine-tuning, and step sizes without a pull."""

import torch.nn.functional as F

from fedpfl.engine import FineTuning, make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedAvg, PFedMe
from tests.conftest import (
    CPU,
    LOCAL,
    PLAIN,
    assert_close,
    assert_same,
    differing,
    evaluate,
    record_rounds,
)


def test_the_loss_of_training_is_that_of_the_model_a_minibatch_begins_with(
    backend, net, federation
):
    """Of one full batch: the received model's, not that of the inner steps after it."""
    _, (outcome,) = record_rounds(
        PFedMe(inner_lr=0.1), net, federation, [[0, 2]], engine=backend, local=PLAIN
    )
    for client, loss in zip((0, 2), outcome.loss, strict=True):
        own = federation.train[client]
        logits = net.bind({})(net.params, federation.normalize(federation.x[own]))
        assert_close(loss.float(), F.cross_entropy(logits, federation.y[own]), atol=1e-5)


def test_fine_tuning_moves_the_private_model_by_sgd(backend, net, federation):
    """Of an unseen client: FedAvg's global model, fine-tuned."""
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 0))
    tuned, fedavgs, plain = (
        evaluate(method, net, federation, state, backend, tuning=own)
        for method, own in ((PFedMe(), tuning), (FedAvg(), tuning), (PFedMe(), None))
        for state in [make_initial_state(method, net, 10, CPU)]
    )
    assert_same(tuned, fedavgs)
    assert differing(tuned.loss, plain.loss)


def test_without_a_pull_no_step_is_too_long():
    assert PFedMe(lam=0.0, inner_lr=5.0, outer_lr=5.0).inner_lr == 5.0
