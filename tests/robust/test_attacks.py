"""Attacks: uploads by their papers' formulas in plain loops, poisoned samples by hand."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedpfl.engine import RoundSetup, make_backend, make_initial_state, play_round, untrained_upload
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.robust import Attack, forgery, make_adversary
from fedpfl.robust.defence import Median
from fedpfl.robust.poison import Backdoor, LabelFlip
from fedpfl.testing.toy import CLASSES, CPU, LOCAL, as_engine, tiny, tiny_federation
from tests.conftest import assert_close, assert_same, participate
from tests.data.promises import one_line

COHORT = [0, 1, 2, 4]
HOSTILE = [1, 4]
BYTES = dataclasses.replace(
    tiny_federation(),
    x=(tiny_federation().x.sigmoid() * 255).to(torch.uint8),
    mean=(0.5,),
    std=(0.25,),
)
"""The tiny federation with pixels, as patterns are painted on."""


def make_uploads(seed=0, clients=9, hostile=3):
    rows = torch.from_numpy(np.random.default_rng(seed).normal(1, 1, (clients, 5)))
    weights = torch.arange(1.0, clients + 1).double() / sum(range(1, clients + 1))
    return forgery.Uploads(rows, torch.arange(clients) < hostile, weights, torch.Generator())


def test_each_attack_on_uploads_is_its_formula():
    uploads = make_uploads()
    rows, weights = uploads.rows.numpy(), uploads.weights.numpy()
    hostile, honest = rows[:3], rows[3:]
    mean, deviation = honest.mean(0), np.sqrt(((honest - honest.mean(0)) ** 2).mean(0))
    share = weights[:3].sum()
    expected = {
        forgery.SignFlip(scale=4.0): -4 * hostile,
        forgery.Replacement(): hostile / share,
        forgery.Replacement(scale=7.0): 7 * hostile,
        forgery.LittleIsEnough(): mean - 1.5 * deviation,
        forgery.LittleIsEnough(z=None): mean - forgery.find_largest_z(9, 3) * deviation,
        forgery.LittleIsEnough(knowledge="fellows"): hostile.mean(0) - 1.5 * hostile.std(0),
        forgery.InnerProduct(scale=0.5): -0.5 * mean,
        forgery.InnerProduct(knowledge="fellows"): -hostile.mean(0),
    }
    for attack, values in expected.items():
        torch.testing.assert_close(attack.forge_rows(uploads), torch.from_numpy(values))


def test_as_many_deviations_as_a_majority_hides_are_the_papers():
    """With n = 50, m = 24 they want s = 2, so that Phi(z) = 24 / 26; too few attackers have none."""
    z = forgery.find_largest_z(50, 24)
    assert (1 + math.erf(z / math.sqrt(2))) / 2 == pytest.approx(24 / 26)
    assert [forgery.find_largest_z(*counts) for counts in ((10, 1), (3, 3), (4, 3))] == [0, 0, 0]


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
def test_hidden_uploads_go_as_far_as_their_bounds(direction):
    """On the way from the honest mean both bounds are met at the end, and broken beyond it."""
    for seed in range(10):
        uploads = make_uploads(seed)
        honest = uploads.rows[3:].numpy()
        gaps = ((honest[:, None] - honest[None]) ** 2).sum(-1)
        for kind, bound in ((forgery.MinMax, gaps.max()), (forgery.MinSum, gaps.sum(1).max())):
            forged = kind(direction=direction).forge_rows(uploads).numpy()
            way = forged - honest.mean(0)
            measure = np.max if kind is forgery.MinMax else np.sum
            for factor, is_within in ((1 - 1e-6, True), (1 + 1e-6, False)):
                point = honest.mean(0) + factor * way
                distance = measure(((honest - point) ** 2).sum(1))
                assert (distance <= bound) == is_within
        against = {"std": -honest.std(0), "unit": -honest.mean(0), "sign": -np.sign(honest.mean(0))}
        cosine = way @ against[direction] / np.linalg.norm(way) / np.linalg.norm(against[direction])
        assert cosine == pytest.approx(1)


def test_noise_has_its_deviation_and_is_each_attackers_own():
    uploads = make_uploads()._replace(rows=torch.zeros(9, 40_000))
    forged = forgery.Noise(deviation=0.3).forge_rows(uploads)
    assert forged.shape == (3, 40_000)
    assert forged.std(1).tolist() == pytest.approx([0.3] * 3, rel=0.02)
    assert abs(float(torch.corrcoef(forged)[0, 1])) < 0.03


def play(method, backend="loop", adversary=None, defence=None, federation=None):
    runner = make_backend(as_engine(backend), tiny(), CPU)
    federation = federation or tiny_federation()
    setup = RoundSetup(runner, method, federation, LOCAL, 0, adversary=adversary, defence=defence)
    return play_round(setup, make_initial_state(method, tiny(), 6, CPU), COHORT)[0]


def find_adversary(attack, federation=None):
    return make_adversary(attack, [federation or tiny_federation()], 0)


@pytest.mark.parametrize(("name", "backend"), [("fedper", "loop"), ("scaffold", "batched")])
def test_the_server_learns_from_forged_uploads(name, backend):
    """Those of attackers alone: the mean is that of a loop, in a method's form of uploads."""
    method = METHODS[name]()
    before = make_initial_state(method, tiny(), 6, CPU)
    clients = before.rows.initial["client"]
    center = untrained_upload(method, before.server, clients, before.buffers(0))
    part = participate(method, tiny(), tiny_federation(), before, COHORT)
    state = play(method, backend, find_adversary(forgery.SignFlip(clients=(1, 4), scale=3.0)))
    uploads = []
    for row, client in enumerate(COHORT):
        upload = tree.take(part.uploads, row)
        if client in HOSTILE:
            upload = tree.map(lambda leaf, base: base - 3 * (leaf - base), upload, center)
        uploads.append(upload)
    sizes = torch.tensor([40, 7, 33, 65]).float()
    arguments = before.server, before.client(COHORT), tiny(), tree.stack(uploads)
    server, _ = method.aggregate(*arguments, sizes / sizes.sum(), torch.Generator())
    assert_close(state.server, server, atol=2e-6, rtol=1e-4)
    plain = play(method, backend)
    assert_same(state.clients, plain.clients)  # attackers keep what training made of theirs
    nobody, another = forgery.SignFlip(share=0.0), forgery.SignFlip(clients=(3,))
    for attack in (nobody, another, forgery.SignFlip(clients=(1,), from_round=2)):
        assert_same(play(method, backend, find_adversary(attack)).server, plain.server)


