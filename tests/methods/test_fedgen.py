"""FedGen (arXiv:2105.10056): numbers at the ends of their range are of a label that there is."""

import torch

from fedpfl.methods.shared import features


def test_labels_are_drawn_from_those_that_there_are():
    random = torch.tensor([0.0, 1 - 2**-24])
    assert features.draw_labels(torch.tensor([0.0, 1, 0]), random).tolist() == [1, 1]
