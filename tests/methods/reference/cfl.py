"""CFL's rounds as plain loops (arXiv:1910.01991), over sets of clients' numbers."""

import itertools
from dataclasses import dataclass, field

import torch

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, train


@dataclass
class Tree(Result):
    """Beside each client's model: the clusters after every round, and how clear each split was."""

    clusters: list[list[list[int]]] = field(default_factory=list)


def similarity(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / max(float(a.norm() * b.norm()), 1e-12))


def merge(changes: dict[int, torch.Tensor], pick) -> list[list[int]]:
    """Two groups: those most alike are merged, over and over; `pick` of the similarities of two
    groups' members.
    """
    groups = [[i] for i in changes]
    while len(groups) > 2:
        a, b = max(
            itertools.combinations(range(len(groups)), 2),
            key=lambda pair: pick(
                similarity(changes[i], changes[j]) for i in groups[pair[0]] for j in groups[pair[1]]
            ),
        )
        groups[a] += groups.pop(b)
    return sorted(map(sorted, groups))


def cfl(
    s: Setting,
    eps1: float,
    eps2: float,
    warmup: int,
    linkage: str,
    most: int,
    parameters: list[str],
) -> Tree:
    result = Tree()
    clusters: list[tuple[list[int], Weights]] = [(list(range(len(s.clients))), s.initial)]
    buffers = {k: v for k, v in s.initial.items() if k not in parameters}
    own = [buffers for _ in s.clients]

    def model(i: int) -> Weights:
        return next(weights for members, weights in clusters if i in members) | own[i]

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, model(i), i) for i in cohort])
        trained = {i: train(s, model(i), t, i) for i in cohort}
        result.after.append([hits(s, trained[i], i) for i in cohort])
        after, born = [], []
        for members, weights in clusters:
            here = [i for i in members if i in cohort]
            groups = [here]
            if (
                here == members
                and len(here) > 2
                and t > warmup
                and len(clusters) + len(born) < most
            ):
                change = {
                    i: torch.cat(
                        [
                            (trained[i][k].double() - weights[k].double()).flatten()
                            for k in parameters
                        ]
                    )
                    for i in here
                }
                total = sum(len(s.clients[i].y) for i in here)
                mean = sum(len(s.clients[i].y) / total * change[i] for i in here)
                if mean.norm() < eps1 and max(d.norm() for d in change.values()) > eps2:
                    groups = merge(change, max if linkage == "single" else min)
            news = [
                {k: average(s, group, [trained[i] for i in group])[k] for k in parameters}
                for group in groups
                if group
            ]
            after.append((groups[0] if len(groups) > 1 else members, news[0] if news else weights))
            born += zip(groups[1:], news[1:], strict=True)
        clusters = after + born
        for i in cohort:
            own[i] = {k: trained[i][k] for k in buffers}
        assert sorted(i for members, _ in clusters for i in members) == list(range(len(s.clients)))
        result.clusters.append([members for members, _ in clusters])
        result.personal.append([model(i) for i in range(len(s.clients))])
    return result
