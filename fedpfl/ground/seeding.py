"""Seed the generators of the process (torch's, NumPy's, Python's) for a while."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

Key = int | str


def hash_key(key: tuple[Key, ...]) -> int:
    """Return a seed of 63 bits for a key."""
    # Not Python's `hash`, which differs between processes.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    # torch takes signed seeds of 64 bits.
    return int.from_bytes(digest, "little") >> 1


def seeded_by_key(*key: Key) -> AbstractContextManager[Callable[[], list[str]]]:
    """Seed the generators of the process by a hash of `key`; see `seeded_process`."""
    return seeded_process(hash_key(key))


@contextmanager
def seeded_process(number: int) -> Iterator[Callable[[], list[str]]]:
    """Seed the generators of the process by `number`, and restore their states afterwards.

    Yields:
        A function that names the libraries whose generators have been drawn from: torch, numpy,
        random.
    """
    # ---- The generators, and how they are read.
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    torch_generators = [torch.default_generator, *cuda]

    def read_states() -> dict[str, Any]:
        return {
            "torch": [generator.get_state().numpy() for generator in torch_generators],
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }

    # ---- Seed them; whatever moves one from this state shows in `drawn_from`.
    states_before = read_states()
    for generator in torch_generators:
        generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    fresh_states = {name: pickle.dumps(state) for name, state in read_states().items()}

    def drawn_from() -> list[str]:
        states = read_states()
        return [name for name, fresh in fresh_states.items() if pickle.dumps(states[name]) != fresh]

    try:
        yield drawn_from
    finally:
        for generator, state in zip(torch_generators, states_before["torch"], strict=True):
            generator.set_state(torch.from_numpy(state))
        np.random.set_state(states_before["numpy"])
        random.setstate(states_before["random"])
