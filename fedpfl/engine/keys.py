"""Every random draw is a pure function of (seed, purpose, round, client, phase).

So a resumed run needs no generator state, the order of execution cannot matter, and methods that
should coincide do. So are draws from the generators of the process, by
`track_global_draws`.
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
from fedpfl.ground.seeding import Key, hash_key, seeded_process
from fedpfl.privacy import SampleProtection, Secret

_global_draws: list[tuple[Any, list[str]]] = []
"""Methods, and which generators of the process they have drawn from."""


def generator(*key: Key) -> torch.Generator:
    """A fresh CPU generator, seeded_by_key by a hash of `key`."""
    return torch.Generator().manual_seed(hash_key(key))


def draw_cohorts(
    seed: int, clients: int, participation: float, rounds: int, poisson: bool = False
) -> Iterator[list[int]]:
    """Yield the clients of one round after the other, uniformly without replacement, ascending.

    There are max(1, floor(participation * clients)) of them, from one Mersenne-Twister stream: the
    rule of the published runs. With `poisson` each client is drawn with that chance for itself, so
    that a round may have no client.
    """
    stream = random.Random(seed)
    size = _cohort_size(clients, participation)
    for _ in range(rounds):
        if poisson:
            yield [client for client in range(clients) if stream.random() < size / clients]
        else:
            yield sorted(stream.sample(range(clients), size))


def draw_secret_cohorts(
    secret: Secret, clients: int, participation: float, rounds: int, poisson: bool = False
) -> Iterator[list[int]]:
    """Yield cohorts as `draw_cohorts` does, but drawn from a secret.

    Privacy is amplified by not knowing who takes part.
    """
    size = _cohort_size(clients, participation)
    for round_number in range(1, rounds + 1):
        numbers = secret.draw_uniform(clients, "cohort", round_number)
        if poisson:
            cohort = np.flatnonzero(numbers < size / clients)
        else:
            cohort = numbers.argsort()[:size]
        yield sorted(cohort.tolist())


def _cohort_size(clients: int, participation: float) -> int:
    """Return the size of a cohort; a product like 29.999999999 counts as 30."""
    return max(1, int(round(participation * clients, 9)))


@dataclass(frozen=True)
class Draws:
    """The random draws of one round: `purpose` tells training from fine-tuning.

    Attributes:
        protection: Of clients' samples, where their minibatches and noise are drawn in secret.
    """

    seed: int
    purpose: str
    round: int
    protection: SampleProtection | None = None

    def order(self, client: int, stream: str, epoch: int, samples: int) -> Tensor:
        """Return a permutation `[samples]` of a client's training samples for one epoch."""
        order_generator = generator(self.seed, self.purpose, self.round, client, stream, epoch)
        return torch.randperm(samples, generator=order_generator)

    def random(
        self, client: int, stream: str, epoch: int, rows: int, count: int, what: str = "random"
    ) -> Tensor:
        """Return `count` uniform numbers for each row of an epoch, `[rows, count]`.

        Args:
            client: Its number.
            stream: Of the phase, or the split of an evaluation.
            epoch: Its number.
            rows: Places of samples in the epoch's steps, or samples.
            count: How many numbers each has.
            what: Tells series of the same epoch apart.
        """
        if not count:
            return torch.empty(rows, 0)
        row_generator = generator(
            self.seed,
            self.purpose,
            self.round,
            client,
            stream,
            epoch,
            what,
        )
        return torch.rand(rows, count, generator=row_generator)

    def server(self, client: int) -> torch.Generator:
        """Return the generator of the server's draws for a client (`Method.sample`)."""
        return generator(self.seed, self.purpose, self.round, client, "draw")

    def hook_key(self, client: int | None = None) -> tuple[Key, ...]:
        """Return the key of what hooks draw globally, of one client or all."""
        owner = "all" if client is None else client
        return self.seed, self.purpose, self.round, owner, "process"


# ---- the generators of the process, which no method should draw from


@contextmanager
def track_global_draws(
    method: Any, key: tuple[Key, ...], network_draws: Collection[str] = ()
) -> Iterator[None]:
    """Seed the process's generators by `key`, and remember if a method's hooks draw from them.

    Args:
        method: Its hooks run meanwhile, and their SystemExit does not end the process.
        key: The draws are a function of it.
        network_draws: The generators that the network itself draws from, which is no matter of the
            method.
    """
    with seeded_process(hash_key(key)) as drawn:
        try:
            yield
        except SystemExit as error:
            raise as_exception(error) from error
        names = [name for name in drawn() if name not in network_draws]
        if names and not find_global_draws(method):
            _global_draws.append((method, names))


def find_global_draws(method: Any) -> list[str]:
    """Name the process's generators that a method has drawn from: torch, numpy, random."""
    for other, names in _global_draws:
        if other == method:
            return names
    return []
