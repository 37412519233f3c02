"""FedCP's rounds as plain loops (arXiv:2307.01217): modules of torch, one softmax written out."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average


@dataclass
class Policies(Result):
    """Beside the body: global heads and policy networks, all clients' heads and test logits, after
    every round.
    """

    heads: list[Weights] = field(default_factory=list)
    cpns: list[Weights] = field(default_factory=list)
    own: list[list[Weights]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)


class Client(nn.Module):
    """What a client trains (body, head, policy network), and beside it the frozen global head."""

    def __init__(self, s: Setting, body: Weights, head: Weights, cpn: Weights, shared: Weights):
        super().__init__()
        self.body = copy.deepcopy(s.module)
        self.body.classifier = nn.Identity()
        self.body.load_state_dict(body)
        classes, d = head["weight"].shape
        self.head, self.shared = nn.Linear(d, classes), nn.Linear(d, classes)
        self.cpn = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())
        self.head.load_state_dict(head)
        self.shared.load_state_dict(shared)
        self.cpn.load_state_dict(cpn)

    def context(self) -> Tensor:
        """Row sums of the head's weight, of length 1."""
        v = sum(row for row in self.head.weight.detach().clone())
        return v / v.norm()

    def forward(self, x: Tensor, v: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and features; noise: Gumbel's, `[batch, 2, d]`."""
        h = self.body(x)
        policy, d = self.cpn(h * v), len(v)
        personal, common = policy[:, :d], policy[:, d:]
        if noise is not None:
            personal, common = personal + noise[:, 0], common + noise[:, 1]
        r = personal.exp() / (personal.exp() + common.exp())
        s = common.exp() / (personal.exp() + common.exp())
        shared = F.linear(s * h, self.shared.weight.detach(), self.shared.bias.detach())
        return self.head(r * h) + shared, h


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Over all pairs, those of a sample with itself included."""

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        squared = (one[:, None] - other[None]).square().sum(2)
        return sum(torch.exp(-squared / (2 * width)) for width in (10, 15, 20, 50))

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()


def fedcp(
    s: Setting, cpn: Weights, lam: float, noise: Callable[[int, int, int], Tensor] | None
) -> Policies:
    """`cpn`: the initial policy network. `noise(t, i, epoch)`: Gumbel's, `[samples, 2, d]`, in an
    epoch's order.
    """
    result = Policies()
    initial = s.initial
    body = {k: v for k, v in initial.items() if not k.startswith("classifier")}
    shared = {
        k.removeprefix("classifier."): v for k, v in initial.items() if k.startswith("classifier")
    }
    own = [dict(shared) for _ in s.clients]

    def judge(model: Client, i: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            return model(s.clients[i].test_x, model.context())[0]

    def hits(model: Client, i: int) -> int:
        return int((judge(model, i).argmax(1) == s.clients[i].test_y).sum())

    def local(t: int, i: int) -> Client:
        model, client = Client(s, body, own[i], cpn, shared), s.clients[i]
        reference, v = copy.deepcopy(model.body).eval(), model.context()
        optimizer = torch.optim.SGD(
            [*model.body.parameters(), *model.head.parameters(), *model.cpn.parameters()],
            lr=s.lr,
            momentum=s.momentum,
            weight_decay=s.weight_decay,
        )
        model.train()
        for epoch in range(s.epochs):
            order = s.order(t, i, epoch, len(client.y))
            drawn = noise(t, i, epoch) if noise else None
            for first in range(0, len(order), s.batch_size):
                batch = order[first : first + s.batch_size]
                if len(batch) == 1:
                    continue
                now = None if drawn is None else drawn[first : first + s.batch_size]
                optimizer.zero_grad()
                logits, h = model(client.x[batch], v, now)
                loss = F.cross_entropy(logits, client.y[batch])
                if lam:
                    with torch.no_grad():
                        given = reference(client.x[batch])
                    loss = loss + lam * mmd(h, given)
                loss.backward()
                optimizer.step()
        return model

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(Client(s, body, own[i], cpn, shared), i) for i in cohort])
        trained = [local(t, i) for i in cohort]
        result.after.append([hits(model, i) for i, model in zip(cohort, trained, strict=True)])
        for i, model in zip(cohort, trained, strict=True):
            own[i] = copy.deepcopy(model.head.state_dict())
        mixed = [{k: own[i][k] / 2 + shared[k] / 2 for k in shared} for i in cohort]
        body = average(s, cohort, [model.body.state_dict() for model in trained])
        cpn = average(s, cohort, [model.cpn.state_dict() for model in trained])
        shared = average(s, cohort, mixed)
        result.shared.append(body)
        result.heads.append(shared)
        result.cpns.append(cpn)
        result.own.append([dict(head) for head in own])
        models = [Client(s, body, own[i], cpn, shared) for i in range(len(s.clients))]
        result.logits.append([judge(model, i) for i, model in enumerate(models)])
    return result
