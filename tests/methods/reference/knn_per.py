"""kNN-Per as plain loops over samples (arXiv:2111.09360), in float64: sorted distances, votes
counted one by one.
"""

import math

import torch
from torch import Tensor

from tests.methods.reference.heads import features, load
from tests.methods.reference.plain import Result, Setting, Weights, average, train


def voted(
    z: Tensor, keys: Tensor, labels: Tensor, k: int, scale: float, distance: str, classes: int
) -> list[float]:
    apart = []
    for j, key in enumerate(keys):
        square = sum((a - b) ** 2 for a, b in zip(z.tolist(), key.tolist(), strict=True))
        apart.append(
            (square / (scale * len(z)) if distance == "squared" else math.sqrt(square) / scale, j)
        )
    near = sorted(apart)[:k]
    total = sum(math.exp(-far) for far, _ in near)
    share = [0.0] * classes
    for far, j in near:
        share[int(labels[j])] += math.exp(-far) / total
    return share


def told(
    s: Setting,
    weights: Weights,
    i: int,
    x: Tensor,
    k: int,
    scale: float,
    distance: str,
    mix: str,
    classes: int,
) -> list[tuple[list[float], list[float]]]:
    """For each image p_knn, and the model's probabilities (or logits)."""
    model, client = load(s, weights).eval(), s.clients[i]
    with torch.no_grad():
        keys, z = features(model, client.x).double(), features(model, x).double()
        out = model(x).double()
    own = out if mix == "logits" else out.softmax(1)
    votes = [voted(row, keys, client.y, k, scale, distance, classes) for row in z]
    return list(zip(votes, own.tolist(), strict=True))


def mixed(pairs: list[tuple[list[float], list[float]]], lam: float) -> list[list[float]]:
    return [[lam * a + (1 - lam) * b for a, b in zip(*pair, strict=True)] for pair in pairs]


def right(scores: list[list[float]], y: Tensor) -> int:
    return sum(
        max(range(len(row)), key=row.__getitem__) == int(c)
        for row, c in zip(scores, y, strict=True)
    )


def tuned(pairs: list[tuple[list[float], list[float]]], y: Tensor) -> float:
    """The lam of most hits, then of least cross-entropy, then the least."""
    best = None
    for step in range(11):
        lam = step / 10
        scores = mixed(pairs, lam)
        loss = sum(-math.log(max(row[int(c)], 1e-38)) for row, c in zip(scores, y, strict=True))
        if best is None or (right(scores, y), -loss) > (best[0], -best[1] + 1e-9):
            best = right(scores, y), loss, lam
    return best[2]


def knn_per(
    s: Setting, k: int, lam: float | None, scale: float, distance: str, mix: str, classes: int
) -> tuple[Result, list[list[int]], list[list[float]]]:
    """FedAvg's result with this judgement of the cohort, hits of all after each round, and their
    lam.
    """
    result, shared, everyone, chosen = Result(), s.initial, [], []

    def judged(weights: Weights, i: int) -> tuple[int, float]:
        how, client, own = (k, scale, distance, mix, classes), s.clients[i], lam
        if own is None:
            own = tuned(told(s, weights, i, client.held_x, *how), client.held_y)
        return right(mixed(told(s, weights, i, client.test_x, *how), own), client.test_y), own

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([judged(shared, i)[0] for i in cohort])
        trained = [train(s, shared, t, i) for i in cohort]
        result.after.append([judged(w, i)[0] for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        hits, lams = zip(*(judged(shared, i) for i in range(len(s.clients))), strict=True)
        everyone.append(list(hits))
        chosen.append(list(lams))
    return result, everyone, chosen
