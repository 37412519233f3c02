"""OfficeHome (Venkateswara et al. 2017): 15,588 colour images of 65 classes in four domains."""

from fedpfl.data.datasets.shared.images import Side, read_domains
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, find_folder

PLACE = (
    "OfficeHomeDataset_10072016/ with Art, Clipart, Product and 'Real World'"
    " (https://www.hemanthdv.org, OfficeHome)"
)
SIZES = {"Art": 2_427, "Clipart": 4_365, "Product": 4_439, "Real World": 4_357}


def office_home(source: Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, classes in order of their names; groups are the domains."""
    root = find_folder(source, PLACE, "OfficeHomeDataset_10072016", "OfficeHome", "office_home")
    return read_domains(source, root, SIZES, size)
