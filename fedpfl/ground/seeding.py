"""Seed the generators of the process (torch's, NumPy's, Python's) for a while."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from fedpfl.ground.records import Record

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
        A function that names the libraries with used generators: torch, numpy,
        random.
    """
    with restored_process() as read_states:
        # `drawn_from` compares the generators with these states.
        for generator in _list_torch_generators():
            generator.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)
        fresh_states = {name: pickle.dumps(state) for name, state in read_states().items()}

        def drawn_from() -> list[str]:
            states = {name: pickle.dumps(state) for name, state in read_states().items()}
            return [name for name, fresh in fresh_states.items() if states[name] != fresh]

        yield drawn_from


@contextmanager
def restored_process() -> Iterator[Callable[[], Record]]:
    """Restore the states of the generators of the process afterwards.

    Yields:
        A function that reads them, by library.
    """
    torch_generators = _list_torch_generators()

    def read_states() -> Record:
        return {
            "torch": [generator.get_state().numpy() for generator in torch_generators],
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }

    states_before = read_states()
    try:
        yield read_states
    finally:
        # Draws inside the context do not affect code outside.
        for generator, state in zip(torch_generators, states_before["torch"], strict=True):
            generator.set_state(torch.from_numpy(state))
        np.random.set_state(states_before["numpy"])
        random.setstate(states_before["random"])


def _list_torch_generators() -> list[torch.Generator]:
    """Return torch's generators of the process, one a device that is in use."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]
