"""FedGen's rounds as plain loops (arXiv:2105.10056): a generator of torch's modules, trained by
torch.optim.Adam.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load


@dataclass
class Generated(Result):
    """Beside the global model: the generator's state after every round."""

    generators: list[Weights] = field(default_factory=list)


class Generator(nn.Module):
    """Features of labels and noise."""

    def __init__(self, noise: int, hidden: int, classes: int, d: int):
        super().__init__()
        self.classes = classes
        self.first, self.norm, self.last = (
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, d),
        )

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        given = torch.cat([noise, F.one_hot(y, self.classes).float()], 1)
        return self.last(self.norm(self.first(given)).relu())


def diversity(features: Tensor, noise: Tensor) -> Tensor:
    total = torch.zeros(())
    for a, e in zip(features, noise, strict=True):
        for b, f in zip(features, noise, strict=True):
            total = total + (a - b).abs().mean() * (e - f).square().mean()
    return torch.exp(-total / len(features) ** 2)


def fedgen(
    s: Setting,
    generator: Generator,
    random: Callable[[int, int, int], Tensor],
    drawn: Callable[[int, int, list[int]], list[tuple[Tensor, Tensor]]],
    alpha: float = 10.0,
    beta: float = 10.0,
    decay: float = 0.98,
    eta: float = 1.0,
    noise: int = 32,
    lr: float = 3e-4,
    weight_decay: float = 1e-2,
    teacher: str = "weighted",
    labels: str = "uniform",
) -> Generated:
    """`random(t, i, epoch)`: numbers `[samples, 2 noise + 1]` in an epoch's order, noise for the
    sample's label, noise for another label, and by which that is drawn. `drawn(t, labels)`: the
    server's batches of labels and noise.
    """
    result, shared, generator = Generated(), s.initial, copy.deepcopy(generator)
    classes = generator.classes
    optimizer = torch.optim.Adam(generator.parameters(), lr=lr, weight_decay=weight_decay)
    seen = torch.zeros(classes)
    counts = [torch.bincount(client.y, minlength=classes).float() for client in s.clients]

    def head(model: nn.Module, z: Tensor) -> Tensor:
        return model.classifier(z)

    def other(number: float) -> int:
        """The label at this place of the distribution."""
        share = (
            seen / seen.sum() if labels == "frequency" else (seen > 0).float() / (seen > 0).sum()
        )
        total = 0.0
        for label in range(classes):
            total += float(share[label])
            if number < total:
                return label
        return int((seen > 0).nonzero()[-1])

    def local(t: int, i: int) -> Weights:
        model, client = load(s, shared).train(), s.clients[i]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
        )
        generator.eval()
        for epoch in range(s.epochs):
            order, numbers = s.order(t, i, epoch, len(client.y)), random(t, i, epoch)
            for first in range(0, len(order), s.batch_size):
                batch, own = (
                    order[first : first + s.batch_size],
                    numbers[first : first + s.batch_size],
                )
                if len(batch) == 1:
                    continue
                x, y = client.x[batch], client.y[batch]
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                if t > 1:
                    with torch.no_grad():
                        made = generator(y, own[:, :noise])
                        target = head(model, made).softmax(1)
                        label = torch.tensor([other(float(u)) for u in own[:, -1]])
                        features = generator(label, own[:, noise : 2 * noise])
                    more, less = (
                        max(1e-4, size * decay ** (t - 1)) if size else 0.0
                        for size in (alpha, beta)
                    )
                    loss = loss + more * F.cross_entropy(head(model, features), label)
                    loss = loss + less * F.kl_div(
                        logits.log_softmax(1), target, reduction="batchmean"
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return copy.deepcopy(model.state_dict())

    def learn(t: int, cohort: list[int], trained: list[Weights]) -> None:
        """The server's part."""
        table = torch.stack([counts[i] for i in cohort])
        qualified = (table.sum(0) > 0).nonzero().flatten().tolist()
        models = []
        for weights in trained:
            models.append(copy.deepcopy(s.module))
            models[-1].load_state_dict(weights)
        generator.train()
        optimizer.param_groups[0]["lr"] = lr * decay ** (t - 1)
        for y, eps in drawn(t, qualified):
            made = generator(y, eps)
            answers = [head(model, made) for model in models]
            if teacher == "mean_logits":
                loss = F.cross_entropy(sum(answers) / len(answers), y)
            else:
                loss = torch.zeros(())
                for k, answer in enumerate(answers):
                    share = table[k, y] / table[:, y].sum(0)
                    loss = loss + (share * F.cross_entropy(answer, y, reduction="none")).mean()
            loss = loss + eta * diversity(made, eps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained = [local(t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        learn(t, cohort, trained)
        seen = seen + torch.stack([counts[i] for i in cohort]).sum(0)
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
        result.generators.append(copy.deepcopy(generator.state_dict()))
    return result
