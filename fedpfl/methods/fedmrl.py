"""FedMRL: a common network's features are mixed into each client's own, as nested ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.common import CommonBeside
from fedpfl.methods.shared.layers import init_linear, seeded_generator
from fedpfl.models import Bound


@dataclass(frozen=True)
class FedMRL(CommonBeside):
    """FedMRL (Yi et al., NeurIPS 2024, arXiv:2406.00488).

    A client joins the d features of the common network's body and the D of its body, which its
    projector, a linear map, turns into D. The client's head reads all of them, the common head the
    first d, and everything is trained on the sum of both cross-entropies. The common network goes
    up and is averaged; a client is evaluated by its own head. d must be at most D. HtFLlib begins
    each round with the initial projector.
    """

    mixes_samples = ""
    server_sees = "mean of uploads"
    takes_kinds = True

    _kept: ClassVar[tuple[str, ...]] = ("body", "head", "projector")

    def _make_own(self, params, parts):
        """Return the client's network and its projector, initialised as torch does."""
        parts.require_linear_end()
        head = tree.select(params, parts.head)
        width = params[parts.head_weight].shape[1]
        common_width = parts.common[parts.common_head[0]].shape[1]
        if common_width > width:
            raise FedpflError(
                f"method=fedmrl: model.common has {common_width} features, and clients' networks"
                f" {width}; it must not have more (model.features)"
            )
        projector = init_linear(common_width + width, width, seeded_generator(parts.seed))
        return {
            "body": tree.select(params, parts.body),
            "head": head,
            "projector": tree.as_type_of(projector, params[parts.head_weight]),
        }

    def init(self, params, parts):
        """Set the common head apart, too."""
        server, client = super().init(params, parts)
        head = tree.select(server["common"], parts.common_head)
        body = tree.drop(server["common"], parts.common_head)
        return {"common": {"body": body, "head": head}}, client

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy of both heads."""
        logits, common_logits = _answer_both(net, params, batch.x)
        return batch.loss(logits) + batch.loss(common_logits)

    def predict(self, net, params, batch):
        """Return the logits of the client's head."""
        return _answer_both(net, params, batch.x)[0]


def _answer_both(net: Bound, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of the client's head and of the common one."""
    common = {**params["common"]["body"], **params["common"]["head"]}
    common_z = net.common.features(common, x)[1]
    z = net.features({**params["body"], **params["head"]}, x)[1]
    fused = F.linear(torch.cat([common_z, z], 1), **params["projector"])
    nested = fused[:, : common_z.shape[1]]
    logits = F.linear(fused, *params["head"].values())
    return logits.float(), F.linear(nested, *params["common"]["head"].values()).float()
