"""FedAvg by kind: clients with networks of one kind average them among themselves."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.method import Method, pick_row


@dataclass(frozen=True)
class FedAvgByKind(Method):
    """FedAvg within each kind of network (model=mixed), the baseline of what kinds could share.

    Means weigh clients by their samples. With one network for all it is FedAvg (McMahan et al.,
    AISTATS 2017, arXiv:1602.05629) with BatchNorm statistics that stay with the client.
    """

    mixes_samples = ""
    server_sees = "each upload"
    takes_kinds = True

    def init(self, params, parts):
        """Lay the models of all kinds beside each other, as vectors of one length."""
        vectors = [tree.ravel(model) for model in parts.kinds or (params,)]
        longest = max(map(len, vectors))
        padded = [F.pad(vector, (0, longest - len(vector))) for vector in vectors]
        kind = torch.arange(len(vectors), device=padded[0].device) == parts.kind
        # The client's model is kept for its form alone.
        return {"models": torch.stack(padded)}, {"form": params, "kind": kind}

    def buffers(self):
        """Keep BatchNorm statistics on the client; those of kinds have different forms."""
        return {"main": "local"}

    def download(self, server, client):
        """Return the model of the client's kind."""
        number = client["kind"].int().argmax()
        return _mark_own(pick_row(server["models"], number), client["form"])

    def start(self, received, client):
        """Return that model in its form."""
        return tree.unravel(received[: tree.size(client["form"])], client["form"])

    def finish(self, server, client, start, params):
        """Send the model and its kind up."""
        vector = tree.ravel(params)
        padded = F.pad(vector, (0, server["models"].shape[1] - len(vector)))
        upload = {"model": _mark_own(padded, client["form"]), "kind": client["kind"]}
        return upload, {"form": client["form"], "kind": client["kind"]}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models of each kind; that of an absent kind stays."""
        models = server["models"]
        # [clients, kinds, longest], without copies
        vectors = uploads["model"].values[:, None].expand(len(weight), *models.shape)
        is_of_kind = uploads["kind"][:, :, None]
        return {"models": tree.masked_mean(models, vectors, is_of_kind, weight)}, clients


def _mark_own(vector: torch.Tensor, form: Tree) -> Agreed:
    """Return a padded vector; only the entries of a model travel."""
    positions = torch.arange(len(vector), device=vector.device)
    return Agreed(vector, positions < tree.size(form))
