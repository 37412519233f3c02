"""FLoRA: clients' pairs are stacked and folded into the network, and begin anew."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fedpfl.ground import tree
from fedpfl.ground.tree import Known
from fedpfl.methods.shared.low_rank import (
    RESIDUE,
    RankedPairs,
    draw_factor,
    list_pairs,
    multiply_pairs,
)


@dataclass(frozen=True)
class FLoRA(RankedPairs):
    """FLoRA (Wang et al., NeurIPS 2024, arXiv:2409.05976), with `adapter=lora`.

    The server stacks the clients' pairs, which is sum_k a_k B_k A_k without a cross term, for any
    ranks, and all fold it into their weights: y = W0 x + (alpha / r) (R x + B A x), where R is
    the sum of all rounds' stacks. A client begins with B = 0 and an A that the server draws for it
    anew each round; it holds its rank's rows. The head is averaged.

    R lies beside the model in the server's state (`lora_residue`) and travels as one matrix a
    layer, so that a client that was away lacks nothing; the authors send the last round's stack to
    everyone. Their clients draw A themselves, so that it does not travel here. They have no head.
    """

    has_residue: ClassVar[bool] = True
    server_sees = "each upload"

    def sample(self, server, generator):
        """Draw A anew."""
        names = [name for name, _ in list_pairs(server["model"]).values()]
        draw = partial(draw_factor, generator=generator)
        return {"drawn": tree.map(draw, tree.select(server["model"], names))}

    def download(self, server, client):
        """Send the residue and the entries beside pairs; pairs begin anew."""
        names = _pair_names(server["model"])
        pairs = tree.select(server["model"], names)
        return {
            "model": tree.drop(server["model"], names),
            "pairs": Known(pairs),
            "residue": server["residue"],
        }

    def start(self, received, client):
        """Return a fresh pair of the client's rank beside the received entries."""
        pairs = {**received["pairs"], **client.get("drawn", {})}
        held = tree.select(client["held"], pairs)
        return {**received["model"], **tree.apply_mask(pairs, held), **received["residue"]}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average entries beside pairs, and add the mean of products to the residue."""
        values = tree.unmask_received(uploads["model"])
        names = _pair_names(values)
        model = {**server["model"], **tree.mean(tree.drop(values, names), weight)}
        residue = {}
        for layer, (name_a, name_b) in list_pairs(values).items():
            old = server["residue"][layer + RESIDUE]
            product = multiply_pairs(values[name_a], values[name_b], weight)
            residue[layer + RESIDUE] = old + product.reshape(old.shape).float()
        return {**server, "model": model, "residue": residue}, clients


def _pair_names(model):
    """Return the names of all factors."""
    return [name for names in list_pairs(model).values() for name in names]
