"""FedBABU: only the body is trained together; heads are fitted when a client is evaluated."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.ground.tree import Known
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class FedBABU(Method):
    """FedBABU (Oh, Kim and Yun, ICLR 2022, arXiv:2106.06042).

    The body is trained under a fixed head, which is random and never moves. The method's result is its accuracy AFTER fine-tuning
    (`eval.finetune_epochs`); before, its head is random.

    finetune: what fine-tuning moves: `all` (the paper's default), `head` or `body`.
    """

    mixes_samples = ""

    finetune: Literal["all", "head", "body"] = "all"

    server_sees = "mean of uploads"

    def init(self, params, parts):
        """Set the head apart, so that nothing can average it."""
        server = {
            "body": tree.select(params, parts.body),
            "head": tree.select(params, parts.head),
        }
        return server, {}

    def download(self, server, client):
        """Return the body; the head was known from the beginning."""
        return {"body": server["body"], "head": Known(server["head"])}

    def start(self, received, client):
        """Return the body under the common head."""
        return {**received["body"], **received["head"]}

    def phases(self, server, client, params, epochs):
        """Move the body alone."""
        return [Phase(epochs, train_only(params, server["body"]))]

    def finish(self, server, client, start, params):
        """Send the body up."""
        return tree.select(params, server["body"]), client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the bodies under the head as it was."""
        return {**server, "body": tree.mean(uploads, weight)}, clients

    def finetuning(self, params, parts, epochs):
        """Move what `finetune` says."""
        names = {"all": tuple(params), "head": parts.head, "body": parts.body}[self.finetune]
        return [Phase(epochs, train_only(params, names))]
