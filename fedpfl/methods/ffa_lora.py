"""FFA-LoRA: of each low-rank pair A never moves, B is averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.ground import tree
from fedpfl.ground.tree import Known
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class FFALoRA(Method):
    """FFA-LoRA (Sun et al., ICLR 2024, arXiv:2403.12313): of each low-rank pair A never moves.

    With `adapter=lora` an adapted layer is y = W0 x + (alpha / r) B A0 x. A0 is A as it was
    drawn, the same for all, who have it from the beginning. Clients train B, and the server averages:
    sum a_i (B_i A0) = (sum a_i B_i) A0, so the average of the adapted weights is exact, which it is
    not where both factors are averaged. One model for all; `eval.finetune_epochs` moves what
    training does.

    head: `averaged`, as in FedSA-LoRA's comparison, or `frozen` as it began. The choice of the paper
        with it could not be checked.
    """

    mixes_samples = ""

    head: Literal["averaged", "frozen"] = "averaged"

    pairs: ClassVar[int] = 1

    server_sees = "mean of uploads"

    def init(self, params, parts):
        """Set apart what never moves."""
        fixed_names = [name for name in parts.body if name.endswith(".lora_A")]
        if self.head == "frozen":
            fixed_names += parts.head
        server = {
            "model": tree.drop(params, fixed_names),
            "fixed": tree.select(params, fixed_names),
        }
        return server, {}

    def download(self, server, client):
        """Return B and the head; A was known from the beginning."""
        return {"model": server["model"], "fixed": Known(server["fixed"])}

    def start(self, received, client):
        """Return the latest B beside A."""
        return {**received["model"], **received["fixed"]}

    def phases(self, server, client, params, epochs):
        """Move all but A."""
        return [Phase(epochs, train_only(params, server["model"]))]

    def finish(self, server, client, start, params):
        """Send up what moved."""
        return tree.select(params, server["model"]), client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average what moved."""
        return {**server, "model": tree.mean(uploads, weight)}, clients

    def finetuning(self, params, parts, epochs):
        """Move what training moves."""
        # Fine-tuning is not given the server's state; `init` says what moves.
        server, _ = self.init(params, parts)
        return [Phase(epochs, train_only(params, server["model"]))]
