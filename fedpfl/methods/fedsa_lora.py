"""FedSA-LoRA: of each low-rank pair A is shared, B personal."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.methods.shared.by_name import PersonalByName
from fedpfl.models import Parts


@dataclass(frozen=True)
class FedSALoRA(PersonalByName):
    """FedSA-LoRA (Guo et al., ICLR 2025, arXiv:2410.01463): of each low-rank pair A is shared.

    With `adapter=lora` an adapted layer is y = W0 x + (alpha / r) B_i A x. A client trains A, B_i
    and the head together, and sends A up, which is averaged with sample weights; B_i never leaves
    it. At first A is the same for all and B_i is zero, so a client that was never sampled has the
    network without an addition.

    head: `personal`, as in the authors' GLUE configuration, or `averaged`, which compares with
        FFA-LoRA and FedAvg; the paper's description names B alone.

    In the authors' published configuration all clients share one model object; its B and head
    the server's values never overwrite: each begins with those that the last one trained, and all
    are judged by the same. That is not offered. Their uploads are weighted alike,
    here by samples. Their rsLoRA is `adapter.alpha` times the root of `adapter.rank`.
    """

    head: Literal["personal", "averaged"] = "personal"

    pairs: ClassVar[int] = 1

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names of all B, and of the head if it is personal."""
        names = tuple(name for name in parts.body if name.endswith(".lora_B"))
        if self.head == "personal":
            names = (*names, *parts.head)
        return names
