"""EMNIST by class: 814,255 handwritten letters and digits of 62 classes (Cohen et al. 2017)."""

from __future__ import annotations

import gzip
import zipfile

from fedpfl.data.datasets.shared.idx import parse_idx, read_idx_file
from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, fetch_file

URL = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
MD5 = "58c8d27c78d21e728a6bc7b3cc06412e"
NAMES = [
    f"emnist-byclass-{part}-{kind}-ubyte"
    for part in ("train", "test")
    for kind in ("images-idx3", "labels-idx1")
]


def emnist(source: Source) -> Raw:
    """Read NIST's zip of .gz files, or those unpacked: uint8 `[28, 28]`, training then test.

    Images are as in the files, transposed relative to MNIST, as torchvision gives them.
    """
    folder = source.folder / "EMNIST/raw"
    for pattern in ("{}", "{}.gz", "gzip/{}.gz"):
        paths = [folder / pattern.format(name) for name in NAMES]
        if all(path.is_file() for path in paths):
            arrays = [read_idx_file(path) for path in paths]
            break
    else:
        path = fetch_file(source, "EMNIST/raw/gzip.zip", (MD5,), (URL,))
        with explain_read_errors(path), zipfile.ZipFile(path) as zipped:
            arrays = [parse_idx(gzip.decompress(zipped.read(f"gzip/{name}.gz"))) for name in NAMES]
    with explain_read_errors(folder):
        return merge_parts((arrays[0], arrays[1]), (arrays[2], arrays[3]))
