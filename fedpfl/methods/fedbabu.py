"""FedBABU: only the body is trained together; heads are fitted when a client is judged."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Method, Phase
from fedpfl.models import Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FedBABU(Method):
    """FedBABU (Oh, Kim and Yun, ICLR 2022, arXiv:2106.06042): the body is trained under a random head that never moves.

    The method's result is its accuracy AFTER fine-tuning (`eval.finetune_epochs`); before, its head is random.

    finetune: what fine-tuning moves: `all` (the paper's default), `head` or `body`.
    """

    finetune: Literal["all", "head", "body"] = "all"

    def __post_init__(self) -> None:
        self.check(self.finetune in ("all", "head", "body"), "finetune", "all, head or body")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The head is apart, so that nothing can average it."""
        head = {name: params[name] for name in parts.head}
        return {"body": {name: params[name] for name in parts.body}, "head": head}, {}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The body under the common head."""
        return {**server["body"], **server["head"]}

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The body; the head was known from the beginning."""
        return server["body"]

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """The head is left out of differentiation."""
        return [Phase(epochs, {name: name in server["body"] for name in params})]

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The body."""
        return {name: end[name] for name in server["body"]}, mine

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """The bodies' mean under the head as it was."""
        return {**server, "body": tree.mean(uploads, weight)}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The global model; fine-tuning makes it personal."""
        return self.start(server, mine)

    def tune(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """As `finetune` says."""
        moving = {"all": tuple(params), "head": parts.head, "body": parts.body}[self.finetune]
        return [Phase(epochs, {name: name in moving for name in params})]
