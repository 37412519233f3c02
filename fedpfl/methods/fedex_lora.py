"""FedEx-LoRA: factors are averaged, and the mean of products lacks nothing by a residue."""

from dataclasses import dataclass
from typing import ClassVar

from fedpfl.ground import tree
from fedpfl.methods.shared.low_rank import (
    RESIDUE,
    RankedPairs,
    list_pairs,
    multiply_pair,
    multiply_pairs,
)


@dataclass(frozen=True)
class FedExLoRA(RankedPairs):
    """FedEx-LoRA (Singhal et al., ACL 2025, arXiv:2410.09432), with `adapter=lora`.

    The server averages A_k and B_k. The difference of the mean of products and the product of means
    goes to a residue, which all have in their frozen weights:

        y = W0 x + (alpha / r) (R x + B A x),    R <- R + sum_k a_k B_k A_k - B A,

    so that the new model is the mean of the clients' ones exactly. Ranks that differ are ours: the
    places of B A that a client has no rank for it finds in its R, where they hold still, and they
    count in the means as they were. So all begin with the same model.

    R lies beside the model in the server's state (`lora_residue`) and travels as one matrix a
    layer; the authors send the round's part of it as factors. They weigh clients alike, here by
    samples.
    """

    has_residue: ClassVar[bool] = True
    server_sees = "each upload"

    def download(self, server, client):
        """Send the client's part of pairs; the rest of B A is in the residue."""
        missing = tree.apply_mask(server["model"], tree.invert(client["held"]))
        residue = {}
        for layer, (name_a, name_b) in list_pairs(missing).items():
            shared = server["residue"][layer + RESIDUE]
            product = multiply_pair(missing[name_a], missing[name_b])
            residue[layer + RESIDUE] = shared + product.reshape(shared.shape).float()
        return {**super().download(server, client), "residue": residue}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the factors, and add to the residue what their product lacks."""
        uploaded = uploads["model"]
        frozen = tree.repeat(server["model"], len(weight))
        values = tree.where(uploaded.mask, uploaded.values, frozen)
        model = tree.mean(values, weight)
        residue = {}
        for layer, (name_a, name_b) in list_pairs(model).items():
            mean_product = multiply_pairs(values[name_a], values[name_b], weight)
            lack = mean_product - multiply_pair(model[name_a], model[name_b])
            old = server["residue"][layer + RESIDUE]
            residue[layer + RESIDUE] = old + lack.reshape(old.shape).float()
        return {**server, "model": model, "residue": residue}, clients
