"""FedBN: BatchNorm layers stay with the client."""

from dataclasses import dataclass

from fedpfl.methods.shared.by_name import PersonalByName
from fedpfl.models import Parts


@dataclass(frozen=True)
class FedBN(PersonalByName):
    """FedBN: BatchNorm layers stay local, with their statistics (Li et al., ICLR 2021,
    arXiv:2102.07623).

    Selected by module type; LayerNorm and GroupNorm are shared. Without BatchNorm it is FedAvg.
    """

    def buffers(self):
        """Keep statistics on the client."""
        return {"main": "local"}

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return scale and shift of every BatchNorm layer."""
        return parts.batch_norm
