"""Random numbers of a private run, which follow from its secret key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

CHUNK = 2**20  # numbers that are drawn together, so that memory stays small


@dataclass(frozen=True)
class Secret:
    """Derive independent random numbers from a key, by purpose.

    Torch's generator on the CPU takes 32 bits of a seed, which can be tried out. These numbers come
    from SHAKE-256 of the whole key.
    """

    key: bytes = field(repr=False)

    @classmethod
    def of_seed(cls, seed: int) -> Secret:
        """Return the secret that follows from a known seed."""
        digest = hashlib.blake2b(f"privacy.seed {seed}".encode(), digest_size=32)
        return cls(digest.digest())

    def bind_to(self, context: object) -> Secret:
        """Return a separate secret for each context (plain values), made from this one."""
        return Secret(self._hash("bound to", context))

    def draw_uniform(self, count: int, *purpose: int | str) -> np.ndarray:
        """Return `[count]` float64 numbers, uniform in (0, 1)."""
        stream = hashlib.shake_256(self._hash("stream", purpose)).digest(8 * count)
        # 52 bits and a half are exact in float64, and never 0 or 1.
        bits = np.frombuffer(stream, "<u8") >> np.uint64(12)
        return (bits + 0.5) * 2.0**-52

    def draw_normal(self, count: int, *purpose: int | str) -> np.ndarray:
        """Return `[count]` float64 numbers of mean 0 and variance 1, by Box and Muller's rule."""
        numbers = np.empty(count)
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            pairs = (size + 1) // 2
            uniform = self.draw_uniform(2 * pairs, *purpose, start)
            radius = np.sqrt(-2 * np.log(uniform[:pairs]))
            angle = 2 * np.pi * uniform[pairs:]
            cosines = radius * np.cos(angle)
            sines = radius * np.sin(angle)
            both = np.concatenate([cosines, sines])
            numbers[start : start + size] = both[:size]
        return numbers

    def _hash(self, kind: str, context: object) -> bytes:
        text = repr((kind, context)).encode()
        keyed_hash = hashlib.blake2b(text, key=self.key, digest_size=64)
        return keyed_hash.digest()
