"""Update-magnitude personalisation: a reconstruction of how PSPFL selects parameters, not PSPFL."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Agreed, Masked
from fedpfl.methods.shared import importance
from fedpfl.methods.shared.by_mask import PersonalByMask


@dataclass(frozen=True)
class PSPFL(PersonalByMask):
    """Personalisation by update magnitude, after PSPFL (Zhou et al., IEEE TMC 2024).

    A RECONSTRUCTION: neither full text nor code of PSPFL is public, and its abstract describes an
    acceleration over base stations, which is not here. Do not present its numbers as PSPFL's. It is
    the score that FedOBP (arXiv: 2604.16574, eq. 5) attributes to PSPFL and FedSelect: how far an
    entry moved in the client's last local training.

    Entries that moved further than the q-quantile of all entries are personal and start from the
    client's last model, the rest from the global one. A client that never trained has no personal
    entries. A client is evaluated by its model right after local training; one that was never
    sampled, by the global model. BatchNorm statistics stay with the client.

    q: quantile in [0, 1]; 1 is FedAvg. In FedOBP's comparison 0.1 was best on CIFAR10, 0.9 on
        CIFAR100.
    upload: the `shared` entries, averaged over those who sent them (PSPFL's partial transmission),
        or `all` (FedOBP's comparison).
    """

    q: Proportion = 0.1
    upload: Literal["shared", "all"] = "shared"

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing personal, by scores of zero."""
        return params, {"model": params, "score": tree.full_like(params, 0.0)}

    def prepare(self, server, client):
        """Choose the personal entries."""
        return {**client, "mask": importance.mask_above_quantile(client["score"], self.q)}

    def download(self, server, client):
        """Return the shared entries; which those are is counted here."""
        return Masked(server, tree.invert(client["mask"]))

    def finish(self, server, client, start, params):
        """Send the entries that `upload` names; how far each moved is the next score."""
        upload = params
        if self.upload == "shared":
            upload = Agreed(params, tree.invert(client["mask"]))
        score = importance.movement_score(start, params)
        return upload, {"model": params, "score": score}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the uploads entry by entry; entries without an upload stay."""
        if self.upload == "all":
            return tree.mean(uploads, weight), clients
        return tree.masked_mean(server, uploads.values, uploads.mask, weight), clients

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return tree.where(client["participated"], client["model"], server)
