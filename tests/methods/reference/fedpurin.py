"""FedPURIN's and FedCAC's rounds as plain loops (arXiv:2510.16065, arXiv:2309.11103)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, hits, train


@dataclass
class Critical(Result):
    """overlaps: how far, relatively, the threshold is from the overlap next to it. partners: how
    many, in turn.
    """

    overlaps: list[float] = field(default_factory=list)
    partners: list[int] = field(default_factory=list)


def train_and_keep_gradient(
    s: Setting, weights: Weights, t: int, i: int
) -> tuple[Weights, Weights]:
    """LocalTrain; also the gradient of the last minibatch, before its step."""
    last = {name: torch.zeros_like(p) for name, p in s.module.named_parameters()}

    def keep_gradient(model: nn.Module) -> None:
        last.update({name: p.grad.clone() for name, p in model.named_parameters()})

    return train(s, weights, t, i, after_gradient=keep_gradient), last


def chosen(score: Tensor, tau: float, eps: float, margins: list[float]) -> Tensor:
    """One tensor's mask, from its sorted scores."""
    ordered = sorted(score.flatten().tolist(), reverse=True)
    q = int(tau * len(ordered) + 1e-9)
    if q == 0:
        return torch.zeros(score.shape, dtype=torch.bool)
    h = ordered[q - 1]
    if h <= eps and any(value > eps for value in ordered):
        h = min(value for value in ordered if value > eps)
    below = [value for value in ordered if value < h]
    if below:
        margins.append((h - below[0]) / h)
    return score >= h


def purin(
    s: Setting,
    tau: float = 0.5,
    beta: int = 100,
    eps: float = 1e-10,
    score: str = "gradient",
    hessian: bool = False,
    own: tuple[str, ...] = (),
    dense_upload: bool = False,
    dense_judge: bool = False,
) -> Critical:
    """own: prefixes of the parameters that stay with the client. FedCAC: score="delta",
    dense_upload, dense_judge.
    """
    result = Critical()
    names = [name for name, _ in s.module.named_parameters() if not name.startswith(own or ("-",))]
    mean = {k: s.initial[k] for k in names}
    model = [s.initial for _ in s.clients]  # as trained last
    judged = [s.initial for _ in s.clients]
    delta = [dict(mean) for _ in s.clients]
    mask = [
        {k: torch.zeros(s.initial[k].shape, dtype=torch.bool) for k in names} for _ in s.clients
    ]

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {}
        for i in cohort:
            starts[i] = {
                **model[i],
                **{k: torch.where(mask[i][k], delta[i][k], mean[k]) for k in names},
            }
        result.before.append([hits(s, starts[i], i) for i in cohort])
        sent = {}
        for i in cohort:
            model[i], last = train_and_keep_gradient(s, starts[i], t, i)
            for k in names:
                g = last[k] if score == "gradient" else model[i][k] - starts[i][k]
                product = g * model[i][k]
                worth = torch.abs(-product + product**2 / 2) if hessian else torch.abs(product)
                mask[i][k] = chosen(worth, tau, eps, result.margins)
            result.counts.append(sum(int(m.sum()) for m in mask[i].values()))
            sparse = {k: model[i][k] * mask[i][k] for k in names}
            sent[i] = {k: model[i][k] for k in names} if dense_upload else sparse
            judged[i] = model[i] if dense_judge else {**model[i], **sparse}
        result.after.append([hits(s, judged[i], i) for i in cohort])

        bits = {i: torch.cat([mask[i][k].flatten() for k in names]).double() for i in cohort}
        overlap = {}
        for i in cohort:
            for j in cohort:
                if i != j:
                    size = float(bits[i].sum())
                    overlap[i, j] = (
                        1 - float((bits[i] - bits[j]).abs().sum()) / (2 * size) if size else 0.0
                    )
        average, highest = sum(overlap.values()) / len(overlap), max(overlap.values())
        threshold = average + t / beta * (highest - average)
        if t != beta:
            result.overlaps.append(
                min(abs(value - threshold) for value in overlap.values()) / highest
            )
        for i in cohort:
            group = [j for j in cohort if j == i or overlap[i, j] >= threshold - 1e-12]
            result.partners.append(len(group) - 1)
            delta[i] = {
                k: (sum(sent[j][k].double() for j in group) / len(group)).float() for k in names
            }
        samples = sum(len(s.clients[i].y) for i in cohort)
        mean = {
            k: sum(len(s.clients[i].y) / samples * sent[i][k].double() for i in cohort).float()
            for k in names
        }
        result.shared.append(mean)
        result.personal.append(list(judged))
    return result
