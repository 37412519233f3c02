"""FedALT: each client's own low-rank pair, mixed by the input with the mean of all other pairs."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import train_all_but
from fedpfl.methods.shared.low_rank import draw_factor
from fedpfl.methods.shared.method import Phase, send_if
from fedpfl.methods.shared.pool import ModelPool, sum_models

OWN_PAIR = (".lora_A", ".lora_B")  # A_k, B_k
REST_PAIR = (".lora_A1", ".lora_B1")  # RA_k, RB_k


@dataclass(frozen=True)
class FedALT(ModelPool):
    """FedALT (Bian et al., AAAI 2026, arXiv:2503.11880), with `adapter=lora adapter.pairs=2`.

    At each place of an adapted layer

        y = W0 x + (alpha / r) (m_0 B_k A_k x + m_1 RB_k RA_k x),    (m_0, m_1) = softmax(M_k x).

    A client goes on from its own A_k, B_k, M_k and head, never from an average, and sends A_k and
    B_k up. Before it trains or is judged it receives the rest-of-world pair, which holds still:
    RA_k and RB_k are the means of the other clients' last uploads, factor by factor and all alike;
    zero, and nothing is sent, until another has uploaded.

    first: whether A_k begins `common` to all, or as each client's `own` draw, as in the authors'
        code; a mean of such is a mean of unrelated bases, sqrt(K - 1) times shorter.

    Equations are those of the authors' code. There all clients take part, and a mixer reads tokens;
    here one of a convolution reads what its kernel sees. Their AdamW falls to 0 within each round,
    with dropout of the adapters' input. There is no head there; here it stays with the client, as
    BatchNorm's statistics do. The mean of factors is no mean of products.
    """

    mixes_samples = ""

    first: Literal["common", "own"] = "common"

    pairs: ClassVar[int] = 2

    def init(self, params, parts):
        """Leave the rest-of-world pairs out: they are found out anew each time."""
        server, _ = super().init(params, parts)
        rest_names = [name for name in params if name.endswith(REST_PAIR)]
        drawn_names = []
        if self.first == "own":
            drawn_names = [name for name in params if name.endswith(OWN_PAIR[0])]
        server = {**server, "drawn": tree.select(params, drawn_names)}
        return server, {"model": tree.drop(params, rest_names)}

    def before_turn(self, server, clients, read_states, generator):
        """Return the mean pairs of all other clients, and a flag: there are such."""

        def weigh(states: Tree) -> Tensor:
            is_other = clients["number"][:, None] != states["number"]
            return is_other.double()

        # ---- Sum A_k and B_k over all other clients.
        names = _own_pair(clients["model"])
        total, count = sum_models(server["pool"], clients, read_states, weigh=weigh, names=names)

        # ---- RA_k and RB_k: their plain means.
        def divide(leaf_sum: Tensor) -> Tensor:
            shape = (-1, *[1] * (leaf_sum.dim() - 1))
            divisor = count.clamp(min=1).view(shape)
            return (leaf_sum / divisor).float()

        rest_pair = {f"{name}1": divide(leaf_sum) for name, leaf_sum in total.items()}
        return {"rest": rest_pair, "others": count > 0}

    def sample(self, server, generator):
        """Draw the A of a client that has none yet."""
        draw = partial(draw_factor, generator=generator)
        return {"drawn": tree.map(draw, server["drawn"])}

    def download(self, server, client):
        """Return the rest-of-world pair, if there is one."""
        rest_pair = client["rest"]
        # A network without adapters has no pair.
        if not rest_pair:
            return {}
        return send_if(client["others"], rest_pair)

    def start(self, received, client):
        """Return the client's own entries beside the rest-of-world pair."""
        model = client["model"]
        initial = {**model, **client.get("drawn", {})}
        return {**tree.where(client["participated"], model, initial), **received}

    def phases(self, server, client, params, epochs):
        """Move all but the rest-of-world pair."""
        return [Phase(epochs, train_all_but(params, client["rest"]))]

    def finish(self, server, client, start, params):
        """Send the own pair up; keep it, the mixer and the head."""
        model = tree.select(params, client["model"])
        return _own_pair(model), {"model": model}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Note who has uploaded."""
        pool, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        return {**server, **pool}, clients

    def personal(self, server, client):
        """Return the whole mixture, with the latest uploads of other clients."""
        return self._begin(server, client)

    def finetuning(self, params, parts, epochs):
        """Move what training moves."""
        rest_names = [name for name in params if name.endswith(REST_PAIR)]
        return [Phase(epochs, train_all_but(params, rest_names))]


def _own_pair(model: Tree) -> Tree:
    """Return the entries of A_k and B_k."""
    names = [name for name in model if name.endswith(OWN_PAIR)]
    return tree.select(model, names)
