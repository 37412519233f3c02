"""pFedHN's rounds as plain loops (arXiv:2103.04628): a hypernetwork of torch's modules and
torch.optim.SGD.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, hits, train


@dataclass
class Hyper(Result):
    """Beside all clients' models: embeddings and hypernetwork after every round."""

    embeddings: list[Tensor] = field(default_factory=list)
    phis: list[Weights] = field(default_factory=list)


class HyperNetwork(nn.Module):
    """An embedding per client, an MLP, a linear map per generated tensor."""

    def __init__(self, clients: int, embed: int, hidden: int, depth: int, like: Weights):
        super().__init__()
        self.shapes = {name: value.shape for name, value in like.items()}
        self.embedding = nn.Embedding(clients, embed)
        self.mlp = nn.ModuleList(
            [nn.Linear(embed, hidden), *(nn.Linear(hidden, hidden) for _ in range(depth))]
        )
        self.out = nn.ModuleDict(
            {k.replace(".", "-"): nn.Linear(hidden, v.numel()) for k, v in like.items()}
        )

    def forward(self, i: int) -> Weights:
        z = self.mlp[0](self.embedding(torch.tensor(i)))
        for layer in self.mlp[1:]:
            z = layer(z.relu())
        return {
            name: self.out[name.replace(".", "-")](z).view(shape)
            for name, shape in self.shapes.items()
        }


def pfedhn(
    s: Setting,
    network: HyperNetwork,
    private: tuple[str, ...] = (),
    lr: float = 1e-2,
    embed_lr: float = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 1e-3,
    clip: float = 50.0,
    sequential: bool = False,
    dense: bool = False,
) -> Hyper:
    """`private`: names of the parameters that stay with the client."""
    result, network = Hyper(), copy.deepcopy(network)
    table = network.embedding.weight
    phi = [p for p in network.parameters() if p is not table]
    groups = [{"params": phi}, {"params": [table], "lr": embed_lr}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
    heads = [{name: s.initial[name] for name in private} for _ in s.clients]

    def model(i: int) -> Weights:
        with torch.no_grad():
            return {**{k: v.clone() for k, v in network(i).items()}, **heads[i]}

    def step(members: list[int], differences: list[Weights]) -> None:
        optimizer.zero_grad()
        for i, g in zip(members, differences, strict=True):
            made = network(i)
            torch.autograd.backward([made[k] for k in made], [g[k] / len(members) for k in made])
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        others = [i for i in range(len(s.clients)) if i not in members]
        kept = table.detach()[others].clone()
        speed = optimizer.state[table].get("momentum_buffer")
        kept_speed = torch.zeros_like(kept) if speed is None else speed[others].clone()
        optimizer.step()
        if not dense:
            with torch.no_grad():
                table[others] = kept
            if momentum:
                optimizer.state[table]["momentum_buffer"][others] = kept_speed

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([])
        result.after.append([])
        for members in [[i] for i in cohort] if sequential else [cohort]:
            differences = []
            for i in members:
                start = model(i)
                end = train(s, start, t, i)
                result.before[-1].append(hits(s, start, i))
                result.after[-1].append(hits(s, end, i))
                differences.append({k: start[k] - end[k] for k in start})
                heads[i] = {name: end[name] for name in private}
            step(members, differences)
        result.personal.append([model(i) for i in range(len(s.clients))])
        result.embeddings.append(table.detach().clone())
        result.phis.append(copy.deepcopy(network.state_dict()))
    return result
