"""The package's small federations, as the plain loops want them."""

from functools import cache

import torch
from torch import Tensor, nn

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws, generator
from fedpfl.models import Net
from fedpfl.testing.toy import LOCAL, Tiny, tiny
from tests.conftest import TEST, TRAIN, hold_out_quarter, make_federation
from tests.methods.reference import models, plain

SEED = 3
COHORTS = [[0, 2, 5, 9], [1, 2, 3], [0, 5, 7, 9]]
"""Client 2 trains twice in a row, others after a pause, 7 in round 3 alone; 9 has one sample."""
RANKS = (1, 2, 1, 2, 1, 2, 2, 1, 2, 1)
"""Of low-rank pairs: in round 1 three clients of four have rank 1, later one of three, two of four."""
ADAPTER_SCALE = 2.0  # alpha 4 of rank 2


def draw_order(purpose: str = "train", stream: str = "main") -> plain.Order:
    return lambda t, i, epoch, samples: Draws(SEED, purpose, t).order(i, stream, epoch, samples)


def draw_turns(t: int, clients: int) -> list[int]:
    return torch.randperm(clients, generator=generator(SEED, "turns", t)).tolist()


def draw_randoms(t: int, client: int, epoch: int, count: int) -> Tensor:
    """What samples are given in local training, `[samples, count]`, in the epoch's order: drawn
    first for each batch's first sample, then for each one's second.
    """
    samples, size = TRAIN[client], min(LOCAL.batch_size, TRAIN[client])
    batches = samples // LOCAL.batch_size + (samples % LOCAL.batch_size > 1)
    drawn = Draws(SEED, "train", t).random(client, "main", epoch, batches * size, count)
    return drawn.view(size, batches, count).transpose(0, 1).reshape(-1, count)[:samples]


def describe_setting(net: Net, federation: Federation, pairs: int = 0) -> plain.Setting:
    def samples(index: Tensor) -> tuple[Tensor, Tensor]:
        return (federation.x[index].float() / 255 - 0.4) / 0.3, federation.y[index]

    held = federation.validation or [own[:0] for own in federation.train]
    clients = [
        plain.Client(*(part for index in own for part in samples(index)))
        for own in zip(federation.train, federation.test, held, strict=True)
    ]
    module = Tiny()
    if net.buffers:
        module.norm = nn.BatchNorm2d(4)  # torch's
    if pairs:
        module = models.Adapted({**net.frozen, **net.params}, ADAPTER_SCALE)
    else:
        module.load_state_dict({**net.params, **net.buffers})
    steps = (LOCAL.epochs, LOCAL.batch_size, LOCAL.lr, LOCAL.momentum, LOCAL.weight_decay)
    return plain.Setting(module, clients, COHORTS, draw_order(), *steps)


@cache
def make_world(name: str) -> tuple[Net, Federation, plain.Setting]:
    """Make a world of these words, which nobody changes.

    norm: with BatchNorm. lora1, lora2: pairs of adapters. residue: beside these. ranks: that
    differ. held: with validation samples.
    moving: everybody makes a step. alike: neurons begin alike.
    """
    words = name.split()
    pairs = next((int(word[4:]) for word in words if word.startswith("lora")), 0)
    net = tiny(norm="norm" in words, pairs=pairs, has_residue="residue" in words)
    if "ranks" in words:
        net = net.with_facts(ranks=RANKS)
    federation = make_federation((*TRAIN[:-1], 12) if "moving" in words else TRAIN, TEST)
    if "held" in words:
        federation = hold_out_quarter(federation)
    if "alike" in words:
        shrink = lambda leaf: leaf * (0.1 if leaf.dim() > 1 else 1.0)  # noqa: E731
        net.params = {name: shrink(leaf) for name, leaf in net.params.items()}
    return net, federation, describe_setting(net, federation, pairs)
