"""PACS (Li et al. 2017): 9,991 colour images of seven classes in four domains."""

from fedpfl.data.datasets.shared.images import Side, read_domains
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, find_folder

PLACE = (
    "PACS/ with art_painting, cartoon, photo and sketch (https://domaingeneralization.github.io)"
)
SIZES = {"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}


def pacs(source: Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, classes in order of their names; groups are the domains."""
    return read_domains(
        source, find_folder(source, PLACE, "PACS/kfold", "PACS", "pacs"), SIZES, size
    )
