"""Open archives of plain arrays, as np.savez writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile


@contextmanager
def open_archive(path: Path) -> Iterator[NpzFile]:
    """Open an archive after checking all checksums, without unpickling anything.

    Raises:
        ValueError: For an archive that is damaged or holds something else; zipfile and numpy raise
            further errors.
    """
    with path.open("rb") as file:
        # NumPy would take other files for a pickle, and advise to load that.
        if file.read(2) != b"PK":
            raise ValueError("it is no zip archive, as np.savez writes")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            # A flipped bit in a comment's length hides members. NumPy writes no comments.
            if any(member.comment for member in arrays.zip.infolist()):
                raise ValueError("its table of contents is damaged")
            damaged_member = arrays.zip.testzip()  # numpy reads no further than a header says
            if damaged_member is not None:
                raise ValueError(f"its part {damaged_member} is damaged")
            yield arrays
