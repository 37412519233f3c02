"""FLUTE (arXiv:2406.04596) as published, and its regulariser at its ends."""

import torch

from fedpfl.methods import FLUTE
from fedpfl.methods.flute import collapse_distance
from tests.conftest import CLASSES, assert_close, record_states


def frame(classes=CLASSES, width=12, seed=0):
    """A simplex equiangular tight frame, scaled and turned."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(width, classes, generator=generator))
    return 2.7 * (torch.eye(classes) - 1 / classes) @ turn.T


def test_as_published_the_body_never_moves(backend, net, federation):
    state = record_states(FLUTE(variant="as_published"), net, federation, engine=backend)[-1]
    assert_close(
        state.server, {name: net.params[name] for name in state.server}, atol=1e-7
    )  # a mean of equals
    assert not torch.equal(
        state.clients["head"]["classifier.weight"][2], net.params["classifier.weight"]
    )


def test_a_zero_weight_and_a_perfect_one_have_finite_gradients():
    for weight in (torch.zeros(CLASSES, 12), frame()):
        weight = weight.requires_grad_()
        collapse_distance(weight, torch.ones(CLASSES, dtype=torch.bool)).backward()
        assert weight.grad.isfinite().all()