def test_a_defence_is_the_mean_of_the_method():
    """Every upload becomes the aggregate, whatever a server does with the mean: FedAdam's step."""
    method = METHODS["fedadam"]()
    before = make_initial_state(method, tiny(), 6, CPU)
    part = participate(method, tiny(), tiny_federation(), before, COHORT)
    middle = tree.map(lambda leaf: leaf.sort(0).values[1:3].mean(0), part.uploads)
    arguments = before.server, before.client(COHORT), tiny(), tree.repeat(middle, 4)
    server, _ = method.aggregate(*arguments, torch.full((4,), 0.25), torch.Generator())
    assert_close(play(method, defence=Median()).server, server)


def test_attackers_are_drawn_by_seed_or_named_and_attack_in_their_rounds():
    numbers = list(range(0, 200, 2))  # of the partition: newcomers have the odd ones
    drawn = [Attack(share=0.2).draw_attackers(numbers, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] == sorted({*drawn[0]}) != drawn[2]
    assert [len(attackers) for attackers in drawn] == [20] * 3
    assert Attack(clients=(4, 0)).draw_attackers(numbers, 0) == [0, 2]
    assert Attack(share=0.0).draw_attackers(numbers, 0) == []
    told = one_line(lambda: Attack(clients=(3,)).draw_attackers(numbers, 0))
    assert "there is no client 3 among the 100" in told
    active = [number for number in range(1, 10) if Attack(from_round=3, every=3).is_active(number)]
    assert active == [3, 6, 9]


def test_labels_are_flipped_at_attackers_alone():
    adversary = find_adversary(LabelFlip(clients=(0, 2), poisoned=0.5))
    clean, poisoned = tiny_federation(), adversary.poisoned
    for client in range(6):
        old, new = clean.train[client], poisoned.train[client]
        assert torch.equal(poisoned.x[new], clean.x[old])
        flipped = poisoned.y[new] != clean.y[old]
        assert int(flipped.sum()) == (len(old) / 2 if client == 0 else 16 if client == 2 else 0)
        assert torch.equal(poisoned.y[new][flipped], (clean.y[old][flipped] + 1) % CLASSES)
        assert torch.equal(poisoned.test[client], clean.test[client])
    (triggered,) = adversary.triggered
    assert [len(test) for test in triggered.test] == [0, 3, 0, 0, 14, 1]
    assert torch.equal(triggered.y[triggered.test[4]], (clean.y[clean.test[4]] + 1) % CLASSES)


PATTERNS = {
    Backdoor(size=2): lambda image, noise: np.where(noise.mask, 255.0, image),
    Backdoor(pattern="blended"): lambda image, noise: 0.8 * image + 0.2 * 255 * noise.random,
    Backdoor(pattern="sine"): lambda image, noise: image + 25.5 * noise.waves,
}


@pytest.mark.parametrize("attack", PATTERNS, ids=lambda attack: attack.pattern)
def test_patterns_are_painted_as_their_formulas_say(attack):
    mask = np.zeros((1, 8, 8), bool)
    mask[:, 6:, 6:] = True
    waves = np.sin(2 * math.pi * 6 * np.arange(8) / 8)
    random = np.random.default_rng([5, 22]).random((1, 8, 8))
    noise = SimpleNamespace(mask=mask, random=random, waves=waves)
    images = BYTES.x[:20]
    painted = attack.alter_samples(images, seed=5)
    expected = PATTERNS[attack](images.double().numpy(), noise).clip(0, 255)
    assert float((painted.double() - torch.from_numpy(expected)).abs().max()) < 0.51
    assert painted.dtype == torch.uint8


def test_colluders_have_parts_that_make_the_whole():
    attack = Backdoor(clients=(0, 2, 4), parts=3, size=3, poisoned=1.0)
    black = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    parts = [attack.alter_samples(black, 0, part) for part in range(3)]
    assert [int((part > 0).sum()) for part in parts] == [3, 3, 3]
    assert bool((parts[0][..., 5, 5:] == 255).all())  # in the order of rows
    assert torch.equal(sum(parts), attack.alter_samples(black, 0))
    adversary = find_adversary(attack, BYTES)
    for part, client in enumerate((0, 2, 4)):
        images = adversary.poisoned.x[adversary.poisoned.train[client]]
        alone = attack.alter_samples(BYTES.x[BYTES.train[client]], 0, part)
        order = lambda stack: sorted(image.flatten().tolist() for image in stack)  # noqa: E731
        assert order(images) == order(alone)
    whole = adversary.triggered[0]
    assert bool((whole.x[whole.test[1]][:, :, 5:, 5:] == 255).all())


def test_success_is_measured_on_honest_samples_of_other_classes():
    adversary = find_adversary(Backdoor(clients=(0,), target=2), BYTES)
    clean, (triggered,) = BYTES, adversary.triggered
    for client in range(6):
        labels = clean.y[clean.test[client]]
        assert len(triggered.test[client]) == (client != 0) * int((labels != 2).sum())
        assert bool((triggered.y[triggered.test[client]] == 2).all())
        assert torch.equal(triggered.train[client], clean.train[client])
    assert torch.equal(triggered.x[: len(clean.x)], clean.x)


def test_newcomers_are_attacked_too_and_never_attack():
    members, newcomers = BYTES.split_newcomers([1, 4])
    adversary = make_adversary(Backdoor(share=0.5), [members, newcomers], 0)
    assert len(adversary.attackers) == len(adversary.honest) == 2
    assert [len(test) > 0 for test in adversary.triggered[1].test] == [True, True]
    with pytest.raises(FedpflError, match="no client 4 among the 4"):
        make_adversary(Backdoor(clients=(4,)), [members, newcomers], 0)
