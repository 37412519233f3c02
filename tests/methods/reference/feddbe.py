"""FedDBE's rounds as plain loops (arXiv:2311.14975 and the authors' code)."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference.moon import representation, still
from tests.methods.reference.plain import Result, Setting, Weights, average, load

Order = Callable[[int, int, int, int], Tensor]


@dataclass
class Biased(Result):
    """Beside the global model: the consensual mean, and after every round the clients' memories."""

    mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    biases: list[list[Tensor]] = field(default_factory=list)


def local(
    s: Setting, shared: Weights, u: Tensor, mean: Tensor | None, kappa: float, rho: float, lr: float, order: Order,
    t: int, i: int,
) -> tuple[Weights, Tensor, Tensor, int]:  # fmt: skip
    """The model, u, the running mean and the number of steps; without `mean` u and the regulariser
    are left out.
    """
    model, client = load(s, shared).train(), s.clients[i]
    u, running, steps = u.clone().requires_grad_(), torch.zeros_like(u), 0
    optimizers = [
        torch.optim.SGD(
            model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
        ),
        torch.optim.SGD([u], lr=lr),
    ]
    for epoch in range(s.epochs):
        for batch in order(t, i, epoch, len(client.y)).split(s.batch_size):
            if len(batch) == 1:
                continue
            logits, z = representation(model, client.x[batch])
            running = (1 - rho) * running.detach() + rho * z.mean(0)
            if mean is None:
                loss = F.cross_entropy(logits, client.y[batch])
            else:
                loss = F.cross_entropy(model.classifier(z + u), client.y[batch])
                loss = loss + kappa * F.mse_loss(running, mean) / 2
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            steps += 1
    return copy.deepcopy(model.state_dict()), u.detach(), running.detach(), steps


def feddbe(s: Setting, kappa: float, rho: float, lr: float, first: Order, source: str) -> Biased:
    """`lr`: u's. `first`: batch orders of the initial pass. `source`: what the mean is of, that or
    the data.
    """
    shared = s.initial
    u = [torch.zeros(s.module.classifier.in_features) for _ in s.clients]
    total, mean = 0, torch.zeros_like(u[0])
    for i, client in enumerate(s.clients):
        if source == "data":
            own, steps = representation(still(s, shared), client.x)[1].mean(0), 1
        else:
            *_, own, steps = local(s, shared, u[i], None, kappa, rho, lr, first, 1, i)
        if steps:
            total, mean = total + len(client.y), mean + len(client.y) * own
    mean = mean / total
    result = Biased(mean=mean)

    def hits(weights: Weights, i: int) -> int:
        model = still(s, weights)
        z = representation(model, s.clients[i].test_x)[1]
        return int((model.classifier(z + u[i]).argmax(1) == s.clients[i].test_y).sum())

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(shared, i) for i in cohort])
        trained = []
        for i in cohort:
            weights, u[i], _, _ = local(s, shared, u[i], mean, kappa, rho, lr, s.order, t, i)
            trained.append(weights)
        result.after.append([hits(w, i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
        result.biases.append(list(u))
    return result
