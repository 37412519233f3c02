"""FedGen (arXiv:2105.10056): the generator learns labels, which are drawn by their shares."""

import torch

from fedpfl.methods.shared import features
from tests.conftest import CLASSES, assert_close


def generator(seed=0):
    return features.init_generator(
        5, 8, torch.empty(CLASSES, 12), torch.Generator().manual_seed(seed)
    )


def test_labels_are_drawn_by_their_shares():
    random = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    drawn = (
        torch.bincount(features.draw_labels(torch.tensor([0.0, 1, 0, 3, 0]), random), minlength=5)
        / 5000
    )
    assert_close(drawn, torch.tensor([0, 0.25, 0, 0.75, 0]), atol=0.02)
    assert features.draw_labels(
        torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 1 - 2**-24])
    ).tolist() == [1, 1]
