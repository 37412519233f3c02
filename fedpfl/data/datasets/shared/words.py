"""Texts as numbered words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

WORD = re.compile(r"[a-z0-9]+")
PAD = 0
UNKNOWN = 1


def split_words(text: str) -> list[str]:
    """Return the words of a text, in order: runs of letters a-z and digits, in lower case."""
    return WORD.findall(text.lower())


def number_words(texts: Iterable[Sequence[str]], vocabulary: int) -> dict[str, int]:
    """Return the ids of the `vocabulary` - 2 most frequent words, from 2 on.

    The most frequent comes first; of equals the first by alphabet.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 2]
    return {word: number for number, word in enumerate(frequent, start=UNKNOWN + 1)}


def encode_words(texts: Sequence[Sequence[str]], ids: Mapping[str, int], length: int) -> np.ndarray:
    """Return texts as int32 `[texts, length]`, cut or filled up with PAD."""
    encoded = np.full((len(texts), length), PAD, np.int32)
    for row, words in zip(encoded, texts, strict=True):
        ids_of_text = [ids.get(word, UNKNOWN) for word in words[:length]]
        row[: len(ids_of_text)] = ids_of_text
    return encoded
