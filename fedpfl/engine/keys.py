"""Every random draw is a pure function of (seed, purpose, round, client, phase).

So a resumed run needs no generator state, the order of execution cannot matter, and methods that
should coincide do. What a method draws from the generators of the process is made one too, by
`watched`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpfl.ground.errors import as_exception
from fedpfl.ground.seeding import Key, hash_key, seeded_by_key
from fedpfl.privacy import Secret

_impure: list[
    tuple[Any, list[str]]
] = []  # methods, and which generators of the process they have drawn from


def generator(*key: Key) -> torch.Generator:
    """A fresh CPU generator, seeded_by_key by a hash of `key`."""
    return torch.Generator().manual_seed(hash_key(key))


def draw_cohorts(
    seed: int, clients: int, participation: float, rounds: int, poisson: bool = False
) -> Iterator[list[int]]:
    """Draw the clients of one round after the other, each uniformly without replacement, ascending.

    max(1, floor(participation * clients)) of them, from one Mersenne-Twister stream: the rule of
    the published runs.
    poisson: each client with that chance for itself, so that a round may have nobody.
    """
    stream = random.Random(seed)
    size = max(1, int(round(participation * clients, 9)))
    for _ in range(rounds):
        if poisson:
            yield [client for client in range(clients) if stream.random() < size / clients]
            continue
        yield sorted(stream.sample(range(clients), size))


def draw_secret_cohorts(
    secret: Secret, clients: int, participation: float, rounds: int, poisson: bool = False
) -> Iterator[list[int]]:
    """Draw cohorts as `cohorts` does, but from a secret: privacy is amplified by not knowing who
    takes part.
    """
    size = max(1, int(round(participation * clients, 9)))
    for number in range(1, rounds + 1):
        drawn = secret.draw_uniform(clients, "cohort", number)
        chosen = np.flatnonzero(drawn < size / clients) if poisson else drawn.argsort()[:size]
        yield sorted(chosen.tolist())


@dataclass(frozen=True)
class Draws:
    """The random draws of one round: `purpose` tells training from fine-tuning."""

    seed: int
    purpose: str
    round: int

    def order(self, client: int, stream: str, epoch: int, samples: int) -> Tensor:
        """A permutation `[samples]` of a client's training samples for one epoch."""
        return torch.randperm(
            samples, generator=generator(self.seed, self.purpose, self.round, client, stream, epoch)
        )

    def random(
        self, client: int, stream: str, epoch: int, rows: int, count: int, what: str = "random"
    ) -> Tensor:
        """`count` uniform numbers for each step of an epoch, or for the `views` of each sample,
        `[rows, count]`.
        """
        if not count:
            return torch.empty(rows, 0)
        key = (self.seed, self.purpose, self.round, client, stream, epoch, what)
        return torch.rand(rows, count, generator=generator(*key))

    def server(self, client: int) -> torch.Generator:
        """For what the server draws for a client (`Method.sample`)."""
        return generator(self.seed, self.purpose, self.round, client, "draw")

    def own(self, client: int | None = None) -> tuple[Key, ...]:
        """The key of what hooks draw from the process's generators, for a client or for all of a
        call.
        """
        return self.seed, self.purpose, self.round, "all" if client is None else client, "process"


# ---- the generators of the process, which no method should draw from


@contextmanager
def track_global_draws(
    method: Any, *key: Key, network_draws: Collection[str] = ()
) -> Iterator[None]:
    """Make what a method's hooks draw from the generators of the process a function of `key`, and
    remember it.

    network_draws: the generators that the network itself draws from, for which no method is to
    blame. Nor does SystemExit of theirs end the process.
    """
    with seeded_by_key(*key) as drawn:
        try:
            yield
        except SystemExit as error:
            raise as_exception(error) from error
        names = [name for name in drawn() if name not in network_draws]
        if names and not find_global_draws(method):
            _impure.append((method, names))


def find_global_draws(method: Any) -> list[str]:
    """Return which generators of the process a method has drawn from: torch, numpy, random."""
    return next((names for known, names in _impure if known == method), [])
