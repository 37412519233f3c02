"""Archives of plain arrays, as np.savez writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile


@contextmanager
def open_archive(path: Path) -> Iterator[NpzFile]:
    """Open an archive, whose arrays are read by name once all checksums are right; nothing is
    unpickled.

    Raises ValueError, or what zipfile and numpy raise, for an archive that is damaged or holds
    something else.
    """
    with path.open("rb") as file:
        if file.read(2) not in (
            b"PK",
            b"\x93N",
        ):  # else numpy takes it for a pickle, and says how to load that
            raise ValueError(
                "it is no zip archive, as np.savez writes" if path.stat().st_size else "it is empty"
            )
        file.seek(0)
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, NpzFile) or arrays.zip is None:
            raise ValueError("it is a single array")
        members = arrays.zip.infolist()
        # A flipped bit in the length of a comment would make members disappear; numpy writes no
        # comments.
        if len(set(arrays.files)) < len(members) or any(member.comment for member in members):
            raise ValueError("its table of contents is damaged")
        if (name := arrays.zip.testzip()) is not None:  # numpy reads no further than a header says
            raise ValueError(f"its part {name} is damaged")
        yield arrays
