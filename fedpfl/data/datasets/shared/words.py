"""Texts as numbered words."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedpfl.ground.errors import FedpflError

log = logging.getLogger(__name__)

ENGLISH_WORD = re.compile(r"[a-z0-9]+")
# Scripts without spaces between words, and emoji, give a word for each character.
SINGLE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Accents, and the vowel signs of Indian, Arabic and Hebrew letters.
MARKS = "".join(
    chr(code) for code in range(0x300, 0x2000) if unicodedata.category(chr(code)).startswith("M")
)
ANY_WORD = re.compile(
    rf"[{SINGLE}\u2600-\u27bf\U0001f000-\U0001faff\U00020000-\U0003ffff]|(?:[^\W_{SINGLE}]|[{MARKS}])+"
)
PAD = 0
UNKNOWN = 1


def split_words(text: str) -> list[str]:
    """List the words of an English text: runs of letters a-z and digits, in lower case."""
    return ENGLISH_WORD.findall(text.lower())


def encode_texts(
    texts: Sequence[str], training_texts: int, vocabulary: int, length: int, origin: str
) -> np.ndarray:
    """Number the words of texts in any language, int32 `[texts, length]`.

    Args:
        texts: The training part first.
        training_texts: Number of texts in which words are counted.
        vocabulary: See `number_words`.
        length: See `encode_words`.
        origin: The texts' name in messages.

    Raises:
        FedpflError: No text has a word.
    """
    words = [ANY_WORD.findall(unicodedata.normalize("NFC", text).lower()) for text in texts]
    empty = sum(not own for own in words)
    if empty == len(texts):
        raise FedpflError(f"{origin}: no text has a word; choose another column")
    if empty:
        log.warning("%s: %d of %d texts have no word", origin, empty, len(texts))
    return encode_words(words, number_words(words[:training_texts], vocabulary), length)


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
