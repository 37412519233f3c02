"""Texts as the ids of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpfl.ground.errors import FedpflError, error_text, missing_extra

PADDINGS = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")
"""Tokens that fill texts up, where the tokenizer names none."""


class TokenIds(NamedTuple):
    """Hold texts as ids.

    Attributes:
        ids: int32 `[texts, length]`.
        lengths: Tokens of each text, `[texts, 1]`.
        pad: The id behind a text's last token.
        vocabulary: Number of ids.
    """

    ids: np.ndarray
    lengths: np.ndarray
    pad: int
    vocabulary: int

    @property
    def next_ids(self) -> np.ndarray:
        """Return the id behind each token, -1 where there is none."""
        places = np.arange(1, self.ids.shape[1] + 1)
        return np.where(places < self.lengths, np.roll(self.ids, -1, axis=1), -1)


def encode_tokens(texts: Sequence[str], path: Path, length: int) -> TokenIds:
    """Return texts as ids, cut or filled up to `length`.

    Args:
        texts: The texts.
        path: A tokenizer.json, or the folder that has it.
        length: Tokens of a text.

    Raises:
        FedpflError: The tokenizer is absent or damaged, or has no token that fills up.
    """
    # ---- Step 1: the tokenizer, and its token that fills up.
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("dataset.tokenizer needs the package tokenizers", "lm") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise FedpflError(
            f"dataset.tokenizer: {file} cannot be read ({error_text(error)}); give a tokenizer.json,"
            " or a folder with one"
        ) from None
    config = _read_json(file.with_name("tokenizer_config.json"))
    names = [config.get("pad_token"), *PADDINGS, config.get("eos_token")]
    ids = [tokenizer.token_to_id(name) for name in names if isinstance(name, str)]
    pads = [number for number in ids if number is not None]
    if not pads:
        raise FedpflError(
            f"dataset.tokenizer: {file} has no token that fills texts up; add one named [PAD]"
        )

    # ---- Step 2: the texts.
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    encoded = np.full((len(texts), length), pads[0], np.int32)
    lengths = np.zeros((len(texts), 1), np.int64)
    for row, text in enumerate(tokenizer.encode_batch(list(texts))):
        lengths[row] = len(text.ids)
        encoded[row, : len(text.ids)] = text.ids
    # A model may have room for more tokens than its tokenizer has.
    room = int(_read_json(file.with_name("config.json")).get("vocab_size", 0))
    return TokenIds(encoded, lengths, pads[0], max(room, tokenizer.get_vocab_size()))


def _read_json(file: Path) -> dict[str, Any]:
    """Read a file of the tokenizer's folder; {} if it is absent."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
