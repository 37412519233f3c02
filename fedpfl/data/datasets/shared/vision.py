"""Data sets that torchvision reads."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    unpacked_folder,
)


def read_cifar(source: Source, kind: Any) -> Raw:
    """Read what torchvision's class `kind` does, from the unpacked folder or the archive."""
    with (
        unpacked_folder(
            source, kind.base_folder, kind.filename, (kind.tgz_md5,), (kind.url,)
        ) as base,
        explain_read_errors(base),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the pickles are of an old numpy
        parts = [kind(base.parent, train=train) for train in (True, False)]
        return merge_parts(
            *((part.data.transpose(0, 3, 1, 2), np.asarray(part.targets)) for part in parts)
        )
