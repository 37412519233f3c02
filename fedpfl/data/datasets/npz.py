"""The user's own archive."""

from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source
from fedpfl.ground.errors import FedpflError


def npz(source: Source) -> Raw:
    """Refuse: with `dataset.path` no reader is asked."""
    raise FedpflError(
        "dataset=npz needs dataset.path=FILE.npz, an archive with x (uint8) and y (integers)"
    )
