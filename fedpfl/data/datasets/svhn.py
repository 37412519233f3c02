"""SVHN, cropped digits (Netzer et al. 2011): 99,289 colour images of house numbers."""

from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, fetch_file
from fedpfl.ground.vision import load_torchvision


def svhn(source: Source) -> Raw:
    """Read the two .mat files: uint8 `[3, 32, 32]`, training then test, without extra; the digit 0
    is class 0.
    """
    kind = load_torchvision().SVHN
    for split in ("train", "test"):
        url, name, md5 = kind.split_list[split]
        fetch_file(source, name, (md5,), (url,), "train_32x32.mat and test_32x32.mat")
    with explain_read_errors(source.folder / kind.split_list["train"][1]):
        parts = [kind(source.folder, split=split) for split in ("train", "test")]
        return merge_parts(*((part.data, part.labels) for part in parts))
