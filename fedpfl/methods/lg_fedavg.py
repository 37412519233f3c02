"""LG-FedAvg: local representations under a global top."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground.ranges import WholeNumber
from fedpfl.methods.shared.by_name import PersonalInit, top_layer_names
from fedpfl.models import Parts


@dataclass(frozen=True)
class LGFedAvg(PersonalInit):
    """LG-FedAvg: local representations under a global top (Liang et al., arXiv:2001.01523).

    personal_init: a client's entries until it was sampled; `server_average` is FL-bench's.
    layers: how many are shared.
    variant: `paper`: the top ones; `as_published`: the lowest ones (of one layer conv1), as in
        FL-bench, from which FedOBP's tables were made. BatchNorm statistics stay with the client.
    """

    layers: WholeNumber = 1
    variant: Literal["paper", "as_published"] = "paper"

    takes_kinds = True

    def buffers(self):
        """Keep statistics on the client."""
        return {"main": "local"}

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names in all layers but the shared ones."""
        shared = top_layer_names(parts, self.layers)
        # The lowest layers are shared here, so that the top ones are the client's.
        if self.variant == "as_published":
            return top_layer_names(parts, len(parts.layers) - self.layers)
        return tuple(name for layer in parts.layers for name in layer if name not in shared)
