"""FedBABU: only the body is trained together; heads are fitted when a client is evaluated."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.methods.shared.by_name import FixedByName, train_only
from fedpfl.methods.shared.method import Phase
from fedpfl.models import Parts


@dataclass(frozen=True)
class FedBABU(FixedByName):
    """FedBABU (Oh, Kim and Yun, ICLR 2022, arXiv:2106.06042).

    The body is trained under a fixed head, which is random and never moves. The method's result is its accuracy AFTER fine-tuning
    (`eval.finetune_epochs`); before, its head is random.

    finetune: what fine-tuning moves: `all` (the paper's default), `head` or `body`.
    """

    finetune: Literal["all", "head", "body"] = "all"

    _trained_key: ClassVar[str] = "body"
    _fixed_key: ClassVar[str] = "head"

    def _fixed(self, parts: Parts) -> tuple[str, ...]:
        """Return the names of the head's entries."""
        return parts.head

    def finetuning(self, params, parts, epochs):
        """Move what `finetune` says."""
        names = {"all": tuple(params), "head": parts.head, "body": parts.body}[self.finetune]
        return [Phase(epochs, train_only(params, names))]
