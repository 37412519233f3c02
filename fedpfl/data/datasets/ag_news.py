"""AG News: titles and descriptions of news of four kinds, as numbered words."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, fetch_file
from fedpfl.data.datasets.shared.words import encode_words, number_words, split_words
from fedpfl.ground.ranges import AtLeast, Count

URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MD5 = {
    "train": "b1a00f826fdfbd249f79597b59e1dc12",
    "test": "d52ea96a97a2d943681189a97654912d",
}  # torchtext's
PLACE = "ag_news_csv/train.csv and ag_news_csv/test.csv"


def ag_news(
    source: Source,
    vocabulary: Annotated[int, AtLeast(3)] = 20_000,
    length: Count = 64,
) -> Raw:
    """Read title and description (Zhang et al. 2015), training then test, int32 `[length]`.

    Words are runs of letters a-z and digits of the lower-case text. The `vocabulary` - 2 most
    frequent of the training part (of equals the first by alphabet) have ids from 2 on, the most
    frequent first; 1 is any other word, 0 fills up. Texts longer than `length` words are cut.
    """
    parts = []
    for part, md5 in MD5.items():
        url = f"{URL}{part}.csv"
        parts.append(_read_csv(fetch_file(source, f"ag_news_csv/{part}.csv", (md5,), [url], PLACE)))
    # By the training part alone: words of the test part would be looked up in the future.
    ids = number_words((text_words for text_words, _ in parts[0]), vocabulary)
    return merge_parts(*(_encode_texts(part, ids, length) for part in parts))


def _read_csv(path: Path) -> list[tuple[list[str], int]]:
    """Words and class, from 0, of each row."""
    texts = []
    with explain_read_errors(path), path.open(encoding="utf-8", newline="") as rows:
        for row in csv.reader(rows):
            kind, *text = row
            texts.append((split_words(" ".join(text)), int(kind) - 1))
    return texts


def _encode_texts(
    texts: list[tuple[list[str], int]], ids: dict[str, int], length: int
) -> tuple[np.ndarray, np.ndarray]:
    x = encode_words([text_words for text_words, _ in texts], ids, length)
    return x, np.array([kind for _, kind in texts], np.int64)
