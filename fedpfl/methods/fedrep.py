"""FedRep: a personal head that is trained before the shared body under it."""

from dataclasses import dataclass

from fedpfl.ground.ranges import WholeNumber
from fedpfl.methods.shared.by_name import PersonalInit, train_all_but, train_only
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedRep(PersonalInit):
    """FedRep (Collins et al., ICML 2021): a personal head, trained before the shared body under it.

    In the head phase the body's BatchNorm layers use their statistics and do not move them.

    personal_init: a client's head until it was sampled; `server_average` is FL-bench's.
    body_epochs: E_b, the last of the local epochs.
    head_epochs: E_h; None: the epochs that are left (FL-bench: 4 + 1).
    """

    mixes_samples = ""

    body_epochs: WholeNumber = 1
    head_epochs: WholeNumber | None = None

    def phases(self, server, client, params, epochs):
        """Train the head, then the body."""
        head_epochs = self.head_epochs
        if head_epochs is None:
            head_epochs = max(0, epochs - self.body_epochs)
        head = train_only(params, client["own"])
        body = train_all_but(params, client["own"])
        return [
            Phase(head_epochs, head, loss=self._head_loss),
            Phase(self.body_epochs, body),
        ]

    def finetuning(self, params, parts, epochs):
        """Move the head alone, as the authors retrain heads in their last round."""
        return [Phase(epochs, train_only(params, parts.head))]
