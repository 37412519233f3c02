"""SDFLoRA's stacks are compressed to the nearest of their rank."""

import torch

from fedpfl.methods.sdflora import compress_pair, stack_pairs
from tests.conftest import assert_close


def test_a_stack_is_compressed_to_the_nearest_of_its_rank():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 2, 9, generator=g), torch.randn(3, 2, 7, 2, generator=g)
    weight = torch.tensor([0.5, 0.2, 0.3])
    whole = (weight.view(-1, 1, 1, 1) * (b @ a)).sum(0)
    for rank in (2, 6):
        low, up = compress_pair(*stack_pairs(a, b, weight), rank)
        assert (low.shape, up.shape) == ((2, rank, 9), (2, 7, rank))
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        nearest = (u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]
        assert_close({"": up @ low}, {"": nearest}, atol=1e-5)
        assert_close({"": low @ low.mT}, {"": torch.eye(rank).expand(2, rank, rank)}, atol=1e-5)
    assert_close({"": up @ low}, {"": whole}, atol=1e-5)  # rank 6 holds all
    images = a[:, 0].reshape(3, 2, 1, 3, 3), b[:, 0].reshape(3, 7, 2, 1, 1)
    assert_close(
        {"": torch.cat(compress_pair(*stack_pairs(*images, weight), 6)[:1])},
        {"": low[:1]},
        atol=1e-5,
    )
    low, up = compress_pair(*stack_pairs(a, 0 * b, weight), 2)  # of what nobody has trained
    assert not up.any()
    assert (low.square().sum(-1) > 0.9).all()  # and B has a gradient still
