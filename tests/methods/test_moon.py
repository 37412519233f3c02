"""MOON's projection (arXiv:2103.16257) is part of the network."""

import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.ground import tree
from tests.conftest import HEAD, assert_close


def test_the_papers_projection_is_part_of_the_network():
    """1,269,962 scalars instead of 878,538; z is the classifier's input and may be negative."""
    net = models.build_network("cnn4", (3, 32, 32), 10, 0, projection=256)
    assert tree.size(net.params) == 1_269_962
    assert net.parts.head == HEAD
    logits, z = net.bind({}).features(net.params, torch.rand(4, 3, 32, 32))
    assert z.shape == (4, 256)
    assert (z < 0).any()
    assert_close(logits, F.linear(z, *(net.params[name] for name in HEAD)))
