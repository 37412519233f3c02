"""pFedSD's rounds as plain loops (IEEE TPDS 34(2), 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, train


def taught(
    s: Setting,
    weights: Weights,
    teacher: Weights | None,
    lam: float,
    tau: float,
    still: bool,
    t: int,
    i: int,
):
    """LocalTrain beside a teacher, if there is one."""
    if teacher is None:
        return train(s, weights, t, i)
    wise = load(s, teacher).train(not still)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        with torch.no_grad():
            target = F.softmax(wise(x) / tau, 1)
        apart = F.kl_div(F.log_softmax(logits / tau, 1), target, reduction="batchmean")
        return F.cross_entropy(logits, y) + lam * tau**2 * apart

    return train(s, weights, t, i, loss=loss)


def pfedsd(s: Setting, lam: float, tau: float, still: bool = True) -> Result:
    """still: the teacher is in evaluation mode."""
    result, shared = Result(), s.initial
    names = [name for name, _ in s.module.named_parameters()]
    own: list[Weights] = [s.initial for _ in s.clients]
    teachers: list[Weights | None] = [None for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        starts = {
            i: {**own[i], **{k: shared[k] for k in names}} for i in cohort
        }  # statistics are the client's
        result.before.append([hits(s, starts[i], i) for i in cohort])
        for i in cohort:
            own[i] = teachers[i] = taught(s, starts[i], teachers[i], lam, tau, still, t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [{k: own[i][k] for k in names} for i in cohort])
        result.shared.append(shared)
        result.personal.append(list(own))
    return result
