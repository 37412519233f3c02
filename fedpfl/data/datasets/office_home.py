"""OfficeHome (Venkateswara et al. 2017): 15,588 colour images of 65 classes in four domains."""

from fedpfl.data.datasets.shared.images import Side, domains
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, folder

PLACE = "OfficeHomeDataset_10072016/ with Art, Clipart, Product and 'Real World' (https://www.hemanthdv.org, OfficeHome)"
SIZES = {"Art": 2_427, "Clipart": 4_365, "Product": 4_439, "Real World": 4_357}


def office_home(source: Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, classes in order of their names; groups are the domains."""
    root = folder(source, PLACE, "OfficeHomeDataset_10072016", "OfficeHome", "office_home")
    return domains(source, root, SIZES, size)
