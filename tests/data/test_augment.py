"""Augmentation: geometry against torch's own pad, flip and rotation; in training steps alone, alike
on all backends.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedpfl.data import Augment
from fedpfl.engine import FineTuning, make_backend
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training import scripts
from fedpfl.engine.training.minibatches import SampleSource, plan_steps
from fedpfl.methods import FedAvg, Phase
from tests.command import format_override
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    differing,
    read_cases,
    record_rounds,
    record_states,
    tiny,
)
from tests.data.promises import build, one_line

BLACK = torch.tensor([-1.5, -0.5]).view(2, 1, 1)
ALL = Augment(flip=True, rotate=30.0, crop=2, fill="mean")


def rotated(x, degrees, black):
    """Counter-clockwise about the middle, the nearest pixel, by torch's sampling of grids; square
    images.
    """
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    theta = torch.tensor([[[cosine, -sine, 0], [sine, cosine, 0]]], dtype=torch.float64)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    inside = F.grid_sample(torch.ones_like(x).double(), grid, mode="nearest", align_corners=False)
    turned = F.grid_sample(x.double(), grid, mode="nearest", align_corners=False)
    return torch.where(inside > 0, turned, black.double()).float()


def by_hand(augment, x, views, black):
    """One image after another: flip, rotate, pad and cut."""
    seen = []
    for one, (down, right, angle, mirror) in zip(x, views.tolist(), strict=True):
        one = one[None]
        if augment.flip and mirror < 0.5:
            one = one.flip(3)
        if augment.rotate:
            one = rotated(one, (2 * angle - 1) * augment.rotate, black)
        p, size = augment.crop, one.shape[-1]
        fill = black if augment.fill == "black" else torch.zeros_like(black)
        framed = F.pad(one - fill, (p, p, p, p)) + fill
        top, left = int(down * (2 * p + 1)), int(right * (2 * p + 1))
        seen.append(framed[..., top : top + size, left : left + size])
    return torch.cat(seen)


@pytest.mark.parametrize("augment", [Augment(crop=4), ALL])
def test_all_together_are_flip_then_rotate_then_cut(augment):
    g = torch.Generator().manual_seed(0)
    x, views = torch.randn(12, 2, 16, 16, generator=g), torch.rand(12, 4, generator=g)
    assert_close(augment(x, views, BLACK), by_hand(augment, x, views, BLACK))
    batches = augment(x.view(3, 4, 2, 16, 16), views.view(3, 4, 4), BLACK)
    assert torch.equal(batches.view(x.shape), augment(x, views, BLACK))


def test_training_is_that_of_torchs_sgd_on_images_changed_by_hand(net, federation, backend):
    augmented = replace(federation, augment=ALL)
    client = COHORTS[0][1]
    states, _ = record_rounds(FedAvg(), net, augmented, [[client]], engine=backend)
    module = tiny().module
    module.load_state_dict(dict(net.params))
    optimizer = torch.optim.SGD(
        module.parameters(), LOCAL.lr, momentum=LOCAL.momentum, weight_decay=LOCAL.weight_decay
    )
    draws, own = Draws(0, "train", 1), federation.train[client]
    black = federation.normalize(torch.zeros(1, 1, 1, dtype=torch.uint8))
    for epoch in range(LOCAL.epochs):
        views = draws.random(client, "main", epoch, len(own), 4, "views")
        epochs = range(epoch, epoch + 1)
        source = SampleSource(federation, client, draws, LOCAL.batch_size)
        plan = plan_steps(source, Phase(1), epochs)
        for (padded,) in plan.positions:
            rows = padded[padded >= 0]
            x = by_hand(ALL, federation.normalize(federation.x[own[rows]]), views[rows], black)
            optimizer.zero_grad()
            F.cross_entropy(module(x), federation.y[own[rows]]).backward()
            optimizer.step()
    assert_close(states[-1].server, dict(module.named_parameters()), atol=1e-5)
    plain, _ = record_rounds(FedAvg(), net, federation, [[client]], engine=backend)
    assert differing(plain[-1].server, states[-1].server)


def test_evaluated_images_are_as_they_are_and_fine_tuning_sees_changed_ones(
    net, federation, backend
):
    augmented = replace(federation, augment=ALL)
    runner = make_backend(as_engine(backend), net, CPU)
    state = record_states(FedAvg(), net, federation, COHORTS[:1], engine=backend)[-1]
    everyone = list(range(federation.clients))
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 1))):
        plain, other = (
            runner.evaluate(EvalCall(FedAvg(), own, state, everyone, tuning))
            for own in (federation, augmented)
        )
        assert torch.equal(plain.loss, other.loss) == (tuning is None)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_runs_that_see_otherwise_do_not_share_steps(federation, net, engine, monkeypatch):
    monkeypatch.setattr(scripts, "STEPS_BEFORE", 0)
    federations = [replace(federation, augment=own) for own in (None, ALL, Augment(crop=1))]
    states = [record_states(FedAvg(), net, own, COHORTS[:1])[-1] for own in federations]
    calls = [
        TrainCall(FedAvg(), own, state, COHORTS[1], LOCAL, Draws(0, "train", 2))
        for own, state in zip(federations, states, strict=True)
    ]
    runner = make_backend(as_engine(engine), net, CPU)
    for together, call in zip(runner.run(calls), calls, strict=True):
        alone = make_backend(as_engine(engine), net, CPU).run([call])[0]
        assert_same(together.uploads, alone.uploads)


def test_what_are_no_images_is_neither_augmented_nor_turned(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((60, 9, 128), np.float32), y=np.arange(60) % 3)
    words = ("dataset=npz", format_override("dataset.path", tmp_path / "own.npz"), "model=har_cnn")
    for word, told in read_cases("""
        augment=crop_flip => augment is for images, but data set npz has none; set augment=none
        shift=rotation => shift.rotation is for images, colour for three channels, and samples of data set npz are signals
    """):
        given = (*words, "partition=iid", "clients=4", word)
        assert told in one_line(lambda given=given: build(*given))
