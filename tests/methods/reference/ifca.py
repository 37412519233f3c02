"""IFCA's rounds as plain loops (arXiv:2006.04088, Algorithm 1 with model averaging, and weight
sharing).
"""

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, train


@dataclass
class Clusters(Result):
    """Beside each client's model: all clusters' models, and the cluster of each of the cohort, per
    round.
    """

    models: list[list[Weights]] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)


def nearest(s: Setting, models: list[Weights], i: int, margins: list[float]) -> int:
    """The first model of least training loss."""
    losses = []
    for weights in models:
        model = load(s, weights).eval()
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model(s.clients[i].x).double(), s.clients[i].y)))
    margins += [b - a for a, b in zip(sorted(losses)[:1], sorted(losses)[1:2], strict=True)]
    return losses.index(min(losses))


def ifca(s: Setting, models: list[Weights], shared: tuple[str, ...] = ()) -> Clusters:
    """`models`: the clusters' initial ones. `shared`: prefixes of what is averaged over the whole
    cohort.
    """
    result, models = Clusters(), [copy.deepcopy(model) for model in models]
    for t, cohort in enumerate(s.cohorts, 1):
        of = {i: nearest(s, models, i, result.margins) for i in cohort}
        result.before.append([hits(s, models[of[i]], i) for i in cohort])
        trained = {i: train(s, models[of[i]], t, i) for i in cohort}
        result.after.append([hits(s, trained[i], i) for i in cohort])
        everyone = average(s, cohort, list(trained.values()))
        for j in range(len(models)):
            if members := [i for i in cohort if of[i] == j]:
                models[j] = average(s, members, [trained[i] for i in members])
            models[j] = models[j] | {
                k: v for k, v in everyone.items() if k.startswith(shared or ("\0",))
            }
        result.models.append(list(models))
        result.members.append(list(of.values()))
        result.personal.append(
            [models[nearest(s, models, i, result.margins)] for i in range(len(s.clients))]
        )
    return result
