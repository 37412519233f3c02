"""APFL's rounds as plain loops (arXiv:2003.13461, Algorithm 1; alpha as in the authors' code), an
optimizer a model.
"""

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, load, minibatches


@dataclass
class Mixtures(Result):
    """Beside the private models: the clients' alphas and all clients' test logits, after every
    round.
    """

    alphas: list[list[float]] = field(default_factory=list)
    logits: list[list[Tensor]] = field(default_factory=list)


def module(s: Setting, weights: Weights) -> nn.Module:
    model = load(s, weights)
    return model.train()


def blend(s: Setting, w: nn.Module, v: nn.Module, alpha: float) -> nn.Module:
    """Mixed parameters and v's buffers."""
    model = module(s, v.state_dict())
    with torch.no_grad():
        for p, a, b in zip(model.parameters(), v.parameters(), w.parameters(), strict=True):
            p.copy_(alpha * a + (1 - alpha) * b)
    return model


def predict(s: Setting, w: Weights, v: Weights, alpha: float, mixing: str, i: int) -> Tensor:
    shared, own, x = module(s, w).eval(), module(s, v).eval(), s.clients[i].test_x
    with torch.no_grad():
        if mixing == "param":
            return blend(s, shared, own, alpha).eval()(x)
        return alpha * own(x) + (1 - alpha) * shared(x)


def slope(
    s: Setting, w: nn.Module, v: nn.Module, alpha: float, mixing: str, x: Tensor, y: Tensor
) -> float:
    """Of the mixture's loss in alpha, as the specification takes it, on copies."""
    w, v = copy.deepcopy(w), copy.deepcopy(v)
    if mixing == "param":
        model = blend(s, w, v, alpha)
        F.cross_entropy(model(x), y).backward()
        grads = [p.grad for p in model.parameters()]
    else:
        F.cross_entropy(alpha * v(x) + (1 - alpha) * w(x), y).backward()
        grads = [
            alpha * a.grad + (1 - alpha) * b.grad
            for a, b in zip(v.parameters(), w.parameters(), strict=True)
        ]
    return sum(
        float(((a - b) * g).detach().double().sum())
        for a, b, g in zip(v.parameters(), w.parameters(), grads, strict=True)
    )


def private_step(
    s: Setting, w: nn.Module, v: nn.Module, alpha: float, mixing: str, x: Tensor, y: Tensor
) -> None:
    """Leave the gradient of the mixture's loss in v."""
    if mixing == "param":
        model = blend(s, w, v, alpha)
        F.cross_entropy(model(x), y).backward()
        for own, p in zip(v.parameters(), model.parameters(), strict=True):
            own.grad = alpha * p.grad
        for own, b in zip(v.buffers(), model.buffers(), strict=True):
            own.copy_(b)
        return
    given = copy.deepcopy(w)
    with torch.no_grad():
        shared = given(x)
    F.cross_entropy(alpha * v(x) + (1 - alpha) * shared, y).backward()


def local(
    s: Setting,
    shared: Weights,
    own: Weights,
    alpha: float,
    t: int,
    i: int,
    mixing: str,
    lr: float,
    decay: float,
) -> tuple[Weights, Weights, float]:
    """Epochs of both models; `lr` and `decay` are alpha's, None holds it still."""
    w, v, first = module(s, shared), module(s, own), True
    optimizers = [
        torch.optim.SGD(
            model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
        )
        for model in (w, v)
    ]
    for x, y in minibatches(s, t, i, range(s.epochs)):
        new = alpha
        if first and lr:
            g = slope(s, w, v, alpha, mixing, x, y)
            new = min(1.0, max(0.0, alpha - lr * (g + decay * alpha)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        private_step(s, w, v, alpha, mixing, x, y)
        F.cross_entropy(w(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        alpha, first = new, False
    return copy.deepcopy(w.state_dict()), copy.deepcopy(v.state_dict()), alpha


def apfl(s: Setting, alpha: float, mixing: str, lr: float, decay: float) -> Mixtures:
    """`lr` 0: alpha is fixed."""
    result, shared = Mixtures(), s.initial
    own, alphas = [s.initial for _ in s.clients], [alpha] * len(s.clients)

    def correct(w: Weights, i: int) -> int:
        return int(
            (predict(s, w, own[i], alphas[i], mixing, i).argmax(1) == s.clients[i].test_y).sum()
        )

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([correct(shared, i) for i in cohort])
        trained = []
        for i in cohort:
            w, own[i], alphas[i] = local(s, shared, own[i], alphas[i], t, i, mixing, lr, decay)
            trained.append(w)
        result.after.append([correct(w, i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append(list(own))
        result.alphas.append(list(alphas))
        result.logits.append(
            [predict(s, shared, own[i], alphas[i], mixing, i) for i in range(len(s.clients))]
        )
    return result
