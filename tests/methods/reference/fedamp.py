"""FedAMP's and HeurFedAMP's rounds as plain loops (arXiv:2007.03797), message weights pair by pair."""

import math

from tests.methods.reference.plain import Result, Setting, Weights, hits, train


def pairs(a: Weights, b: Weights):
    return [(a[k].double(), b[k].double()) for k in a]


def attention(
    kind: str, w: dict[int, Weights], i: int, sigma: float, share: float, clients: int
) -> dict[int, float]:
    """Row i of xi."""
    others = [j for j in w if j != i]
    if kind == "fedamp":
        alpha = share * sigma / (clients - 1)
        squared = {
            j: sum(float(((a - b) ** 2).sum()) for a, b in pairs(w[i], w[j])) for j in others
        }
        xi = {j: alpha * math.exp(-squared[j] / sigma) / sigma for j in others}
    else:
        dot = {j: sum(float((a * b).sum()) for a, b in pairs(w[i], w[j])) for j in w}
        length = {j: math.sqrt(sum(float((a * a).sum()) for a, _ in pairs(w[j], w[j]))) for j in w}
        rising = {j: math.exp(sigma * dot[j] / (length[i] * length[j])) for j in others}
        xi = {j: share * rising[j] / sum(rising.values()) for j in others}
    return {**xi, i: 1 - sum(xi.values())}


def fedamp(
    s: Setting, kind: str, sigma: float, share: float, pull: float, cloud_start: bool, last: bool
) -> Result:
    """`last`: the models of the last round alone are mixed. `personal` are the w_i."""
    result, parameters = Result(), [k for k, _ in s.module.named_parameters()]
    own = [s.initial for _ in s.clients]
    seen: dict[int, Weights] = {}
    for t, cohort in enumerate(s.cohorts, 1):
        starts, clouds = {}, {}
        for i in cohort:
            starts[i] = own[i]
            if t > 1 and any(i in earlier for earlier in s.cohorts[: t - 1]):
                mine = {k: own[i][k] for k in parameters}
                models = {j: {k: w[k] for k in parameters} for j, w in seen.items()} | {i: mine}
                xi = attention(kind, models, i, sigma, share, len(s.clients))
                clouds[i] = {
                    k: sum(xi[j] * models[j][k].double() for j in models).float()
                    for k in parameters
                }
                if cloud_start:
                    starts[i] = own[i] | clouds[i]
        result.before.append([hits(s, starts[i], i) for i in cohort])
        for i in cohort:
            own[i] = train(s, starts[i], t, i, near=clouds.get(i), lam=pull)
        result.after.append([hits(s, own[i], i) for i in cohort])
        seen = {**({} if last else seen), **{i: own[i] for i in cohort}}
        result.personal.append(list(own))
    return result
