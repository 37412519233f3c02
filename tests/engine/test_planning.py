"""Plans of many clients' steps against plain loops over minibatches."""

from dataclasses import replace

import pytest
import torch

from fedpfl.data.augment import Augment
from fedpfl.engine.backends import planning
from fedpfl.engine.backends.planning import evaluation_batches, plan_training_steps
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.jobs import ClientRow, TrainJob
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.methods import FedAvg, Phase
from tests.conftest import assert_same, make_federation

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
