"""FedFomo's rounds as plain loops (arXiv:2012.08565), where all that trained last are candidates."""

import copy
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, hits, load, train


@dataclass
class Affinities(Result):
    """Beside each client's model: P after every round, and all weights that were found."""

    affinity: list[list[list[float]]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def held(s: Setting, weights: Weights, i: int) -> float:
    """Mean loss on V_i."""
    model = load(s, weights).eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(s.clients[i].held_x).double(), s.clients[i].held_y))


def fedfomo(s: Setting, keep: bool, everybody: bool) -> Affinities:
    """`keep`: the fallback. `everybody`: whoever trained is offered, not the last round's clients
    alone.
    """
    result, parameters = Affinities(), [k for k, _ in s.module.named_parameters()]
    own, old = [s.initial for _ in s.clients], [s.initial for _ in s.clients]
    affinity = [[0.0] * len(s.clients) for _ in s.clients]
    trained: set[int] = set()
    offered: list[int] = []
    for t, cohort in enumerate(s.cohorts, 1):
        starts = {}
        for i in cohort:
            starts[i] = own[i]
            if i in trained and len(s.clients[i].held_y):
                w = {}
                for n in [i, *(n for n in offered if n != i)]:
                    apart = math.sqrt(
                        sum(
                            float(((own[n][k] - old[i][k]).double() ** 2).sum()) for k in parameters
                        )
                    )
                    w[n] = (held(s, old[i], i) - held(s, own[n], i)) / apart if apart else 0.0
                    if n != i:
                        affinity[i][n] += w[n]
                result.weights += w.values()
                good = {n: value for n, value in w.items() if value > 0}
                if good:
                    starts[i] = {
                        k: sum(
                            value / sum(good.values()) * own[n][k].double()
                            for n, value in good.items()
                        ).float()
                        if own[i][k].is_floating_point()
                        else max(own[n][k] for n in good)
                        for k in own[i]
                    }
                elif not keep:
                    starts[i] = old[i]
        result.before.append([hits(s, starts[i], i) for i in cohort])
        ends = {i: train(s, starts[i], t, i) for i in cohort}
        for i in cohort:
            own[i], old[i] = ends[i], starts[i]
        result.after.append([hits(s, own[i], i) for i in cohort])
        trained |= set(cohort)
        offered = sorted(trained) if everybody else cohort
        result.personal.append(list(own))
        result.affinity.append(copy.deepcopy(affinity))
    return result
