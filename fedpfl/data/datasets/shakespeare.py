"""LEAF's Shakespeare (Caldas et al. 2018, arXiv:1812.01097): the next letter in the lines of the roles of
the plays say.
"""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared.leaf import Part, read_clients
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source

# In LEAF's order
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
LENGTH = 80


def shakespeare(source: Source) -> Raw:
    """Read ids of 80 letters, int32 `[80]`, and of the next; groups are the roles.

    An id is a letter's position in LETTERS. A letter that is not there is an error: LEAF's own code
    takes it for the last one where it is the label.
    """
    return read_clients(source, _to_ids)


def _to_ids(x: list, y: list) -> Part:
    return _letter_ids(x, LENGTH), _letter_ids(y, 1)[:, 0].astype(np.int64)


def _letter_ids(texts: list[str], length: int) -> np.ndarray:
    """Return the ids of texts' letters, int32 `[texts, length]`."""
    letters = "".join(texts).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(letters, np.uint32)
    id_of_code = np.full(128, -1, np.int32)
    id_of_code[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    ids = id_of_code[np.minimum(codes, 127)]  # the last of ASCII is no letter
    if (ids < 0).any():
        raise ValueError(f"a letter is none of LEAF's {len(LETTERS)}")
    return ids.reshape(len(texts), length)
