"""Plans of many clients' steps against plain loops over minibatches, and pooling of models side by
side.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedpfl.data.augment import Augment
from fedpfl.engine.backends import planning
from fedpfl.engine.backends.planning import evaluation_batches, plan_training_steps
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.jobs import ClientRow, TrainJob
from fedpfl.engine.training.sgd import Local, TrainPlan
from fedpfl.methods import FedAvg, Phase
from fedpfl.models.pool import max_pool
from tests.conftest import assert_close, assert_same, make_federation

DRAWS = Draws(3, "train", 2)


class Drawing(FedAvg):
    randoms = 2

    def loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params, batch) + batch.random.sum()


def planned(sizes, phase, epochs, batch, width, augment):
    federation = replace(make_federation(sizes, (1,) * len(sizes)), augment=augment)
    rows = [ClientRow(federation, client) for client in range(len(sizes))]
    job = TrainJob(
        Drawing(),
        rows,
        [DRAWS] * len(rows),
        TrainPlan(None, [phase], Local(1, batch, 0.1)),
        {},
        {},
        {},
        {},
    )
    return federation, plan_training_steps(job, phase, epochs, batch, width)


def dealt(federation, client, phase, epochs, batch):
    """What each step of a client takes, minibatch by minibatch: positions, as in a plain loop."""
    found, samples = [], len(federation.train[client])
    for epoch in epochs:
        order = DRAWS.order(client, phase.stream, epoch, samples)
        own = [part for part in order.split(batch) if len(part) > 1]
        whole = [own[i : i + phase.batches] for i in range(0, len(own), phase.batches)]
        found += [
            (epoch, number, step) for number, step in enumerate(whole) if len(step) == phase.batches
        ]
    return found


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("sizes", [(33, 24, 17, 9, 8, 3, 1, 0), (5, 3, 2), (1, 0), (9, 9)])
def test_steps_side_by_side_are_those_of_a_plain_loop(sizes, width, together):
    phase, epochs = Phase(1, stream="head", batches=together), range(1, 4)
    federation, ((numbers, weight, randoms, views), active) = planned(
        sizes, phase, epochs, 8, width, Augment(flip=True)
    )
    indices, places = numbers.unbind(2)
    own = [dealt(federation, client, phase, epochs, 8) for client in range(len(sizes))]
    assert len(indices) == len(active) == max(map(len, own))
    for step, rows in enumerate(active):
        assert rows == sum(len(steps) > step for steps in own)
        for row in range(rows):
            epoch, number, batches = own[row][step]
            count = sum(own == epoch for own, *_ in own[row])
            drawn = DRAWS.random(row, "head", epoch, together * min(8, sizes[row]) * count, 2)
            drawn = drawn.view(together, -1, count, 2)[:, :, number]
            seen = DRAWS.random(row, "head", epoch, sizes[row], Augment.NUMBERS, "views")
            for k, positions in enumerate(batches):
                real = weight[step, row, k] > 0
                assert real.sum() == len(positions)
                assert bool(real[: len(positions)].all())
                assert_same(indices[step, row, k][real], federation.train[row][positions])
                assert_same(places[step, row, k][real], positions)
                assert_same(randoms[step, row, k][real], drawn[k, : len(positions)])
                assert_same(views[step, row, k][real], seen[positions])
    longest = max((len(part) for steps in own for *_, step in steps for part in step), default=0)
    assert indices.shape[-1] == max(width, longest)
    assert set(weight.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("sizes", [(9, 3, 12, 0, 8), (0, 2), (5,), (0, 0)])
def test_passes_give_every_sample_once(sizes, chunk, monkeypatch):
    monkeypatch.setattr(planning, "CHUNK", chunk)
    federation = make_federation(sizes, (1,) * len(sizes))
    found = [[] for _ in sizes]
    random = [torch.rand(size, 3) for size in sizes]
    for rows, batch in evaluation_batches(federation, federation.train, random):
        numbers = torch.arange(len(sizes))[rows].tolist()
        assert batch.x.shape[1] <= chunk
        for row, real, *parts in zip(
            numbers, batch.weight > 0, batch.x, batch.y, batch.random, batch.indices, strict=True
        ):
            found[row] += zip(*(part[real] for part in parts), strict=True)
            assert not parts[-1][~real].any()
    for own, index, drawn in zip(found, federation.train, random, strict=True):
        assert len(own) == len(index)
        if own:
            expected = (
                federation.normalize(federation.x[index]),
                federation.y[index],
                drawn,
                torch.arange(len(index)),
            )
            assert_same([torch.stack(part) for part in zip(*own, strict=True)], list(expected))


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
        pooled, expected = (
            vmap(lambda w, x, pool=pool: pool(F.conv2d(x, w), 2), (0, x_dim))(
                w, x if x_dim == 0 else x[0]
            )
            for pool in (max_pool, F.max_pool2d)
        )
        assert_same(pooled, expected)
        assert_close(results(max_pool, x_dim), results(F.max_pool2d, x_dim), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "size"), [((3, 5, 8, 8), 2), ((2, 3, 7, 9), 2), ((2, 3, 7, 9), 3)]
)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_pooling_without_gradients_is_pytorchs_to_the_bit(shape, size, dtype, layout):
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .contiguous(memory_format=layout)
    )
    x[0, 0, 0, 0], x[-1, -1, 0, 1], x[-1, -1, 1, 1] = torch.nan, torch.inf, -torch.inf
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    pooled, expected = max_pool(x, size), F.max_pool2d(x, size)
    assert torch.equal(pooled.contiguous().view(integer), expected.contiguous().view(integer))
    assert pooled.is_contiguous(memory_format=layout)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        max_pool(x.requires_grad_(), size)
        with torch.no_grad():
            max_pool(x.detach(), size)
    assert [event.count for event in profile.key_averages() if event.key == "aten::max_pool2d"] == [
        1
    ]
