"""pFedSD's rounds as plain loops (IEEE TPDS 34(2), 2023)."""

import copy

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, average, hits


def taught(s: Setting, weights: Weights, teacher: Weights | None, lam: float, tau: float, still: bool, t: int, i: int):
    """LocalTrain beside a teacher, if there is one."""
    model, wise, client = copy.deepcopy(s.module), copy.deepcopy(s.module), s.clients[i]
    model.load_state_dict(weights)
    model.train()
    if teacher is not None:
        wise.load_state_dict(teacher)
        wise.train(not still)
    optimizer = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    for epoch in range(s.epochs):
        for batch in s.order(t, i, epoch, len(client.y)).split(s.batch_size):
            if len(batch) == 1:
                continue
            optimizer.zero_grad()
            logits = model(client.x[batch])
            loss = F.cross_entropy(logits, client.y[batch])
            if teacher is not None:
                with torch.no_grad():
                    target = F.softmax(wise(client.x[batch]) / tau, 1)
                loss = loss + lam * tau**2 * F.kl_div(F.log_softmax(logits / tau, 1), target, reduction="batchmean")
            loss.backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def pfedsd(s: Setting, lam: float, tau: float, still: bool = True) -> Result:
    """still: the teacher is in evaluation mode."""
    result, shared = Result(), s.initial
    names = [name for name, _ in s.module.named_parameters()]
    own: list[Weights] = [s.initial for _ in s.clients]
    teachers: list[Weights | None] = [None for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        starts = {i: {**own[i], **{k: shared[k] for k in names}} for i in cohort}  # statistics are the client's
        result.before.append([hits(s, starts[i], i) for i in cohort])
        for i in cohort:
            own[i] = teachers[i] = taught(s, starts[i], teachers[i], lam, tau, still, t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [{k: own[i][k] for k in names} for i in cohort])
        result.shared.append(shared)
        result.personal.append(list(own))
    return result
