"""Pooling of models side by side is torch's, with gradients of both orders."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedpfl.models.pool import max_pool
from tests.conftest import assert_close, assert_same


def test_pooling_of_models_is_pytorchs_with_gradients_of_both_orders():
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, 4, 2, 3, 3, generator=g), torch.randn(3, 5, 2, 13, 11, generator=g)

    def results(pool, x_dim):
        images = x if x_dim == 0 else x[0]

        def loss(w, x):
            return (pool(F.conv2d(x, w), 2) ** 3).sum()

        def slope(w, x):
            return (grad(loss)(w, x) ** 2).sum()

        def samples(w, x):
            return vmap(grad(lambda w, x: loss(w, x[None])), (None, 0))(w, x)

        return [vmap(f, (0, x_dim))(w, images) for f in (loss, grad(loss), grad(slope), samples)]

    for x_dim in (0, None):
        convolved = vmap(F.conv2d, (x_dim, 0))(x if x_dim == 0 else x[0], w)
        pooled, expected = (
            vmap(pool, (0, None))(convolved, 2) for pool in (max_pool, F.max_pool2d)
        )
        assert_same(pooled, expected)
        assert_close(results(max_pool, x_dim), results(F.max_pool2d, x_dim), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "size"), [((3, 5, 8, 8), 2), ((2, 3, 7, 9), 2), ((2, 3, 7, 9), 3)]
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_pooling_without_gradients_is_pytorchs_to_the_bit(shape, size, dtype, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype).contiguous(memory_format=layout)
    x[0, 0, 0, 0], x[-1, -1, 0, 1], x[-1, -1, 1, 1] = torch.nan, torch.inf, -torch.inf
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    pooled, expected = max_pool(x, size), F.max_pool2d(x, size)
    assert torch.equal(pooled.contiguous().view(integer), expected.contiguous().view(integer))
    assert pooled.is_contiguous(memory_format=layout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        max_pool(x.requires_grad_(), size)
        with torch.no_grad():
            max_pool(x.detach(), size)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::max_pool2d"] == 1
