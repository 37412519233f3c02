"""FFA-LoRA: of each low-rank pair A never moves, B is averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.methods.shared.by_name import FixedByName, train_all_but
from fedpfl.methods.shared.method import Phase
from fedpfl.models import Parts


@dataclass(frozen=True)
class FFALoRA(FixedByName):
    """FFA-LoRA (Sun et al., ICLR 2024, arXiv:2403.12313): of each low-rank pair A never moves.

    With `adapter=lora` an adapted layer is y = W0 x + (alpha / r) B A0 x. A0 is A as it was
    drawn, the same for all, who have it from the beginning. Clients train B, and the server averages:
    sum a_i (B_i A0) = (sum a_i B_i) A0, so the average of the adapted weights is exact, which it is
    not where both factors are averaged. One model for all; `eval.finetune_epochs` moves what
    training does.

    head: `averaged`, as in FedSA-LoRA's comparison, or `frozen` as it began. The choice of the paper
        with it could not be checked.
    """

    head: Literal["averaged", "frozen"] = "averaged"

    pairs: ClassVar[int] = 1

    def _fixed(self, parts: Parts) -> list[str]:
        """Return the names of all A, and of the head if it is frozen."""
        names = [name for name in parts.body if name.endswith(".lora_A")]
        if self.head == "frozen":
            names += parts.head
        return names

    def finetuning(self, params, parts, epochs):
        """Move what training moves."""
        return [Phase(epochs, train_all_but(params, self._fixed(parts)))]
