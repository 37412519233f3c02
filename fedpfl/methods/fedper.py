"""FedPer: shared body, personal top layers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.ground.ranges import WholeNumber
from fedpfl.methods.shared.by_name import PersonalByName, top_layer_names
from fedpfl.models import Parts


@dataclass(frozen=True)
class FedPer(PersonalByName):
    """Federated learning with personalization layers (Arivazhagan et al., arXiv:1912.00818).

    layers: number of personal layers, counted from the output (the paper's K_P); 0 is FedAvg, all
        of them Local-Only.
    head_init: the head of a client that was never sampled: the `initial` head (the paper:
        personal layers never leave a client) or the `server_average` of uploaded ones (FL-bench;
        the personal layers then travel too).
    """

    layers: WholeNumber = 1
    head_init: Literal["initial", "server_average"] = "initial"

    _key: ClassVar[str] = "head"

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names in the last `layers` layers."""
        return top_layer_names(parts, self.layers)

    @property
    def _averages_all(self) -> bool:
        """Whether heads travel and are averaged too."""
        return self.head_init == "server_average"
