"""FedCP (arXiv:2307.01217): the policy's noise is logistic, and of training alone."""

import torch

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import FedCP
from fedpfl.methods.fedcp import BANK
from tests.conftest import CPU, LOOP, assert_same, record_states


def test_noise_is_of_training_alone_and_logistic(net, federation):
    method = FedCP()
    state = record_states(method, net, federation)[-1]
    runner = make_backend(LOOP, net, CPU)
    one, two = (
        runner.evaluate(EvalCall(method, federation, state, list(range(10)))) for _ in range(2)
    )
    assert_same(one.loss, two.loss)
    quiet = runner.evaluate(EvalCall(FedCP(policy_noise="off"), federation, state, list(range(10))))
    assert_same(one.loss, quiet.loss)
    g = torch.Generator().manual_seed(1)
    drawn = method._gumbel_noise(
        torch.rand(2, BANK, 8, generator=g), torch.rand(20_000, 2, generator=g)
    )
    assert abs(float(drawn.mean())) < 0.05
    assert abs(float(drawn.std()) - torch.pi / 3**0.5) < 0.05
    assert len(drawn.unique(dim=0)) > 16_000
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.15
