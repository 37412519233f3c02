"""Every random draw is a pure function of (seed, purpose, round, client, phase).

So a resumed run needs no generator state, the order of execution cannot matter, and methods that should coincide do.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator, seeded by a hash of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def cohorts(seed: int, clients: int, participation: float, rounds: int) -> Iterator[list[int]]:
    """Draw the clients of one round after the other, each uniformly without replacement, ascending.

    max(1, floor(participation * clients)) of them, from one Mersenne-Twister stream: the rule of the published runs.
    """
    stream = random.Random(seed)
    size = max(1, int(round(participation * clients, 9)))
    for _ in range(rounds):
        yield sorted(stream.sample(range(clients), size))


@dataclass(frozen=True)
class Draws:
    """The random draws of one round: `purpose` tells training from fine-tuning."""

    seed: int
    purpose: str
    round: int

    def order(self, client: int, stream: str, epoch: int, samples: int) -> Tensor:
        """A permutation `[samples]` of a client's training samples for one epoch."""
        return torch.randperm(samples, generator=generator(self.seed, self.purpose, self.round, client, stream, epoch))

    def random(self, client: int, stream: str, epoch: int, rows: int, count: int, what: str = "random") -> Tensor:
        """`count` uniform numbers for each step of an epoch, or for the `views` of each sample, `[rows, count]`."""
        if not count:
            return torch.empty(rows, 0)
        key = (self.seed, self.purpose, self.round, client, stream, epoch, what)
        return torch.rand(rows, count, generator=generator(*key))

    def server(self, client: int) -> torch.Generator:
        """For what the server draws for a client (`Method.sample`)."""
        return generator(self.seed, self.purpose, self.round, client, "draw")
