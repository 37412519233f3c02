"""Archives of plain arrays, as np.savez writes them, read without trust in what they claim."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib import format

from fedpfl.ground import memory

RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""How many bytes one byte of a member can become at most, for the two kinds that numpy writes."""

HEADERS = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
HEAD = 12_000  # bytes; numpy refuses headers of more than 10,000


@contextmanager
def opened(path: Path) -> Iterator[dict[str, Callable[[], np.ndarray]]]:
    """Open an archive: by name what reads each of its arrays, whole and by its checksum.

    Nothing is unpickled, and nothing allocated that the archive cannot hold. Raises ValueError, or what zipfile and
    numpy raise, for an archive that is damaged or holds something else.
    """
    with path.open("rb") as file:
        if file.read(len(format.MAGIC_PREFIX)) == format.MAGIC_PREFIX:
            raise ValueError("it is a single array")
        with zipfile.ZipFile(file) as zipped:
            members = {info.filename.removesuffix(".npy"): info for info in zipped.infolist()}
            # A flipped bit in the length of a comment would make members disappear; numpy writes no comments.
            if len(members) < len(zipped.infolist()) or any(info.comment for info in members.values()):
                raise ValueError("its table of contents is damaged")
            for info in members.values():
                zipped.open(info).close()  # which compares the name with the member's own
            yield {name: partial(_array, zipped, info) for name, info in members.items()}


def _array(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    name = info.filename
    if info.compress_type not in RATIO:
        raise ValueError(f"{name} is compressed in another way than np.savez_compressed does")
    with zipped.open(info) as member:
        head = io.BytesIO(member.read(HEAD))
    version = format.read_magic(head)
    if version not in HEADERS:
        raise ValueError(f"{name} is of version {version} of the format")
    shape, _, dtype = HEADERS[version](head)
    if dtype.hasobject:
        raise ValueError(f"Object arrays are not read, and {name} is one")
    size = math.prod(shape) * dtype.itemsize
    held = info.file_size - head.tell()
    if size != held or info.file_size > RATIO[info.compress_type] * info.compress_size:
        raise ValueError(f"{name} cannot hold what its header says, {dtype} {list(shape)}")
    memory.check(size, name)
    with zipped.open(info) as member:  # anew: a member in which one has gone back is not compared with its checksum
        return format.read_array(member, allow_pickle=False)
