"""The process's random generators: seeded for a call of somebody else's code, and put back after it."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Key = int | str


def hash_key(key: tuple[Key, ...]) -> int:
    """Return a seed of 63 bits for a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*key: Key) -> Iterator[Callable[[], list[str]]]:
    """Seed the generators of the process by a hash of `key`, and leave them as they were.

    Gives a function that names those which have been drawn from by then.
    """
    torches = [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]

    def states() -> dict[str, Any]:
        return {
            "torch": [own.get_state().numpy() for own in torches],
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }

    before, number = states(), hash_key(key)
    for own in torches:
        own.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    fresh = states()

    try:
        yield lambda: [name for name, now in states().items() if pickle.dumps(now) != pickle.dumps(fresh[name])]
    finally:
        for own, state in zip(torches, before["torch"], strict=True):
            own.set_state(torch.from_numpy(state))
        np.random.set_state(before["numpy"])
        random.setstate(before["random"])
