"""Survival: risks that a network predicts, judged by times and events.

Labels are `[samples, 2]`: a time, and 1 if the event came then, or 0 if the sample was last seen
then. A risk is a log hazard: the greater, the sooner the event.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 1024
"""Samples that are compared with all samples at a time."""


class Horizon(NamedTuple):
    """Hold the time at which chances of survival are judged.

    Attributes:
        time: In the unit of the labels.
        hazard: The cumulative baseline hazard until then; None where samples are to give it.
    """

    time: float
    hazard: Tensor | None = None


def partial_losses(risk: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return Cox's negative log partial likelihood by sample, 0 without an event, `[samples]`.

    Events at one time are taken by Efron's rule.

    Args:
        risk: Of each sample.
        y: Labels.
        weight: 0 for samples that do not count, else 1.
    """
    time, event = y.unbind(1)
    order = torch.arange(len(time), device=time.device)
    is_at_risk = (time >= time[:, None]) & (weight > 0) | (order == order[:, None])
    risks = torch.where(is_at_risk, risk, -torch.inf)
    scale = risks.logsumexp(1).detach()  # against overflow
    # Of events at one time, each leaves the sum by as much as went before it.
    is_counted = event * weight
    is_tied = (time == time[:, None]) * is_counted * is_counted[:, None]
    earlier = (is_tied * (order < order[:, None])).sum(1) / is_tied.sum(1).clamp(min=1)
    sums = ((risks - scale[:, None]).exp() * (1 - earlier[:, None] * is_tied)).sum(1)
    return is_counted * (scale + sums.log() - risk)


def measure_survival(risk: Tensor, y: Tensor, horizon: Horizon) -> dict[str, Tensor]:
    """Return a client's measures, float64, or its baseline hazard where the horizon has none."""
    risk = risk.double()
    if horizon.hazard is None:
        return {"hazard": _sum_hazards(risk, y, horizon.time)}
    concordant, comparable = count_pairs(risk, y, torch.ones_like(risk)[None])
    brier = _score_chances((-horizon.hazard * risk.exp()).exp(), y, horizon.time)
    return {"concordant": concordant[0], "comparable": comparable[0], "brier": brier}


def estimate_survival(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return times, and Kaplan-Meier's share of samples without an event up to each."""
    times, numbers, counts = y[:, 0].unique(return_inverse=True, return_counts=True)
    events = torch.zeros(len(times), dtype=torch.float64, device=y.device)
    events = events.index_add(0, numbers, y[:, 1].double())
    at_risk = counts.flip(0).cumsum(0).flip(0)
    return times, (1 - events / at_risk).cumprod(0)


def _sum_hazards(risk: Tensor, y: Tensor, horizon: float) -> Tensor:
    """Return Breslow's cumulative baseline hazard at a time."""
    order = y[:, 0].argsort()
    time, event = y[order].T.contiguous()
    at_risk = risk[order].exp().flip(0).cumsum(0).flip(0)
    terms = event / at_risk[torch.searchsorted(time, time)]  # samples of one time are all at risk
    return terms[time <= horizon].sum()


def count_pairs(risk: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Count Harrell's concordant pairs, a tie being a half, and the comparable ones.

    Args:
        risk: Of each sample.
        y: Labels.
        weights: How often each sample is there, `[counts, samples]`.
    """
    time, event = y.unbind(1)
    concordant = comparable = risk.new_zeros(len(weights))
    for rows in torch.arange(len(risk), device=risk.device).split(ROWS):
        own = time[rows, None]
        is_first = (event[rows, None] > 0) & ((own < time) | (own == time) & (event == 0))
        difference = risk[rows, None] - risk
        hits = (difference > 0).double() + (difference == 0).double() / 2
        earlier = weights[:, rows]
        concordant = concordant + (earlier * (weights @ (is_first * hits).T)).sum(1)
        comparable = comparable + (earlier * (weights @ is_first.double().T)).sum(1)
    return concordant, comparable


def _score_chances(chances: Tensor, y: Tensor, horizon: float) -> Tensor:
    """Return the Brier score of chances to outlive a time, weighted by censoring.

    That is Graf et al.'s (1999); the censoring is the samples' own, by Kaplan and Meier.
    """
    time, event = y.T.contiguous()
    times, shares = estimate_survival(torch.stack([time, 1 - event], 1))
    shares = torch.cat([shares.new_ones(1), shares])
    has_outlived = time > horizon
    before = shares[torch.searchsorted(times, time)]
    until = shares[(times <= horizon).sum()]
    weights = torch.where(has_outlived, 1 / until, event / before)
    # Who was last seen before counts nowhere.
    return (torch.nan_to_num(weights, 0, 0) * (has_outlived.double() - chances) ** 2).mean()
