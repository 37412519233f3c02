"""pFedMe: the loss it tells, fine-tuning, and step sizes without a pull."""

import torch
import torch.nn.functional as F

from fedpfl.engine import Engine, FineTuning, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedAvg, PFedMe
from tests.conftest import CPU, LOCAL, PLAIN, assert_close, assert_same, record_rounds

EVERYONE = list(range(10))


def test_the_loss_of_training_is_that_of_the_model_a_minibatch_begins_with(
    backend, net, federation
):
    """Of one full batch: the received model's, not that of the inner steps after it."""
    _, (outcome,) = record_rounds(
        PFedMe(inner_lr=0.1), net, federation, [[0, 2]], engine=backend, local=PLAIN
    )
    for client, loss in zip((0, 2), outcome.loss, strict=True):
        x, y = (
            federation.normalize(federation.x[federation.train[client]]),
            federation.y[federation.train[client]],
        )
        assert_close(
            {"": loss.float()}, {"": F.cross_entropy(net.bind({})(net.params, x), y)}, atol=1e-5
        )


def test_fine_tuning_moves_the_private_model_by_sgd(backend, net, federation):
    """Of an unseen client: FedAvg's global model, fine-tuned."""
    state, tuning = (
        make_initial_state(PFedMe(), net, 10, CPU),
        FineTuning(LOCAL, Draws(0, "finetune", 0)),
    )
    fedavg = make_initial_state(FedAvg(), net, 10, CPU)
    judge = make_backend(Engine(backend), net, CPU)
    tuned = judge.evaluate(EvalCall(PFedMe(), federation, state, EVERYONE, tuning))
    assert_same(tuned, judge.evaluate(EvalCall(FedAvg(), federation, fedavg, EVERYONE, tuning)))
    assert not torch.equal(
        tuned.loss, judge.evaluate(EvalCall(PFedMe(), federation, state, EVERYONE)).loss
    )


def test_without_a_pull_no_step_is_too_long():
    assert PFedMe(lam=0.0, inner_lr=5.0, outer_lr=5.0).inner_lr == 5.0
