"""The rounds of the methods as plain loops over clients, from their papers.

One model, `torch.optim.SGD`, nothing shared with the package. Batch orders and cohorts are inputs.
Sources: arXiv:1602.05629 (FedAvg), arXiv:2604.16574 eqs. 7-9, 19, 21 (FedOBP), arXiv:1912.00818
(FedPer), arXiv:2012.04221 (Ditto), arXiv:2102.07078 (FedRep), arXiv:2001.01523 (LG-FedAvg),
arXiv:2106.06042 (FedBABU), arXiv:2102.07623 (FedBN), arXiv:1812.06127 (FedProx), arXiv:1909.06335
(FedAvgM), arXiv:2003.00295 (FedAdam, FedYogi), arXiv:1910.06378 (SCAFFOLD).
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]


@dataclass
class Client:
    """Normalised images and labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    held_x: Tensor
    held_y: Tensor


@dataclass
class Setting:
    """Everything that is given. `order(round, client, epoch, samples)` is a permutation; rounds
    count from 1.
    """

    module: nn.Module
    clients: list[Client]
    cohorts: list[list[int]]
    order: Callable[[int, int, int, int], Tensor]
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    @property
    def initial(self) -> Weights:
        return copy.deepcopy(self.module.state_dict())


@dataclass
class Result:
    """After every round: the global weights and every client's personal weights; per round and
    cohort member: hits.
    """

    shared: list[Weights] = field(default_factory=list)
    personal: list[list[Weights]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """Relative distance between the scores on both sides of each threshold; where q is chosen,
    between losses.
    """
    counts: list[int] = field(default_factory=list)
    """Personal entries at each selection of a training client."""
    chosen: list[list[float]] = field(default_factory=list)
    """Per round and cohort member: its q."""


def load(s: Setting, weights: Weights) -> nn.Module:
    model = copy.deepcopy(s.module)
    model.load_state_dict(weights)
    return model


def minibatches(
    s: Setting, t: int, i: int, epochs: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels in the round's order; a lone sample is left out."""
    client = s.clients[i]
    for epoch in epochs:
        for rows in s.order(t, i, epoch, len(client.y)).split(s.batch_size):
            if len(rows) > 1:
                yield client.x[rows], client.y[rows]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def train(
    s: Setting,
    weights: Weights,
    t: int,
    i: int,
    epochs: int | None = None,
    near: Weights | None = None,
    lam: float = 0.0,
    moving: Callable[[str], bool] = lambda name: True,
    first: int = 0,
    still: bool = False,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    after_gradient: Callable[[nn.Module], None] | None = None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Weights:
    """LocalTrain: epochs of SGD on `loss(model, x, y)`, or on the setting's loss of the outputs.

    near: the gradient of lam/2 |v - near|^2 is added. moving: which parameters are optimised.
    first: the number of the first epoch's order. still: with the model in evaluation mode.
    """
    model = load(s, weights).train(not still)
    for name, p in model.named_parameters():
        p.requires_grad_(moving(name))
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=s.lr,
        momentum=s.momentum,
        weight_decay=s.weight_decay,
    )
    for x, y in minibatches(
        s, t, i, range(first, first + (s.epochs if epochs is None else epochs))
    ):
        optimizer.zero_grad()
        (loss(model, x, y) if loss else s.loss(model(x), y)).backward()
        if near is not None:
            for name, p in model.named_parameters():
                p.grad += lam * (p.detach() - near[name])
        if after_gradient:
            after_gradient(model)
        optimizer.step()
        if after_step:
            with torch.no_grad():
                after_step(model, optimizer)
    return copy.deepcopy(model.state_dict())


def hits(s: Setting, weights: Weights, i: int) -> int:
    """Correct predictions of a client's test samples; 0 where labels are no classes."""
    if s.clients[i].test_y.dtype != torch.int64:
        return 0
    model = load(s, weights).eval()
    with torch.no_grad():
        return int((model(s.clients[i].test_x).argmax(1) == s.clients[i].test_y).sum())


def average(s: Setting, cohort: list[int], uploads: list[Weights]) -> Weights:
    """Sum a_i theta_i, in float64."""
    total = sum(len(s.clients[i].y) for i in cohort)
    return {
        name: sum(
            len(s.clients[i].y) / total * u[name].double()
            for i, u in zip(cohort, uploads, strict=True)
        ).float()
        for name in uploads[0]
    }


def fedavg(s: Setting, mu: float = 0.0) -> Result:
    """FedProx with mu."""
    result, shared = Result(), s.initial
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained = [train(s, shared, t, i, near=shared if mu else None, lam=mu) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
    return result


def fedopt(
    s: Setting, kind: str, lr: float, beta1: float, beta2: float = 0.0, tau: float = 0.0
) -> Result:
    """Server optimisers in float64: `avgm` (its beta1 is the momentum), `adam` and `yogi` of
    Algorithm 2.
    """
    result, shared = Result(), s.initial
    m = {k: torch.zeros_like(x, dtype=torch.double) for k, x in shared.items()}
    v = {k: torch.full_like(x, tau**2, dtype=torch.double) for k, x in shared.items()}
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained = [train(s, shared, t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        mean, moved = average(s, cohort, trained), {}
        for k, x in shared.items():
            delta = mean[k].double() - x.double()
            if kind == "avgm":
                m[k] = beta1 * m[k] + delta
                step = lr * m[k]
            else:
                m[k] = beta1 * m[k] + (1 - beta1) * delta
                if kind == "adam":
                    v[k] = beta2 * v[k] + (1 - beta2) * delta**2
                else:
                    v[k] = v[k] - (1 - beta2) * delta**2 * torch.sign(v[k] - delta**2)
                step = lr * m[k] / (v[k] ** 0.5 + tau)
            moved[k] = (x.double() + step).float()
        shared = moved
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
    return result


def fedobp(s: Setting, q: float) -> Result:
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]

    def merged(i: int) -> tuple[Weights, int]:
        scores = {
            k: (own[i][k].numpy() - shared[k].numpy()).astype(np.float64) ** 2 for k in shared
        }
        everything = np.sort(np.concatenate([score.ravel() for score in scores.values()]))
        threshold = np.quantile(everything, q, method="linear")
        above, below = everything[everything > threshold], everything[everything <= threshold]
        if len(above) and len(below):
            result.margins.append(float((above[0] - below[-1]) / above[0]))
        chosen = {k: torch.from_numpy(score > threshold) for k, score in scores.items()}
        return {k: torch.where(chosen[k], own[i][k], shared[k]) for k in shared}, len(above)

    for t, cohort in enumerate(s.cohorts, 1):
        starts = []
        for i in cohort:
            start, count = merged(i)
            starts.append(start)
            result.counts.append(count)
        result.before.append([hits(s, w, i) for i, w in zip(cohort, starts, strict=True)])
        for i, start in zip(cohort, starts, strict=True):
            own[i] = train(s, start, t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [own[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append([merged(i)[0] for i in range(len(s.clients))])
    return result


def fedobp_choosing(s: Setting, several: list[float]) -> Result:
    """FedOBP whose clients choose q, as its docstring has it; nan is what a client does not
    receive.
    """
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]
    entries = sum(leaf.numel() for leaf in shared.values())
    rank = {q: int(np.floor(q * (entries - 1) + 1e-9)) for q in several}

    def received(i: int) -> Weights:
        """Step 1, at the server."""
        scores = {k: (own[i][k] - shared[k]).double() ** 2 for k in shared}
        threshold = np.sort(np.concatenate([score.numpy().ravel() for score in scores.values()]))[
            rank[max(several)]
        ]
        return {k: torch.where(scores[k] > threshold, torch.nan, shared[k]) for k in shared}

    def held(weights: Weights, i: int) -> tuple[int, float]:
        model = copy.deepcopy(s.module)
        model.load_state_dict(weights)
        model.eval()
        right, loss = 0, 0.0
        with torch.no_grad():
            for logits, y in zip(
                model(s.clients[i].held_x).double(), s.clients[i].held_y, strict=True
            ):
                right += int(logits.argmax() == y)
                loss -= float(logits.log_softmax(0)[y])
        return right, loss

    def start(i: int) -> tuple[Weights, float]:
        """The rest of step 1 and steps 2 and 3, at the client, which has only what it received."""
        got, best = received(i), None
        scores = {k: ((own[i][k] - got[k]).double() ** 2).nan_to_num(nan=torch.inf) for k in got}
        ranked = np.sort(np.concatenate([score.numpy().ravel() for score in scores.values()]))
        for q in sorted(several, reverse=True):
            mine = {k: (scores[k] > ranked[rank[q]]) | got[k].isnan() for k in got}
            model = {k: torch.where(mine[k], own[i][k], got[k]) for k in got}
            right, loss = held(model, i)
            if (
                best is not None
                and right == best[0]
                and any((model[k] != best[2][k]).any() for k in got)
            ):
                result.margins += [abs(loss - best[1])] * min(1, len(s.clients[i].held_y))
            if best is None or right > best[0] or (right == best[0] and loss < best[1]):
                best = right, loss, model, q
        return best[2], best[3]

    for t, cohort in enumerate(s.cohorts, 1):
        starts, chosen = zip(*map(start, cohort), strict=True)
        result.chosen.append(list(chosen))
        result.before.append([hits(s, w, i) for i, w in zip(cohort, starts, strict=True)])
        for i, weights in zip(cohort, starts, strict=True):
            own[i] = train(s, weights, t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [own[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append([start(i)[0] for i in range(len(s.clients))])
    return result


def fedper(s: Setting, head: tuple[str, ...]) -> Result:
    result, shared = Result(), s.initial
    heads = [{k: s.initial[k] for k in head} for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, {**shared, **heads[i]}, i) for i in cohort])
        trained = [train(s, {**shared, **heads[i]}, t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            heads[i] = {k: w[k] for k in head}
        shared = {**average(s, cohort, trained), **{k: s.initial[k] for k in head}}
        result.shared.append(shared)
        result.personal.append([{**shared, **h} for h in heads])
    return result


def split(
    s: Setting, own: Callable[[str], bool], local: Callable[[Weights, int, int], Weights]
) -> Result:
    """Clients keep the entries that are their `own`, the others are averaged; `local` is a client's
    training.
    """
    result, shared = Result(), {k: v for k, v in s.initial.items() if not own(k)}
    kept = [{k: v for k, v in s.initial.items() if own(k)} for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, {**shared, **kept[i]}, i) for i in cohort])
        trained = [local({**shared, **kept[i]}, t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            kept[i] = {k: w[k] for k in kept[i]}
        shared = {k: v for k, v in average(s, cohort, trained).items() if k in shared}
        result.shared.append(shared)
        result.personal.append([{**shared, **own} for own in kept])
    return result


def lg_fedavg(s: Setting, shared: tuple[str, ...]) -> Result:
    """`shared`: prefixes of the parameters that travel."""
    return split(s, lambda name: not name.startswith(shared), lambda w, t, i: train(s, w, t, i))


def fedbn(s: Setting, norms: tuple[str, ...]) -> Result:
    """`norms`: prefixes of the BatchNorm layers."""
    return split(s, lambda name: name.startswith(norms), lambda w, t, i: train(s, w, t, i))


def fedrep(s: Setting, head: tuple[str, ...], head_epochs: int, body_epochs: int) -> Result:
    def local(w: Weights, t: int, i: int) -> Weights:
        w = train(s, w, t, i, head_epochs, moving=lambda name: name in head, still=True)
        return train(
            s, w, t, i, body_epochs, moving=lambda name: name not in head, first=head_epochs
        )

    return split(s, lambda name: name in head, local)


def fedbabu(s: Setting, head: tuple[str, ...]) -> Result:
    """Nobody's head ever moves, so nobody's differs."""

    def local(w: Weights, t: int, i: int) -> Weights:
        return train(s, w, t, i, moving=lambda name: name not in head)

    return split(s, lambda name: name in head, local)


def scaffold(s: Setting, server_lr: float) -> Result:
    """Option II by its formula, which holds without momentum and weight decay."""
    result, shared = Result(), s.initial
    zeros = {k: torch.zeros_like(v) for k, v in shared.items()}
    control, own = zeros, [zeros for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained, changes = [], []
        for i in cohort:
            steps, model, client = 0, copy.deepcopy(s.module), s.clients[i]
            model.load_state_dict(shared)
            for epoch in range(s.epochs):
                for batch in s.order(t, i, epoch, len(client.y)).split(s.batch_size):
                    if len(batch) == 1:
                        continue
                    loss = F.cross_entropy(model(client.x[batch]), client.y[batch])
                    grads = torch.autograd.grad(loss, list(model.parameters()))
                    with torch.no_grad():
                        for (k, p), g in zip(model.named_parameters(), grads, strict=True):
                            p -= s.lr * (g + control[k] - own[i][k])
                    steps += 1
            end = copy.deepcopy(model.state_dict())
            trained.append(end)
            new = own[i]
            if steps:
                new = {
                    k: own[i][k] - control[k] + (shared[k] - end[k]) / (steps * s.lr)
                    for k in shared
                }
            changes.append({k: new[k] - own[i][k] for k in shared})
            own[i] = new
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        m = len(cohort)
        shared = {k: v + server_lr * sum(w[k] - v for w in trained) / m for k, v in shared.items()}
        control = {
            k: v + sum(change[k] for change in changes) / len(s.clients) for k, v in control.items()
        }
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
    return result


def ditto(s: Setting, lam: float, personal_epochs: int) -> Result:
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, own[i], i) for i in cohort])
        trained = [train(s, shared, t, i) for i in cohort]
        for i in cohort:
            own[i] = train(s, own[i], t, i, personal_epochs, near=shared, lam=lam)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append(list(own))
    return result


def local_only(s: Setting) -> Result:
    result = Result()
    own = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, own[i], i) for i in cohort])
        for i in cohort:
            own[i] = train(s, own[i], t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        result.shared.append({})
        result.personal.append(list(own))
    return result
