"""EMNIST by class: 814,255 handwritten letters and digits of 62 classes (Cohen et al. 2017)."""

from __future__ import annotations

import gzip
import zipfile

from fedpfl.data.datasets.shared.idx import array, values
from fedpfl.data.datasets.shared.samples import Raw, merged
from fedpfl.data.datasets.shared.source import Source, file, reading

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
            arrays = [values(path) for path in paths]
            break
    else:
        path = file(source, "EMNIST/raw/gzip.zip", (MD5,), (URL,))
        with reading(path), zipfile.ZipFile(path) as zipped:
            arrays = [array(gzip.decompress(zipped.read(f"gzip/{name}.gz"))) for name in NAMES]
    with reading(folder):
        return merged((arrays[0], arrays[1]), (arrays[2], arrays[3]))
