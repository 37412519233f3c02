"""FedProto as plain loops over clients and samples (arXiv:2105.00243): prototypes are a dict from
class to vector.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference.heads import features, load, minibatches, score, sgd
from tests.methods.reference.plain import Result, Setting, Weights

Prototypes = dict[int, Tensor]


def predicted(s: Setting, weights: Weights, known: Prototypes, i: int, judge: str) -> Tensor:
    """The labels said of a client's test images."""
    model = load(s, weights).eval()
    with torch.no_grad():
        z = features(model, s.clients[i].test_x)
        near = [c for c in known if judge == "nearest" or bool((s.clients[i].y == c).any())]
        if judge == "head" or not near:
            return model.classifier(z).argmax(1)
        return torch.tensor(
            [min(near, key=lambda c: float((row - known[c]).square().sum())) for row in z]
        ).long()


def means(pairs: list[tuple[Tensor, int]]) -> Prototypes:
    """By class, of rows with their labels."""
    return {
        c: torch.stack([row for row, y in pairs if y == c]).mean(0) for c in {y for _, y in pairs}
    }


def fedproto(
    s: Setting, lam: float, prototypes: str, weights: str, judge: str
) -> tuple[Result, list[Prototypes], list[list[Tensor]]]:
    """Personal models, the prototypes after each round, and what each client's test images are
    taken for.
    """
    result, known, history, labels = Result(), {}, [], []
    models = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        right = [score_of(s, models[i], known, i, judge) for i in cohort]
        result.before.append(right)
        found: dict[int, Prototypes] = {}
        for i in cohort:
            model = load(s, models[i]).train()
            optimizer, pairs = sgd(s, model.parameters()), []
            for epoch in range(s.epochs):
                if prototypes == "last_epoch":
                    pairs = []
                for x, y in minibatches(s, t, i, range(epoch, epoch + 1)):
                    z = features(model, x)
                    pull = sum(
                        ((z[j] - known[c]) ** 2).mean()
                        if (c := int(label)) in known
                        else 0.0 * z.sum()
                        for j, label in enumerate(y)
                    )
                    loss = F.cross_entropy(model.classifier(z), y) + lam * pull / len(y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    pairs += [
                        (row.detach().clone(), int(label)) for row, label in zip(z, y, strict=True)
                    ]
            if prototypes == "final":
                model.eval()
                with torch.no_grad():
                    z = features(model, s.clients[i].x)
                pairs = list(zip(z, s.clients[i].y.tolist(), strict=True))
            found[i] = means(pairs)
            models[i] = copy.deepcopy(model.state_dict())
        result.after.append([score_of(s, models[i], known, i, judge) for i in cohort])
        known = dict(known)
        for c in sorted({c for own in found.values() for c in own}):
            those = [i for i in cohort if c in found[i]]
            counts = [int((s.clients[i].y == c).sum()) if weights == "counts" else 1 for i in those]
            known[c] = sum(n * found[i][c] for n, i in zip(counts, those, strict=True)) / sum(
                counts
            )
        history.append(known)
        result.personal.append(list(models))
        labels.append([predicted(s, models[i], known, i, judge) for i in range(len(s.clients))])
    return result, history, labels


def score_of(s: Setting, weights: Weights, known: Prototypes, i: int, judge: str) -> int:
    told = predicted(s, weights, known, i, judge)
    return score(F.one_hot(told, 5), s.clients[i].test_y) if len(told) else 0
